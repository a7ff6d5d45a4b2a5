"""The emulated device computes what the CPU does, and fails with Python errors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from recsys_tpu import emulation

SCANS = {
    "cumsum": lambda x, n: torch.cumsum(x, 0),
    "cumsum of a matrix": lambda x, n: torch.cumsum(x.reshape(-1, 6), 1),
    "cumsum of integers": lambda x, n: torch.cumsum(n, 0),
    "cumprod": lambda x, n: torch.cumprod(x, 0),
    "cummax": lambda x, n: torch.cummax(x, 0).values,
    "logcumsumexp": lambda x, n: torch.logcumsumexp(x, 0),
    "repeat_interleave": lambda x, n: torch.repeat_interleave(x, n, output_size=int(n.sum())),
    "embedding_bag": lambda x, n: F.embedding_bag(n, x.reshape(12, -1), n.new_tensor([0, 3, 3]), mode="sum"),
    "segment_reduce": lambda x, n: torch.segment_reduce(x, "sum", lengths=n.new_tensor([20, 0, 40])),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", SCANS)
def test_operators_that_lower_to_scan_work(tpu, name, compiled):
    """XLA's CPU plugin as it comes aborts the process on each of these."""
    x = torch.rand(60, generator=torch.Generator().manual_seed(0)) + 0.5
    n = torch.tensor([0, 2, 1, 3, 0, 0, 4, 1, 0, 2, 5, 1] * 5)[: 60 if name == "repeat_interleave" else 12]
    function = SCANS[name]
    expected = function(x, n)
    if compiled and name == "repeat_interleave":
        total = int(n.sum())
        function = lambda x, n: torch.repeat_interleave(x, n, output_size=total)  # noqa: E731
    if compiled:
        function = torch.compile(function)
    actual = function(x.to(tpu), n.to(tpu))
    assert actual.device.type == "tpu"
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_an_operator_torch_tpu_lacks_is_a_python_error_naming_it(tpu):
    with pytest.raises(RuntimeError, match="aten::median"):
        torch.median(torch.ones(3, device=tpu))


def test_a_compiled_mosaic_kernel_is_a_python_error(tpu):
    jax = pytest.importorskip("jax")
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    @torch.tpu.pallas.jax_op("recsys_tpu_tests::mosaic_double")
    def mosaic_double(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, out_shape=shape, compiler_params=pltpu.CompilerParams())(x)

    with pytest.raises(Exception, match=r"tpu_custom_call|interpret"):
        mosaic_double(torch.ones(8, 128, device=tpu)).cpu()


def test_programs_are_counted_and_named(tpu):
    before = emulation.compilations()
    x = torch.arange(77.0, device=tpu)
    torch.cumsum(x, 0).cpu()
    names = emulation.compiled_programs(before)
    assert len(names) == emulation.compilations() - before > 0
    assert any("cumsum" in name for name in names)
    torch.cumsum(x, 0).cpu()
    assert emulation.compiled_programs(before) == names


def test_a_pending_kernel_that_a_compiled_function_waits_for_does_not_block_it(tpu):
    """torch_tpu waits for its threads with the interpreter locked, so they must not need the interpreter."""
    jax = pytest.importorskip("jax")

    @torch.tpu.pallas.jax_op("recsys_tpu_tests::pending")
    def pending(x: jax.Array) -> jax.Array:
        return x * 2

    weight = torch.ones(33, 33, device=tpu, requires_grad=True)
    compiled = torch.compile(lambda x: (x @ weight).sum())
    loss = compiled(pending(torch.ones(5, 33, device=tpu)).detach().requires_grad_())
    loss.backward()
    assert loss.item() == 5 * 2 * 33 * 33


def test_pinned_memory_goes_to_the_device_and_back(tpu):
    host = torch.arange(1000.0).pin_memory()
    assert host.is_pinned()
    back = torch.empty(1000).pin_memory()
    back.copy_(host.to(tpu, non_blocking=True) * 2, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(back, host * 2)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_a_compiled_tower_trains_as_on_the_cpu_without_recompiling(tpu, optimizer):
    torch.manual_seed(0)
    cpu = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 1))
    emulated = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 1))
    emulated.load_state_dict(cpu.state_dict())
    emulated.to(tpu)
    options = {"capturable": True} if optimizer is torch.optim.Adam else {}
    steps = []
    for model, device, extra in ((cpu, "cpu", {}), (emulated, tpu, options)):
        forward = torch.compile(model) if device is tpu else model
        update = optimizer(model.parameters(), lr=0.05, **extra)

        def step(x, y, forward=forward, update=update):
            update.zero_grad()
            loss = F.binary_cross_entropy_with_logits(forward(x)[:, 0], y)
            loss.backward()
            update.step()
            return loss.detach().item()

        steps.append(step)
    start = {name: p.clone() for name, p in cpu.named_parameters()}
    for i in range(10):
        x, y = torch.randn(64, 13), torch.rand(64).round()
        losses = steps[0](x, y), steps[1](x.to(tpu), y.to(tpu))
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        if i == 2:
            warm = emulation.compilations()
    assert emulation.compilations() == warm
    for name, parameter in emulated.named_parameters():
        assert not torch.equal(parameter.cpu(), start[name])
        torch.testing.assert_close(
            parameter.detach().cpu(), dict(cpu.named_parameters())[name].detach(), rtol=1e-4, atol=1e-5
        )
