import subprocess
import sys

import pytest
from pydantic import ValidationError

from recsys_tpu.runtime import RuntimeConfig
from recsys_tpu.runtime.activation import resolve, tpus_on_pci_bus


def test_float32_means_float32_unless_the_config_says_otherwise():
    settings = RuntimeConfig()
    assert (settings.precision, settings.matmul_precision) == ("fp32", "highest")


@pytest.mark.parametrize(
    "section", [{"devise": "cpu"}, {"device": "gpu"}, {"collective_timeout_s": 0}, {"warmup_steps": 0}]
)
def test_a_mistake_in_the_section_is_an_error(section):
    with pytest.raises(ValidationError):
        RuntimeConfig.model_validate(section)


def test_settings_and_activation_do_not_import_torch():
    code = (
        "import sys, recsys_tpu.runtime.activation as a; a.activate('cpu'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_activation_after_torch_says_what_to_do():
    code = (
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "import torch, recsys_tpu.runtime.activation as a\n"
        "a.activate('tpu-emulated')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "ActivationError" in run.stderr and "before the first `import torch`" in run.stderr


def test_a_tpu_is_found_by_its_pci_identifier(tmp_path):
    for name, vendor, device in [
        ("a", "0x1ae0", "0x006f"),
        ("b", "0x1ae0", "0x0001"),
        ("c", "0x10de", "0x006f"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")
    assert tpus_on_pci_bus(tmp_path) == ["TPU v6e"]
    assert tpus_on_pci_bus(tmp_path / "absent") == []


def test_unknown_device_is_a_value_error():
    with pytest.raises(ValueError, match="expected one of auto, cpu, tpu, tpu-emulated"):
        resolve("cuda")  # type: ignore[arg-type]
