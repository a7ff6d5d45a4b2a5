"""The CPU's lookup and update in C, against the plain-torch reference."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import recsys_tpu.native
from recsys_tpu.kernels import host, reference
from recsys_tpu.kernels.batch import Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec, hyper_tensor
from tests.kernels.cases import Case, cases

DIM = 20  # no multiple of a cache line
SPEC = OptimizerSpec(Optimizer.ROWWISE_ADAGRAD)


def case_of(rows: list[int], *, num_bags: int, num_rows: int) -> Case:
    """Ids in equal bags."""
    bags = np.repeat(np.arange(num_bags), len(rows) // num_bags)
    return Case(num_rows, num_bags, np.array(rows), bags, None, len(rows), len(rows))


def table_of(case: Case) -> torch.Tensor:
    return torch.randn(case.num_rows * DIM, generator=torch.Generator().manual_seed(0))


def gradient_of(case: Case) -> torch.Tensor:
    return torch.randn(case.num_bags, DIM, generator=torch.Generator().manual_seed(1))


def test_it_is_in_use():
    assert host._library() is not None, "the tests need a C compiler"


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_lookup_is_the_references(case: Case):
    found = host.pooled_lookup(table_of(case), case.batch(), DIM)
    expected = reference.pooled_lookup(table_of(case), case.batch(), DIM)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_update_is_the_references(case: Case):
    results = []
    for update in (host.fused_update, reference.fused_update):
        weights, state = table_of(case), (torch.full((case.num_rows,), 0.5),)
        for step in (1, 2):
            hyper = hyper_tensor(SPEC, learning_rate=0.1, step=step)
            update(weights, state, gradient_of(case), case.batch(), SPEC, hyper)
        results.append((weights, state[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_bits_are_the_same_for_every_number_of_threads():
    ids = np.random.default_rng(2).integers(0, 500, 6000)
    case = case_of(ids.tolist(), num_bags=1000, num_rows=500)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            weights, state = table_of(case), (torch.zeros(case.num_rows),)
            pooled = host.pooled_lookup(weights, case.batch(), DIM)
            hyper = hyper_tensor(SPEC, learning_rate=0.1, step=1)
            host.fused_update(weights, state, gradient_of(case), case.batch(), SPEC, hyper)
            found.append((pooled, weights, state[0]))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_reaches_its_row_only(value: float):
    case = case_of([3, 1], num_bags=2, num_rows=5)
    weights, state, gradient = table_of(case), (torch.zeros(5),), gradient_of(case)
    gradient[0, 4] = value
    hyper = hyper_tensor(SPEC, learning_rate=0.1, step=1)
    host.fused_update(weights, state, gradient, case.batch(), SPEC, hyper)
    bad = ~weights.view(5, DIM).isfinite().all(1)
    assert bad.tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("bad", [5, 2**31 - 1, -1, -(2**31)])
def test_a_row_outside_the_table_is_refused_and_nothing_is_changed(bad: int):
    case = case_of([3, 1], num_bags=2, num_rows=5)
    batch = case.batch()
    batch.rows[1] = batch.unique_rows[1] = bad
    weights, state = table_of(case), (torch.zeros(5),)
    with pytest.raises(IndexError, match=f"row {bad} at position 1 is outside of a table of 5 rows"):
        host.pooled_lookup(weights, batch, DIM)
    hyper = hyper_tensor(SPEC, learning_rate=0.1, step=1)
    with pytest.raises(IndexError, match=f"fused_update: row {bad}"):
        host.fused_update(weights, state, gradient_of(case), batch, SPEC, hyper)
    assert torch.equal(weights, table_of(case)) and not state[0].any()


def test_other_optimizers_and_types_go_through_the_reference():
    case = case_of([3, 1], num_bags=2, num_rows=5)
    for spec in (OptimizerSpec(Optimizer.SGD), OptimizerSpec(Optimizer.ROWWISE_ADAGRAD, weight_decay=0.1)):
        results = []
        for update in (host.fused_update, reference.fused_update):
            weights = table_of(case)
            state = tuple(torch.zeros(size) for size in spec.state_sizes(5, DIM))
            hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
            update(weights, state, gradient_of(case), case.batch(), spec, hyper)
            results.append(weights)
        assert torch.equal(*results)
    halves = table_of(case).bfloat16()
    found = host.pooled_lookup(halves, case.batch(), DIM)
    assert torch.equal(found, reference.pooled_lookup(halves, case.batch(), DIM))


@pytest.mark.parametrize("elements", [0, 5, 3 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_in_huge_pages_are_zeros(elements: int, dtype: torch.dtype):
    found = host.zeros_in_huge_pages(elements, dtype)
    assert found.dtype is dtype
    assert torch.equal(found, torch.zeros(elements, dtype=dtype))


def test_without_a_compiler_the_reference_runs_and_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(recsys_tpu.native.shutil, "which", lambda name: None)
    host._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert host._library() is None
        assert "needs a C compiler" in caplog.text
        case = case_of([3], num_bags=1, num_rows=5)
        found = host.pooled_lookup(table_of(case), case.batch(), DIM)
        assert torch.equal(found, reference.pooled_lookup(table_of(case), case.batch(), DIM))
    finally:
        host._library.cache_clear()
