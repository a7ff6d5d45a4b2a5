"""Activation and start-up, each in a process of its own."""

import os
import subprocess
import sys

import pytest

import recsys_tpu.native
from recsys_tpu.emulation import EmulationError, native, requirements
from recsys_tpu.emulation.plugin import Plugin


def _clean_environment() -> dict[str, str]:
    inherited = ("TPU_LIBRARY_PATH", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    environment = {k: v for k, v in os.environ.items() if k not in inherited}
    return {**environment, "PYTHONPATH": os.pathsep.join(sys.path)}


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=_clean_environment()
    )


SCRIPT = """
import sys
import torch
weight = torch.ones(3, device="tpu", requires_grad=True)
print(sys.argv[1:], weight.sum().item())
print("kept", file=sys.stderr)
"""


def test_any_script_runs_on_the_emulated_device_and_start_up_is_quiet(tpu, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = _python("-m", "recsys_tpu.emulation", "--", str(script), "--lr", "0.1")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "['--lr', '0.1'] 3.0\n"
    assert run.stderr == "kept\n"


def test_a_missing_script_is_named():
    run = _python("-m", "recsys_tpu.emulation", "absent.py")
    assert run.returncode == 2 and "no such file: absent.py" in run.stderr


def test_activation_after_torch_is_refused(tpu):
    run = _python("-c", "import torch; from recsys_tpu import emulation; emulation.activate()")
    assert run.returncode == 1 and "before the first `import torch`" in run.stderr


def test_an_unproven_version_is_refused_with_what_to_install(monkeypatch):
    versions = {**requirements.PROVEN, "torch-tpu": "0.9.0"}
    monkeypatch.setattr(requirements.importlib.metadata, "version", versions.__getitem__)
    with pytest.raises(EmulationError, match=r"torch-tpu is 0\.9\.0; .* 0\.2\.0 only.*pip install"):
        requirements.check()


def test_a_library_that_is_no_plugin_is_refused(tpu):
    import ctypes.util
    from pathlib import Path

    with pytest.raises(EmulationError, match="no GetPjrtApi"):
        Plugin(Path(ctypes.util.find_library("c") or "libc.so.6"), rank=0, slice_size=1)


def test_a_plugin_of_another_api_version_is_refused(tpu, monkeypatch):
    from recsys_tpu.emulation.plugin import library_path

    monkeypatch.setattr(requirements, "PJRT_MINOR", 42)
    with pytest.raises(EmulationError, match=r"speaks PJRT 0\.115; emulation is proven with 0\.42"):
        Plugin(library_path(), rank=0, slice_size=1)


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(recsys_tpu.native.shutil, "which", lambda name: None)
    with pytest.raises(EmulationError, match="needs a C compiler"):
        native.load_shim()
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    with pytest.raises(EmulationError, match="cannot be run"):
        native.load_shim()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(EmulationError, match="failed"):
        native.load_shim()
