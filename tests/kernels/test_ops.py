"""The ops on the emulated `tpu` device: eager, in torch.compile, in place; against the CPU reference."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from recsys_tpu.kernels import (
    LookupBatch,
    Variant,
    force_variant,
    fused_update,
    hyper_tensor,
    packed,
    pooled_lookup,
    sequence_lookup,
    unpacked,
)
from tests.kernels.cases import SPECS, Case, cases
from tests.kernels.test_reference import every_row_case

DIM = 8
FORMATS = ("float32", "bfloat16", "packed")


def on(device: torch.device, batch: LookupBatch) -> LookupBatch:
    tensors = {name: x.to(device) for name, x in vars(batch).items() if torch.is_tensor(x)}
    return dataclasses.replace(batch, **tensors)


def flat_table(case: Case, form: str) -> torch.Tensor:
    flat = torch.randn(case.num_rows * DIM, generator=torch.Generator().manual_seed(0))
    if form == "float32":
        return flat
    return flat.bfloat16() if form == "bfloat16" else packed(flat.bfloat16())


def values(flat: torch.Tensor) -> torch.Tensor:
    flat = flat.cpu()
    return (unpacked(flat) if flat.dtype is torch.int32 else flat).float()


@pytest.mark.parametrize("variant", [Variant.XLA, Variant.REFERENCE])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_lookups_match_the_reference(tpu, variant, case: Case):
    batch, form = case.batch(), FORMATS[case.num_rows * len(case.rows) % 3]
    form = form if variant is Variant.XLA else "float32"
    flat = flat_table(case, form)
    device_batch, device_flat = on(tpu, batch), flat.to(tpu)
    with force_variant(variant):
        pooled = pooled_lookup(device_flat, device_batch, DIM).cpu()
        sequence = sequence_lookup(device_flat, device_batch, DIM).cpu()
    torch.testing.assert_close(pooled, pooled_lookup(flat, batch, DIM), atol=1e-5, rtol=1e-5)
    assert torch.equal(sequence, sequence_lookup(flat, batch, DIM))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", SPECS)
def test_updates_match_the_reference(tpu, name, form):
    """Three steps, with duplicates, padding and (bfloat16) stochastic rounding."""
    case = dataclasses.replace(every_row_case(), id_capacity=40, unique_capacity=24)
    spec = dataclasses.replace(SPECS[name], stochastic_rounding=True)
    flat, batch = flat_table(case, form), case.batch()
    state = tuple(torch.zeros(size) for size in spec.state_sizes(case.num_rows, DIM))
    device_flat, device_batch, device_state = flat.to(tpu), on(tpu, batch), tuple(x.to(tpu) for x in state)
    generator = torch.Generator().manual_seed(1)
    for step in (1, 2, 3):
        grad = torch.randn(case.num_bags, DIM, generator=generator)
        hyper = hyper_tensor(spec, learning_rate=0.1, step=step)
        fused_update(flat, state, grad, batch, spec, hyper)
        fused_update(device_flat, device_state, grad.to(tpu), device_batch, spec, hyper.to(tpu))
    # one unit in the last place of bfloat16 where float32 rounding differs at a tie
    torch.testing.assert_close(
        values(device_flat), values(flat), atol=1e-5, rtol=1e-5 if form == "float32" else 8e-3
    )
    for a, b in zip(device_state, state, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=2e-5, rtol=2e-5)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_updates_of_hard_batches(tpu, case: Case):
    """Empty batches, full capacities, one row, both ends; the plain-torch path on a device as well."""
    spec, flat, batch = SPECS["rowwise_adagrad"], flat_table(case, "float32"), case.batch()
    grad = torch.randn(case.num_bags, DIM, generator=torch.Generator().manual_seed(1))
    hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
    outcomes = []
    for device, variant in (
        (torch.device("cpu"), Variant.REFERENCE),
        (tpu, Variant.XLA),
        (tpu, Variant.REFERENCE),
    ):
        table = flat.clone().to(device)
        state = (torch.zeros(case.num_rows).to(device),)
        with force_variant(variant):
            fused_update(table, state, grad.to(device), on(device, batch), spec, hyper.to(device))
        outcomes.append((table.cpu(), state[0].cpu()))
    for outcome in outcomes[1:]:
        torch.testing.assert_close(outcome, outcomes[0], atol=1e-5, rtol=1e-5)


def test_nan_reaches_exactly_its_rows(tpu):
    case = every_row_case()
    grad = torch.ones(case.num_bags, DIM)
    grad[0, 3] = torch.nan
    spec, table = SPECS["rowwise_adagrad"], flat_table(case, "float32").to(tpu)
    hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
    state = (torch.zeros(case.num_rows, device=tpu),)
    fused_update(table, state, grad.to(tpu), on(tpu, case.batch()), spec, hyper.to(tpu))
    poisoned = (~table.cpu().view(-1, DIM).isfinite()).any(1).nonzero()[:, 0].tolist()
    assert set(poisoned) == {int(r) for r in case.rows[case.bags == 0]}


def test_compiled_lookup_with_gradient_of_the_weights(tpu):
    case = every_row_case()
    case.weights = torch.rand(len(case.rows), generator=torch.Generator().manual_seed(2)).numpy()
    flat, batch = flat_table(case, "float32"), case.batch()

    def loss(table: torch.Tensor, weights: torch.Tensor, batch: LookupBatch) -> torch.Tensor:
        return torch.relu(pooled_lookup(table, dataclasses.replace(batch, weights=weights), DIM)).sum()

    gradients = []
    for device, function in ((torch.device("cpu"), loss), (tpu, torch.compile(loss))):
        local = on(device, batch)
        weights = local.weights.clone().requires_grad_()
        function(flat.to(device), weights, local).backward()
        gradients.append(weights.grad.cpu())
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_a_new_learning_rate_compiles_nothing(tpu):
    from recsys_tpu.emulation import compilations

    case, spec = every_row_case(), SPECS["adam"]
    table, batch = flat_table(case, "float32").to(tpu), on(tpu, case.batch())
    state = tuple(torch.zeros(size, device=tpu) for size in spec.state_sizes(case.num_rows, DIM))
    grad = torch.ones(case.num_bags, DIM, device=tpu)
    counts = []
    for step, rate in ((1, 0.1), (2, 0.05), (3, 0.01)):
        hyper = hyper_tensor(spec, learning_rate=rate, step=step).to(tpu)
        fused_update(table, state, grad, batch, spec, hyper)
        torch.accelerator.synchronize()
        counts.append(compilations())
    assert counts[1] == counts[2]


def test_kernels_of_a_chip_are_refused_by_the_emulated_device(tpu):
    case = every_row_case()
    with force_variant(Variant.SPARSECORE), pytest.raises(ValueError, match="need a TPU"):
        pooled_lookup(flat_table(case, "float32").to(tpu), on(tpu, case.batch()), DIM)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            torch.zeros(64, dtype=torch.float64),
            "expected a float32, bfloat16 or packed table, got torch.float64",
        ),
        (torch.zeros(8, 8), r"expected a flat table of rows of 8 elements, got shape \(8, 8\)"),
        (torch.zeros(65), "expected a flat table"),
        (torch.zeros(64, requires_grad=True), "takes no part in autograd"),
    ],
)
def test_bad_tables_are_named(table, message):
    with pytest.raises(ValueError, match=message):
        pooled_lookup(table, every_row_case().batch(), DIM)


def test_bad_updates_are_named():
    case, spec = every_row_case(), SPECS["adam"]
    table, batch = torch.zeros(case.num_rows * DIM), case.batch()
    state = tuple(torch.zeros(size) for size in spec.state_sizes(case.num_rows, DIM))
    hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
    with pytest.raises(ValueError, match="8 bags, but a gradient of 7 rows"):
        fused_update(table, state, torch.zeros(7, DIM), batch, spec, hyper)
    with pytest.raises(ValueError, match="keeps state of sizes"):
        fused_update(table, state[:1], torch.zeros(8, DIM), batch, spec, hyper)
    with pytest.raises(ValueError, match="hyper_tensor's 16 values"):
        fused_update(table, state, torch.zeros(8, DIM), batch, spec, hyper[:4])
