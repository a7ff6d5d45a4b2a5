"""The dry run's own checks; the compiler is replaced, `tests/aot` is about it."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from recsys_tpu.config import Config, load_config
from recsys_tpu.dry_run import DryRunFailed, dry_run
from recsys_tpu.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"
GIB = 2**30


def config(*overrides: str) -> Config:
    # without the five tables of 40 million rows planning takes a second
    small = [f"model.num_embeddings.C{feature}=50000" for feature in (1, 10, 20, 21, 22)]
    return load_config(CONFIGS / "criteo_1tb_dlrm_dcnv2.yaml", [*small, *overrides])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the compiler's process reports, and the command that it got."""
    report: dict[str, Any] = {
        "error": None, "compile_seconds": 12.0, "peak_bytes": 3 * GIB, "temp_bytes": GIB,
        "bytes_accessed": 5 * GIB, "flops": 2e12, "collectives": {"all-to-all": 2},
    }  # fmt: skip

    def run(command: list[str], **_: Any) -> Any:
        report["command"] = command
        written = {name: value for name, value in report.items() if name != "command"}
        Path(command[command.index("--json") + 1]).write_text(json.dumps([written]))
        return SimpleNamespace(stdout="", stderr="", returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return report


def result(made: Config, *topologies: str) -> str:
    console = Console(record=True, width=160)
    try:
        dry_run(made, topologies, console, environment={})
    except DryRunFailed as error:
        console.print(error)
    return console.export_text()


def test_a_config_that_fits_is_all_green(compiler: dict[str, Any]) -> None:
    text = result(config(), "v6e:2x4")
    assert "FAILS" not in text
    for expected in (
        "logits",
        "(8,) for 8 samples",
        "214",
        "8 on 1 hosts",
        "65,536 over 8 = 8,192",
        "3.00 of",
    ):
        assert expected in text, expected
    assert compiler["command"][compiler["command"].index("--topology") + 1] == "v6e:2x4"


@pytest.mark.parametrize(
    ("overrides", "report", "message"),
    [
        (["data.lanes=4"], {}, "lanes over ranks: 4 over 8"),
        (["model.num_embeddings.C1=2000000000"], {}, "plan: "),
        ([], {"peak_bytes": 40 * GIB}, "HBM peak, compiled: 40.00 of"),
        ([], {"error": "no such op"}, "compiled, own kernels: no such op"),
        ([], {"error": "no such op"}, "compiled, XLA's gathers: no such op"),
    ],
    ids=["lanes", "too large", "compiled too large", "refused", "refused twice"],
)
def test_what_would_fail_on_the_slice_fails_here(
    overrides: list[str], report: dict[str, Any], message: str, compiler: dict[str, Any]
) -> None:
    compiler |= report
    text = result(config(*overrides), "v6e:2x4")
    assert f"v6e:2x4: {message}" in text


def test_unknown_table_sizes_and_features_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_embeddings"):
        result(load_config(CONFIGS / "criteo_1tb_dlrm_smoke.yaml"), "v6e:2x4")
    with pytest.raises(ValueError, match=r"data\.multi_hot\.sizes names D1"):
        result(config("data.multi_hot.sizes.D1=3"), "v6e:2x4")
