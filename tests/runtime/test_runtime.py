import pytest
import torch

from recsys_tpu.runtime import Runtime, RuntimeConfig
from recsys_tpu.runtime.process_group import Ranks


@pytest.fixture
def runtime():
    with Runtime.start(RuntimeConfig(device="cpu")) as runtime:
        yield runtime


def test_a_world_of_one_has_collectives(runtime):
    x = torch.arange(3.0)
    torch.distributed.all_reduce(x)
    assert x.tolist() == [0.0, 1.0, 2.0]
    assert (runtime.rank, runtime.world_size, runtime.local_world_size) == (0, 1, 1)


def test_a_second_runtime_is_refused(runtime):
    with pytest.raises(RuntimeError, match="close the earlier Runtime"):
        Runtime.start(RuntimeConfig(device="cpu"))


def test_header_states_device_proof_and_precision(runtime):
    header = runtime.describe()
    assert (
        header["device"] == "cpu"
        and header["precision"] == "fp32"
        and header["matmul_precision"] == "highest"
    )
    assert "TPU" not in header["proof"] and header["versions"]["torch"] == torch.__version__


def test_bf16_computes_in_bf16_and_keeps_float32_weights():
    linear = torch.nn.Linear(4, 2)
    with Runtime.start(RuntimeConfig(device="cpu", precision="bf16")) as runtime, runtime.autocast():
        out = linear(torch.ones(3, 4))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert linear.weight.dtype == linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "4"}, "start the run with torchrun"),
        ({"WORLD_SIZE": "two"}, "expected a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "outside a world of 2"),
    ],
)
def test_inconsistent_launch_environment_is_an_error(monkeypatch, variables, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Ranks.from_environment()
