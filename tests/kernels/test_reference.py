"""The plain-torch reference against float64 loops, torch.optim and FBGEMM."""

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_tpu.kernels import reference
from recsys_tpu.kernels.batch import Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec, hyper_tensor
from tests.kernels import oracle
from tests.kernels.cases import SPECS, Case, cases

DIM = 8


def float_table(case: Case, seed: int = 0) -> torch.Tensor:
    return torch.randn(case.num_rows, DIM, generator=torch.Generator().manual_seed(seed))


def as_double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy().astype(np.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_lookups(dtype, case: Case):
    table, batch = float_table(case).to(dtype), case.batch()
    pooled = reference.pooled_lookup(table.view(-1), batch, DIM)
    assert pooled.dtype is torch.float32
    expected = oracle.pooled(as_double(table), case.rows, case.bags, case.weights, case.num_bags)
    np.testing.assert_allclose(pooled, expected, atol=1e-5)
    sequence = reference.sequence_lookup(table.view(-1), batch, DIM)
    np.testing.assert_array_equal(sequence[: len(case.rows)], as_double(table)[case.rows])
    assert not sequence[len(case.rows) :].any()


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_weight_gradient_is_autograds(case: Case):
    if case.weights is None or len(case.rows) == 0:
        return
    table, batch = float_table(case), case.batch()
    grad = torch.randn(case.num_bags, DIM, generator=torch.Generator().manual_seed(1))
    weights = torch.from_numpy(case.weights).requires_grad_()
    pooled = torch.zeros(case.num_bags, DIM).index_add(
        0, torch.from_numpy(case.bags), table[case.rows] * weights[:, None]
    )
    (expected,) = torch.autograd.grad(pooled, weights, grad)
    got = reference.weight_gradient(table.view(-1), batch, grad)
    torch.testing.assert_close(got[: len(expected)], expected)
    assert not got[len(expected) :].any()


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=15, deadline=None)
@given(case=cases(), seed=st.integers(0, 100))
def test_update_against_float64(name, case: Case, seed):
    spec = SPECS[name]
    table, batch = float_table(case, seed), case.batch()
    state = tuple(torch.zeros(size) for size in spec.state_sizes(case.num_rows, DIM))
    expected = as_double(table)
    shape = (case.num_rows,) if spec.has_row_state else (case.num_rows, DIM)
    expected_state = tuple(np.zeros(shape) for _ in state)
    generator = torch.Generator().manual_seed(seed)
    for count in range(1, 4):
        grad = torch.randn(case.num_bags, DIM, generator=generator)
        hyper = hyper_tensor(spec, learning_rate=0.1, step=count)
        reference.fused_update(table.view(-1), state, grad, batch, spec, hyper)
        gradient, touched = oracle.row_gradients(
            case.num_rows, as_double(grad), case.rows, case.bags, case.weights
        )
        oracle.step(spec, expected, expected_state, gradient, touched, 0.1, count)
    np.testing.assert_allclose(table, expected, atol=2e-5)
    for buffer, values in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(buffer.reshape(shape), values, atol=2e-5, rtol=2e-5)


TORCH_OPTIMIZERS = {
    "sgd": lambda w: torch.optim.SGD(w, lr=0.1),
    "sgd_momentum_decay": lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda w: torch.optim.Adagrad(w, lr=0.1, eps=1e-6),
    "adam": lambda w: torch.optim.Adam(w, lr=0.1, eps=1e-6),
    "adamw": lambda w: torch.optim.AdamW(w, lr=0.1, eps=1e-6, weight_decay=0.01),
}


def every_row_case(num_rows: int = 16, num_bags: int = 8) -> Case:
    rows = np.concatenate([np.arange(num_rows), np.arange(0, num_rows, 2)])
    bags = np.sort(np.arange(len(rows)) % num_bags)
    return Case(num_rows, num_bags, rows, bags, None, len(rows), num_rows)


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_twenty_steps_of_torch_optim(name):
    """When every row is touched, a lazy optimizer is the dense one."""
    case, spec = every_row_case(), SPECS[name]
    table, batch = float_table(case), case.batch()
    weight = torch.nn.Parameter(table.clone())
    optimizer = TORCH_OPTIMIZERS[name]([weight])
    state = tuple(torch.zeros(size) for size in spec.state_sizes(case.num_rows, DIM))
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 21):
        grad = torch.randn(case.num_bags, DIM, generator=generator)
        optimizer.zero_grad()
        pooled = torch.zeros(case.num_bags, DIM).index_add(0, torch.from_numpy(case.bags), weight[case.rows])
        pooled.backward(grad)
        optimizer.step()
        hyper = hyper_tensor(spec, learning_rate=0.1, step=count)
        reference.fused_update(table.view(-1), state, grad, batch, spec, hyper)
    torch.testing.assert_close(table, weight.detach(), atol=1e-5, rtol=1e-5)


