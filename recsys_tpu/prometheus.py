"""A run's newest numbers as Prometheus text, for node_exporter's textfile collector; no port is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def write_gauges(path: Path, gauges: Mapping[str, float], labels: Mapping[str, str]) -> None:
    """Replace `path` by one gauge a line, ``recsys_tpu_<name>{<labels>} <value>``; readers see whole files.

    Characters that a metric name cannot have become underscores.
    """
    text = ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items())
    lines = []
    for name, value in sorted(gauges.items()):
        metric = f"recsys_tpu_{_NOT_A_NAME.sub('_', name)}"
        lines += [f"# TYPE {metric} gauge", f"{metric}{{{text}}} {float(value)!r}"]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
