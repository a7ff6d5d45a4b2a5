import subprocess
import sys

import pytest

from recsys_tpu import doctor


def test_a_crash_is_a_finding_with_its_last_words():
    finding = doctor.trial("cpu", "import os, sys; print('almost', flush=True); os.abort()", "mend it")
    assert (finding.works, finding.detail, finding.remedy) == (False, "almost", "mend it")


def test_a_missing_package_is_a_finding_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(doctor.requirements, "problems", lambda: ["pypjrt is not installed"])
    monkeypatch.setattr(doctor, "trial", lambda name, program, remedy: doctor.Finding(name, True, "stub"))
    found = {finding.name: finding for finding in doctor.findings()}
    assert not found["tpu-emulated"].works
    assert found["tpu-emulated"].remedy == "pip install 'recsys-tpu[emulation]'"
    assert found["cpu"].works


@pytest.mark.slow
def test_the_doctor_finds_this_machine_able(tpu):
    command = [sys.executable, "-m", "recsys_tpu.doctor", "--device", "tpu-emulated"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "means tpu-emulated here, which works" in " ".join(run.stdout.split())
