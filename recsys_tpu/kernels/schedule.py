"""Static schedule of a TensorCore kernel: the bundles of its loops, from libtpu's dump.

A bundle issues in one cycle.  Static means: a loop body counts once, and waiting for memory not at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^\s*0x([0-9a-f]+)\s+([A-Z]{2})?\s*:\s*(>*)")


@dataclass(frozen=True)
class Loop:
    """One loop: its nesting depth, the bundles of its body, and what they do."""

    depth: int
    bundles: int
    copies_in: int
    copies_out: int
    loads: int


def dump_flags(folder: Path) -> str:
    """LIBTPU_INIT_ARGS under which the compiler leaves its schedules in `folder`; set before libtpu loads."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def loops_of(folder: Path, kernel: str) -> list[Loop]:
    """The loops of the newest dump of a kernel, in program order.  Raises FileNotFoundError without one."""
    files = [
        path for path in folder.glob(f"*{kernel}*final_bundles.txt") if "schedule-analysis" not in path.name
    ]
    if not files:
        raise FileNotFoundError(f"no schedule of kernel {kernel!r} in {folder}")
    newest = max(files, key=lambda path: path.stat().st_mtime)
    return parse_loops(newest.read_text(encoding="utf-8"))


def parse_loops(text: str) -> list[Loop]:
    """Loops of a `final_bundles.txt`: a body starts at a bundle marked LB and ends where nesting does."""
    bundles = [(m, line) for line in text.splitlines() if (m := _LINE.match(line))]
    loops = []
    for at, (match, _) in enumerate(bundles):
        if match.group(2) != "LB":
            continue
        depth, end = len(match.group(3)), at
        while end < len(bundles) and len(bundles[end][0].group(3)) >= depth:
            end += 1
        body = [line for _, line in bundles[at:end]]
        loops.append(
            Loop(
                depth,
                len(body),
                copies_in=sum(line.count("dma.hbm_to_vmem") for line in body),
                copies_out=sum(line.count("dma.vmem_to_hbm") for line in body),
                loads=sum(line.count(" vld ") for line in body),
            )
        )
    return loops