FBGEMM_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_twenty_steps_of_fbgemm(name):
    """Sparse batches: FBGEMM's fused CPU optimizers and ours touch, and change, the same rows."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    table = torch.randn(32, DIM, generator=torch.Generator().manual_seed(0))
    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [(32, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=FBGEMM_OPTIMIZERS[name],
        learning_rate=0.1,
        eps=spec.eps,
    )
    peer.split_embedding_weights()[0].copy_(table)
    state = tuple(torch.zeros(size) for size in spec.state_sizes(32, DIM))
    for count in range(1, 21):
        lengths = rng.integers(0, 4, 8)
        case = Case(32, 8, rng.integers(0, 32, lengths.sum()), np.repeat(np.arange(8), lengths), None, 40, 40)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        pooled = peer(torch.from_numpy(case.rows), offsets)
        torch.testing.assert_close(
            reference.pooled_lookup(table.view(-1), case.batch(), DIM), pooled.detach(), atol=1e-5, rtol=1e-5
        )
        grad = torch.from_numpy(rng.standard_normal((8, DIM)).astype(np.float32))
        pooled.backward(grad)
        hyper = hyper_tensor(spec, learning_rate=0.1, step=count)
        reference.fused_update(table.view(-1), state, grad, case.batch(), spec, hyper)
    torch.testing.assert_close(table, peer.split_embedding_weights()[0], atol=1e-5, rtol=1e-5)


def test_twenty_steps_of_a_clipped_rowwise_adagrad():
    """torch's clip_grad_norm_ of each row, TorchRec's dense RowWiseAdagrad, decay by hand."""
    case, spec = every_row_case(), SPECS["rowwise_adagrad_clipped"]
    table, batch = float_table(case), case.batch()
    rows = [torch.nn.Parameter(row.clone()[None]) for row in table]
    optimizer = RowWiseAdagrad(rows, lr=0.1, eps=spec.eps)
    state = (torch.zeros(case.num_rows),)
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 21):
        grad = torch.randn(case.num_bags, DIM, generator=generator)
        optimizer.zero_grad()
        weight = torch.cat(rows)
        pooled = torch.zeros(case.num_bags, DIM).index_add(0, torch.from_numpy(case.bags), weight[case.rows])
        pooled.backward(grad)
        for row in rows:
            torch.nn.utils.clip_grad_norm_([row], spec.max_norm)
            row.data.mul_(1 - 0.1 * spec.weight_decay)
        optimizer.step()
        hyper = hyper_tensor(spec, learning_rate=0.1, step=count)
        reference.fused_update(table.view(-1), state, grad, batch, spec, hyper)
    torch.testing.assert_close(table, torch.cat(rows).detach(), atol=1e-5, rtol=1e-5)


def test_twenty_steps_of_keras_ftrl():
    """Golden values: float64 on the jax backend, Keras 3.15.1, which counts half of our l2:

    Ftrl(0.1, learning_rate_power=-0.5, initial_accumulator_value=0, l1_regularization_strength=0.5,
    l2_regularization_strength=0.1, beta=1.0) on the same gradients from zero weights.
    """
    golden = [
        [0.0625134836041551, 0.03554653126146667, 0.03786112996914817],
        [-0.028986498418187956, -0.10028117630661394, 0.014202536289197168],
    ]
    spec = OptimizerSpec(Optimizer.FTRL, l1=0.5, l2=0.2, beta=1.0)
    gradients = np.random.default_rng(3).standard_normal((20, 2, 3)).astype(np.float32)
    batch = Case(2, 2, np.arange(2), np.arange(2), None, 2, 2).batch()
    table, state = torch.zeros(6), tuple(torch.zeros(6) for _ in range(2))
    for count, gradient in enumerate(gradients, start=1):
        hyper = hyper_tensor(spec, learning_rate=0.1, step=count)
        reference.fused_update(table, state, torch.from_numpy(gradient), batch, spec, hyper)
    np.testing.assert_allclose(table.view(2, 3), golden, rtol=1e-4)


def test_nan_and_infinity_reach_exactly_their_rows():
    case = every_row_case()
    batch, table = case.batch(), float_table(case)
    grad = torch.ones(case.num_bags, DIM)
    grad[0, 3], grad[1, 4] = torch.nan, torch.inf
    spec = SPECS["rowwise_adagrad"]
    state = (torch.zeros(case.num_rows),)
    reference.fused_update(
        table.view(-1), state, grad, batch, spec, hyper_tensor(spec, learning_rate=0.1, step=1)
    )
    poisoned = {int(r) for r in case.rows[case.bags < 2]}
    assert {int(r) for r in (~table.isfinite()).any(1).nonzero()} == poisoned


def test_stochastic_rounding_is_unbiased_and_repeatable():
    case = every_row_case(num_rows=4096, num_bags=64)
    spec = OptimizerSpec(Optimizer.SGD, stochastic_rounding=True)
    batch, grad = case.batch(), torch.full((case.num_bags, DIM), 1.0)
    results = []
    for _ in range(2):
        table = torch.ones(case.num_rows, DIM, dtype=torch.bfloat16)
        # 1 - 2**-10: a quarter of the gap below 1 (2**-8); odd rows only (even rows occur twice)
        hyper = hyper_tensor(spec, learning_rate=2.0**-10, step=5)
        reference.fused_update(table.view(-1), (), grad, batch, spec, hyper)
        results.append(table)
    assert torch.equal(*results)
    mean = 1 - results[0][1::2].float().mean().item()
    assert abs(mean / 2.0**-10 - 1) < 0.05  # 16,384 coin flips: about 5 standard deviations


def test_bits_are_the_same_on_every_run_and_thread_count():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 50, 256)
    count = int(lengths.sum())
    case = Case(500, 256, rng.integers(0, 500, count), np.repeat(np.arange(256), lengths), None, count, 500)
    spec, outcomes, threads = SPECS["adagrad"], [], torch.get_num_threads()
    for n in (1, 2, 2):
        torch.set_num_threads(n)
        table = float_table(case)
        state = (torch.zeros(case.num_rows * DIM),)
        pooled = reference.pooled_lookup(table.view(-1), case.batch(), DIM)
        hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
        reference.fused_update(table.view(-1), state, pooled, case.batch(), spec, hyper)
        outcomes.append((pooled, table))
    torch.set_num_threads(threads)
    for pooled, table in outcomes[1:]:
        assert torch.equal(pooled, outcomes[0][0]) and torch.equal(table, outcomes[0][1])


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_bits_do_not_depend_on_how_many_rows_are_updated_together(case: Case):
    spec = OptimizerSpec(Optimizer.ROWWISE_ADAGRAD)
    found = []
    for rows_at_once in (1, 3, 1 << 20):
        weights = float_table(case).view(-1)
        state = tuple(torch.zeros(size) for size in spec.state_sizes(case.num_rows, DIM))
        grad = torch.randn(case.num_bags, DIM, generator=torch.Generator().manual_seed(1))
        hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_BLOCK_ELEMENTS", rows_at_once * DIM)
            reference.fused_update(weights, state, grad, case.batch(), spec, hyper)
        found.append((weights, state[0]))
    for other in found[:-1]:
        assert torch.equal(other[0], found[-1][0])
        assert torch.equal(other[1], found[-1][1])


def test_bad_specs_are_named():
    with pytest.raises(ValueError, match="momentum is SGD's"):
        OptimizerSpec(Optimizer.ADAM, momentum=0.9)
    with pytest.raises(ValueError, match="l1 and l2"):
        OptimizerSpec(Optimizer.FTRL, weight_decay=0.1)
    with pytest.raises(ValueError, match="max_norm"):
        OptimizerSpec(Optimizer.SGD, max_norm=0.0)
    with pytest.raises(ValueError, match="counts from 1"):
        hyper_tensor(OptimizerSpec(Optimizer.ADAM), learning_rate=0.1, step=0)
    with pytest.raises(ValueError, match="positive learning rate"):
        hyper_tensor(OptimizerSpec(Optimizer.FTRL), learning_rate=0.0, step=1)


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_update_after_a_sequence_lookup(case: Case):
    """Without weights, pooling and then summing is what a sequence lookup leaves to the model."""
    case.weights = None
    batch, spec = case.batch(), SPECS["adagrad"]
    hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
    grad = torch.randn(case.num_bags, DIM, generator=torch.Generator().manual_seed(1))
    per_id = torch.zeros(case.id_capacity, DIM)
    per_id[: len(case.bags)] = grad[case.bags]
    outcomes = []
    for gradient, form in ((grad, batch), (per_id, batch.per_id())):
        table, state = float_table(case), (torch.zeros(case.num_rows * DIM),)
        reference.fused_update(table.view(-1), state, gradient, form, spec, hyper)
        outcomes.append((table, state[0]))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
