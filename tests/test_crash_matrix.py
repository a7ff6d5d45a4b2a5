"""A short crash matrix; `benchmarks/crash_matrix.py` does 50 kills."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tiny_run import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_kills_change_no_loss() -> None:
    command = [sys.executable, "benchmarks/crash_matrix.py", "--kills", "3", "--steps", "500", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills on 2 ranks" in done.stdout and ", 0 losses differ" in done.stdout
