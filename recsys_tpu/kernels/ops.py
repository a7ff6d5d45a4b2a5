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
import torch

from recsys_tpu.kernels import xla
from recsys_tpu.kernels.chips import Chip
from recsys_tpu.kernels.optimizer import OptimizerSpec
from recsys_tpu.kernels.variants import Variant

_pallas = torch.get_device_module("tpu").pallas
_numbers = itertools.count()  # op names must be unique


@functools.cache
def lookup_ops(variant: Variant, chip: Chip | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(pooled, sequence) lookup of a variant, registered on first use."""
    kernels, name = _implementation(variant, chip), _name(variant, chip)

    @_pallas.jax_op(f"recsys_tpu::pooled_lookup_{name}")
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

    @_pallas.jax_op(f"recsys_tpu::sequence_lookup_{name}")
    def sequence_lookup(
        flat: jax.Array, rows: jax.Array, bags: jax.Array, num_bags: int, dim: int
    ) -> jax.Array:
        return kernels.sequence_lookup(flat, rows, bags, num_bags=num_bags, dim=dim)

    return pooled_lookup, sequence_lookup


@functools.cache
def weight_gradient_op() -> Callable[..., Any]:
    """Gradient of the per-id weights: a gather and a dot product, left to XLA in every variant."""

    @_pallas.jax_op("recsys_tpu::weight_gradient")
    def weight_gradient(
        flat: jax.Array, rows: jax.Array, bags: jax.Array, grad_output: jax.Array
    ) -> jax.Array:
        return xla.weight_gradient(flat, rows, bags, grad_output)

    return weight_gradient


@functools.cache
def update_op(variant: Variant, chip: Chip | None, spec: OptimizerSpec) -> Callable[..., Any]:
    """The fused update of a variant and optimizer: (table, *state), donating both."""
    kernels, number = _implementation(variant, chip), next(_numbers)

    @_pallas.jax_op(
        f"recsys_tpu::fused_{spec.optimizer.value}_{_name(variant, chip)}_{number}", donate_argnums=(0, 1)
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


def _implementation(variant: Variant, chip: Chip | None) -> Any:
    """What holds a variant's functions, for a chip."""
    if variant is Variant.XLA:
        return xla
    if chip is None:
        raise ValueError(f"{variant.value} kernels need a TPU; an emulated device runs the xla variant")
    if variant is Variant.SPARSECORE:
        from recsys_tpu.kernels import sparsecore

        return sparsecore.kernels_for(chip)
    from recsys_tpu.kernels import tensorcore

    return tensorcore.kernels_for(chip)


def _name(variant: Variant, chip: Chip | None) -> str:
    return variant.value if chip is None else f"{variant.value}_{chip.name}"
