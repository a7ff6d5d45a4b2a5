"""Child process: exchanges compiled by libtpu for whole slices, beside XLA's own collectives."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from recsys_tpu.kernels.all_to_all import api, reference
from recsys_tpu.kernels.all_to_all.fused import fused_lookup_all_to_all
from recsys_tpu.kernels.all_to_all.links import grid_of
from recsys_tpu.kernels.all_to_all.slices import compile_on_slice
from tests.kernels.all_to_all.children import serve

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1", "tpu7x:2x2x2")
ROWS, DIM = 131_072, 128  # of one chunk: too large for XLA to keep the payload in VMEM
# How the devices of a slice are laid out on two mesh axes.
TORI = {
    "v6e:2x2": (2, 2),
    "v6e:2x4": (2, 4),
    "v5p:2x2x2": (2, 4),
    "tpu7x:2x2x1": (4, 2),
    "tpu7x:2x2x2": (4, 4),
}


def ragged(exchange: Any, chunks: jax.Array, counts: jax.Array, **options: Any) -> Any:
    return exchange(chunks, counts, axis="x", **options)


EXCHANGES = {
    "equal": (functools.partial(api.all_to_all, axis="x"), functools.partial(reference.all_to_all, axis="x")),
    "bf16 wire": tuple(
        functools.partial(module.all_to_all, axis="x", scale=0.5, wire_dtype=jnp.bfloat16)
        for module in (api, reference)
    ),
    "reduce-scatter": tuple(
        functools.partial(module.reduce_scatter, axis="x") for module in (api, reference)
    ),
    "ragged": tuple(functools.partial(ragged, module.ragged_all_to_all) for module in (api, reference)),
}


def compile_both(name: str, topology: str) -> list[dict[str, Any]]:
    devices = grid_of(topology).devices
    arguments = [jax.ShapeDtypeStruct((devices, ROWS, DIM), jnp.float32)]
    if name == "ragged":
        arguments.append(jax.ShapeDtypeStruct((devices,), jnp.int32))
    return [
        dataclasses.asdict(compile_on_slice(topology, exchange, arguments)) for exchange in EXCHANGES[name]
    ]


def torus(topology: str, rows: int, columns: int) -> list[dict[str, Any]]:
    axes = {"x": rows, "y": columns}
    exchanges = (
        functools.partial(api.torus_all_to_all, axes=("x", "y")),
        functools.partial(reference.all_to_all, axis=("x", "y")),
    )
    arguments = [jax.ShapeDtypeStruct((rows * columns, ROWS, DIM), jnp.float32)]
    return [
        dataclasses.asdict(compile_on_slice(topology, exchange, arguments, axes=axes))
        for exchange in exchanges
    ]


def lookup(topology: str) -> dict[str, Any]:
    """A table of 512 MB, which nothing may copy."""
    devices = grid_of(topology).devices
    arguments = [
        jax.ShapeDtypeStruct((1_000_000, 128), jnp.float32),
        jax.ShapeDtypeStruct((100_000,), jnp.int32),
        jax.ShapeDtypeStruct((devices * 1024 + 1,), jnp.int32),
    ]
    exchange = functools.partial(fused_lookup_all_to_all, axis="x")
    return dataclasses.asdict(compile_on_slice(topology, exchange, arguments))


def pod() -> dict[str, Any]:
    """256 chips, a chunk of one tile for each: what the semaphores allow."""
    exchange = functools.partial(api.all_to_all, axis="x")
    arguments = [jax.ShapeDtypeStruct((256, 8, 128), jnp.float32)]
    return dataclasses.asdict(compile_on_slice("v6e:16x16", exchange, arguments))


PROOFS = {
    **{
        f"{name}, {topology}": functools.partial(compile_both, name, topology)
        for name, topology in itertools.product(EXCHANGES, TOPOLOGIES)
    },
    **{f"torus, {topology}": functools.partial(torus, topology, *axes) for topology, axes in TORI.items()},
    **{f"lookup, {topology}": functools.partial(lookup, topology) for topology in TOPOLOGIES},
    "256 chips": pod,
}

if __name__ == "__main__":
    serve(PROOFS)
