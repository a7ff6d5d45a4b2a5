"""What works on this machine and what to install: `python -m recsys_tpu.doctor`.

With `--bundle out.tar.gz --run runs/<name>` it collects what is needed to find out why a run went wrong.

Every device is tried in a process of its own, so that a crash is a finding too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recsys_tpu.emulation import requirements
from recsys_tpu.errors import run_command
from recsys_tpu.runtime.activation import resolve, tpus_on_pci_bus
from recsys_tpu.runtime.settings import DeviceChoice
from recsys_tpu.support_bundle import write_bundle
from recsys_tpu.versions import PINS

_TIMEOUT_S = 300

_TRAIN = """
import recsys_tpu.runtime.activation as activation
activation.activate({device!r})
import torch
from recsys_tpu.runtime import Runtime, RuntimeConfig
with Runtime.start(RuntimeConfig(device={device!r})) as runtime:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(runtime.device)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = runtime.compile(lambda x: model(x).square().mean())(torch.ones(4, 8, device=runtime.device))
    loss.backward()
    optimizer.step()
    runtime.synchronize()
    assert not torch.equal(before, model.weight), "the optimizer changed nothing"
    print("a compiled step ran on", runtime.device)
"""

_COMPILE_AHEAD = """
from recsys_tpu import emulation
emulation.activate()
import torch
from recsys_tpu import aot
text = aot.lower(torch.mm, [torch.empty(128, 128), torch.empty(128, 128)])
report = aot.compile_stablehlo(text, "v6e:2x2")
assert report.ok, report.error
print("libtpu compiled a matrix product for v6e")
"""


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    name: str
    works: bool
    detail: str
    remedy: str = ""


def findings() -> Iterator[Finding]:
    """Everything there is to say about this machine, quickest first."""
    yield Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "Python 3.11 or newer")
    for package, pin in PINS.items():  # importing recsys_tpu has already refused other versions
        yield Finding(package, True, f"{importlib.metadata.version(package)} (pinned: {pin})")
    chips = tpus_on_pci_bus()
    yield Finding("TPU on the PCI bus", bool(chips), ", ".join(chips) or "none", "a Cloud TPU VM has one")
    yield trial("cpu", _TRAIN.format(device="cpu"), "a C++ compiler: apt-get install g++")
    if chips:
        yield trial("tpu", _TRAIN.format(device="tpu"), "pip install 'recsys-tpu[tpu]'")
    missing = requirements.problems()
    if missing:
        for name in ("tpu-emulated", "compilation for TPUs"):
            yield Finding(name, False, "; ".join(missing), requirements.INSTALL)
        return
    yield trial("tpu-emulated", _TRAIN.format(device="tpu-emulated"), requirements.INSTALL)
    yield trial("compilation for TPUs", _COMPILE_AHEAD, requirements.INSTALL)


def trial(name: str, program: str, remedy: str) -> Finding:
    """Run `program` in a process of its own; the last line it prints is the detail."""
    try:
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, False, f"did not finish within {_TIMEOUT_S} s", remedy)
    said = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    last = said[-1].strip() if said else f"ended with status {run.returncode} and no output"
    return Finding(name, run.returncode == 0, last, remedy)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.doctor", description="Say what works on this machine and what to install."
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "tpu", "tpu-emulated"],
        default="auto",
        help="the device that must work for exit status 0 (default: the one `auto` means here)",
    )
    parser.add_argument("--bundle", type=Path, help="also write a support bundle, such as support.tar.gz")
    parser.add_argument("--run", type=Path, help="folder of the run that the bundle is about")
    arguments = parser.parse_args()
    if arguments.run is not None and arguments.bundle is None:
        parser.error("--run is for --bundle")
    device: DeviceChoice = arguments.device
    needed = resolve(device)
    console = Console()
    found = list(findings())
    console.print(_table(found))
    works = any(finding.works for finding in found if finding.name == needed)
    console.print(
        f"runtime.device={device} means {needed} here, which {'works' if works else 'does not work'}."
    )
    if arguments.bundle is not None:
        names = write_bundle(arguments.bundle, map(asdict, found), arguments.run)
        console.print(
            f"{arguments.bundle}: {len(names)} files, secrets hidden where a name or a form tells them; "
            "look through it before you send it."
        )
    sys.exit(0 if works else 1)


def _table(found: list[Finding]) -> Table:
    table = Table(title="recsys_tpu doctor")
    for column in ("what", "works", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in found:
        mark = "[green]yes[/]" if finding.works else "[yellow]no[/]"
        table.add_row(finding.name, mark, finding.detail, "" if finding.works else finding.remedy)
    return table


if __name__ == "__main__":
    run_command(main)
