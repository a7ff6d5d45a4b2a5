"""The JAX and Pallas implementations as `torch.library` ops of the `tpu` device.

Import only where that device is active.  Ops are pure; `fused_update` donates table and state, so
the tensors passed to it are dead afterwards and the caller puts the results in their place.
Each op has a fake rule (from `jax_op`), so all of them can be traced by torch.compile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from recsys_tpu.chips import Chip
from recsys_tpu.kernels import xla
from recsys_tpu.kernels.optimizer import OptimizerSpec
from recsys_tpu.kernels.variants import Variant

_pallas = torch.get_device_module("tpu").pallas
_numbers = itertools.count()  # op names must be unique


@functools.cache
def register_lookups(variant: Variant, chip: Chip | None, debug: bool = False) -> dict[str, str]:
    """Names, in `torch.ops.recsys_tpu`, of a variant's "pooled", "sequence" and "weight gradient"."""
    kernels, name = _implementation(variant, chip, debug), _name(variant, chip, debug)
    names = {
        "pooled": f"pooled_lookup_{name}",
        "sequence": f"sequence_lookup_{name}",
        "weight gradient": f"weight_gradient_{name}",
    }

    @_pallas.jax_op(f"recsys_tpu::{names['pooled']}")
    def pooled_lookup(
        flat: jax.Array,
        rows: jax.Array,
        bags: jax.Array,
        bag_offsets: jax.Array,
        weights: jax.Array | None,
        num_bags: int,
        dim: int,
    ) -> jax.Array:
        return kernels.pooled_lookup(flat, rows, bags, bag_offsets, weights, num_bags=num_bags, dim=dim)

    @_pallas.jax_op(f"recsys_tpu::{names['sequence']}")
    def sequence_lookup(
        flat: jax.Array, rows: jax.Array, bags: jax.Array, num_bags: int, dim: int
    ) -> jax.Array:
        return kernels.sequence_lookup(flat, rows, bags, num_bags=num_bags, dim=dim)

    @_pallas.jax_op(f"recsys_tpu::{names['weight gradient']}")
    def weight_gradient(
        flat: jax.Array, rows: jax.Array, bags: jax.Array, grad_output: jax.Array
    ) -> jax.Array:
        # A sequence lookup and a dot product, which XLA fuses.
        num_bags, dim = grad_output.shape
        gathered = kernels.sequence_lookup(flat, rows, bags, num_bags=num_bags, dim=dim)
        upstream = grad_output.astype(jnp.float32).at[bags].get(mode="clip")
        return jnp.where(bags < num_bags, (gathered * upstream).sum(1), 0.0)

    return names


@functools.cache
def update_op(
    variant: Variant, chip: Chip | None, spec: OptimizerSpec, debug: bool = False
) -> Callable[..., Any]:
    """The fused update of a variant and optimizer: (table, *state), donating both."""
    kernels, number = _implementation(variant, chip, debug), next(_numbers)

    @_pallas.jax_op(
        f"recsys_tpu::fused_{spec.optimizer.value}_{_name(variant, chip, debug)}_{number}",
        donate_argnums=(0, 1),
    )
    def fused_update(
        flat: jax.Array,
        state: list[jax.Array],
        grad_output: jax.Array,
        unique_rows: jax.Array,
        row_offsets: jax.Array,
        sorted_bags: jax.Array,
        segments: jax.Array,
        sorted_weights: jax.Array | None,
        hyper: jax.Array,
    ) -> list[jax.Array]:
        batch = (unique_rows, row_offsets, sorted_bags, segments, sorted_weights)
        return list(kernels.fused_update(flat, tuple(state), grad_output, *batch, hyper, spec=spec))

    return fused_update


def _implementation(variant: Variant, chip: Chip | None, debug: bool) -> Any:
    """What holds a variant's functions, for a chip.  debug: with bounds checks, where it has them."""
    if variant is Variant.XLA:
        return xla
    if chip is None:
        raise ValueError(f"{variant.value} kernels need a TPU; an emulated device runs the xla variant")
    from recsys_tpu.kernels import any_row

    return any_row.kernels_for(chip, on_sparsecore=variant is Variant.SPARSECORE, debug=debug)


def _name(variant: Variant, chip: Chip | None, debug: bool) -> str:
    name = variant.value if chip is None else f"{variant.value}_{chip.name}"
    return f"{name}_debug" if debug else name
