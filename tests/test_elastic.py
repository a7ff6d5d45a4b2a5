"""torchrun restarts both ranks after one is killed, twice, and no loss differs from an unbroken run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tiny_run import ROOT


@pytest.mark.slow
def test_torchrun_restarts_and_the_losses_are_those_of_an_unbroken_run():
    command = [sys.executable, str(ROOT / "benchmarks" / "elastic.py"), "restarts", "--steps", "150"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "150 of 150 steps, largest relative difference 0.0e+00" in run.stdout, run.stdout
