"""A whole train step, kernels inside: one donated program, separate ops, CPU; and compiled for chips."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recsys_tpu import aot
from recsys_tpu.kernels import (
    LookupBatch,
    donating_update,
    fused_update,
    hyper_tensor,
    packed,
    pooled_lookup,
)
from recsys_tpu.kernels.one_program import compile_donating
from tests.kernels.cases import SPECS, Case
from tests.kernels.test_ops import on

DIM, SAMPLES = 16, 32
SPEC = SPECS["rowwise_adagrad"]
FIELDS = [field.name for field in dataclasses.fields(LookupBatch) if field.name not in ("num_bags",)]


def problem(num_rows: int = 64, samples: int = SAMPLES, dim: int = DIM, ids: int = 100) -> SimpleNamespace:
    rng = np.random.default_rng(0)
    bags = np.sort(rng.integers(0, samples, ids))
    weights = rng.random(ids).astype(np.float32)
    case = Case(num_rows, samples, rng.integers(0, num_rows, ids), bags, weights, 128, 128)
    generator = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        batch=case.batch(),
        table=torch.randn(num_rows * dim, generator=generator),
        state=torch.zeros(num_rows),
        tower=torch.randn(dim, generator=generator),
        labels=torch.rand(samples, generator=generator).round(),
    )


def loss_and_gradients(
    pooled: torch.Tensor, tower: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pooled, tower = pooled.detach().requires_grad_(), tower.detach().requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(torch.relu(pooled) @ tower, labels)
    gradients = torch.autograd.grad(loss, (pooled, tower))
    return loss.detach(), *gradients


def step(dim: int, num_bags: int):
    """The step as a pure function of (table, state, tower, labels, hyper, *batch)."""

    def one_step(table, state, tower, labels, hyper, *tensors):
        batch = LookupBatch(num_bags=num_bags, **dict(zip(FIELDS, tensors, strict=True)))
        loss, pooled_gradient, tower_gradient = loss_and_gradients(
            pooled_lookup(table, batch, dim), tower, labels
        )
        new_table, (new_state,) = donating_update(table, (state,), pooled_gradient, batch, SPEC, hyper)
        return loss, new_table, new_state, tower - 0.1 * tower_gradient

    return one_step


def test_one_program_and_separate_ops_train_as_the_cpu_does(tpu):
    losses = {}
    for form in ("cpu", "ops", "one program"):
        device = torch.device("cpu") if form == "cpu" else tpu
        p = problem()
        table, state, tower, labels = (x.to(device) for x in (p.table, p.state, p.tower, p.labels))
        batch = on(device, p.batch)
        tensors = [getattr(batch, name) for name in FIELDS]
        hyper = hyper_tensor(SPEC, learning_rate=0.5, step=1).to(device)
        program = None
        if form == "one program":
            example = (table, state, tower, labels, hyper, *tensors)
            program = compile_donating(step(DIM, SAMPLES), example, donate=(0, 1, 2))
        losses[form] = []
        for _ in range(5):
            if program is not None:
                loss, table, state, tower = program(table, state, tower, labels, hyper, *tensors)
            else:
                loss, gradient, tower_gradient = loss_and_gradients(
                    pooled_lookup(table, batch, DIM), tower, labels
                )
                fused_update(table, (state,), gradient, batch, SPEC, hyper)
                tower = tower - 0.1 * tower_gradient
            losses[form].append(loss.item())
    assert losses["cpu"][-1] < losses["cpu"][0]
    np.testing.assert_allclose(losses["ops"], losses["cpu"], atol=1e-5)
    np.testing.assert_allclose(losses["one program"], losses["cpu"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "form"), [("v6e:2x2", "packed"), ("v5e:2x2", "float32")])
def test_a_step_with_kernels_compiles_for_chips(tpu, topology, form):
    """Lowered from torch, kernels as Mosaic calls; table and state in place, nothing of their size beside."""
    dim, num_rows = 128, 1 << 18
    p = problem(dim=dim)
    table = torch.zeros(num_rows * dim)
    table = packed(table.bfloat16()) if form == "packed" else table
    batch = dataclasses.replace(p.batch, unique_rows=torch.full((128,), num_rows, dtype=torch.int32))
    hyper = hyper_tensor(SPEC, learning_rate=0.5, step=1)
    tensors = [getattr(batch, name) for name in FIELDS]
    arguments = (table, torch.zeros(num_rows), p.tower, p.labels, hyper, *tensors)
    text = aot.lower(step(dim, SAMPLES), arguments, chip=topology.partition(":")[0])
    assert "tpu_custom_call" in text
    report = aot.compile_stablehlo(text, topology)  # the update's donation is in the program already
    assert report.ok, report
    assert report.alias_bytes >= table.nbytes + num_rows * 4
    assert report.temp_bytes < 4e6
