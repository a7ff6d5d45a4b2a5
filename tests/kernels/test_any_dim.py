"""Rows of any dim and type on any chip: kernels where they can, XLA's elements elsewhere; same numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from recsys_tpu.chips import CHIPS
from recsys_tpu.kernels import hyper_tensor, packed, reference, unpacked
from recsys_tpu.kernels.any_row import kernels_for, takes_rows
from tests.kernels.cases import SPECS
from tests.kernels.test_interpreted import hard_case

ODD = [(4, "float32"), (12, "float32"), (20, "bfloat16"), (100, "float32"), (200, "packed"), (64, "bfloat16")]

V5E, V6E = (kernels_for(CHIPS[name], on_sparsecore=bool(CHIPS[name].sparsecores)) for name in ("v5e", "v6e"))


def stored(dim: int, form: str, num_rows: int) -> torch.Tensor:
    flat = torch.randn(num_rows * dim, generator=torch.Generator().manual_seed(0))
    if form == "float32":
        return flat
    return flat.bfloat16() if form == "bfloat16" else packed(flat.bfloat16())


def array(tensor: torch.Tensor | None) -> jax.Array | None:
    if tensor is None:
        return None
    if tensor.dtype is torch.bfloat16:
        return jax.lax.bitcast_convert_type(jnp.asarray(tensor.view(torch.int16).numpy()), jnp.bfloat16)
    return jnp.asarray(tensor.numpy().copy())


def values(result: jax.Array) -> np.ndarray:
    if result.dtype == jnp.int32:
        return unpacked(torch.from_numpy(np.array(result))).float().numpy()
    return np.asarray(result.astype(jnp.float32))


@pytest.mark.parametrize(("dim", "form"), ODD)
def test_lookup_and_update(dim, form):
    kernels = V5E if not takes_rows(None, jnp.int32 if form == "packed" else jnp.float32, dim) else V6E
    case = hard_case(128, 28, 20, 32)
    flat, batch = stored(dim, form, case.num_rows), case.batch()
    spec = dataclasses.replace(SPECS["rowwise_adagrad"], stochastic_rounding=False)
    lookup = (flat, batch.rows, batch.bags, batch.bag_offsets, batch.weights)
    pooled = kernels.pooled_lookup(*map(array, lookup), num_bags=case.num_bags, dim=dim)
    expected = reference.pooled_lookup(flat, batch, dim).numpy()
    np.testing.assert_allclose(np.asarray(pooled), expected, atol=2e-6, rtol=1e-6)
    sequence = kernels.sequence_lookup(*map(array, lookup[:3]), num_bags=case.num_bags, dim=dim)
    np.testing.assert_array_equal(np.asarray(sequence), reference.sequence_lookup(flat, batch, dim).numpy())

    state, grad = torch.rand(case.num_rows), torch.randn(case.num_bags, dim)
    hyper = hyper_tensor(spec, learning_rate=0.1, step=1)
    order = (batch.unique_rows, batch.row_offsets, batch.sorted_bags, batch.segments, batch.sorted_weights)
    new, new_state = kernels.fused_update(
        array(flat), (array(state),), *map(array, (grad, *order, hyper)), spec=spec
    )
    reference.fused_update(flat, (state,), grad, batch, spec, hyper)
    tolerance = 2e-6 if form == "float32" else 8e-3
    np.testing.assert_allclose(values(new), values(array(flat)), atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(np.asarray(new_state), state.numpy(), atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("lanes", "dtype", "dim", "expected"),
    [
        (8, jnp.float32, 96, True),
        (16, jnp.float32, 200, False),
        (8, jnp.int32, 100, False),
        (None, jnp.float32, 96, False),
        (None, jnp.float32, 4, False),
        (None, jnp.float32, 8, True),
        (None, jnp.int32, 256, True),
        (8, jnp.bfloat16, 64, False),
        (8, jnp.int32, 15, False),
    ],
)
def test_which_rows_a_kernel_takes(lanes, dtype, dim, expected):
    assert takes_rows(lanes, dtype, dim) is expected
