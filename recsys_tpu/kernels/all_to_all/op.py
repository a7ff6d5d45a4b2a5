"""The exchange kernels as ops of the `tpu` device.  Import only where that device is active.

An op takes this rank's lines of 128 elements.  Its kernel runs on a mesh of all ranks (torch_tpu takes no
other) and along one axis of it, so that a part of the ranks, such as those of a host, can exchange as well.
Each axis has a barrier semaphore (`collective_id`) of its own: a chip may be done on one axis and enter an
exchange on the other while its peers there still wait on the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from torch import Tensor

from recsys_tpu.kernels.all_to_all import api, pooled
from recsys_tpu.kernels.all_to_all.lines import LANES
from recsys_tpu.kernels.all_to_all.pooled import MeshAxis

assert pooled.LANES == LANES

_pallas = torch.get_device_module("tpu").pallas


@functools.cache
def exchange_op(axis: MeshAxis) -> Callable[..., Tensor]:
    """The all-to-all between the ranks of `axis`, registered on first use.

    Takes lines ``[ranks, lines, 128]``; the lines that each rank's tables fill; whether this is the way
    back, on which a rank receives its own tables' lines from everyone instead of sending them to everyone;
    the factor; and whether lines travel as bfloat16.  All but the lines are the same on every rank.
    """
    mesh, shards = _mesh(axis)

    @_pallas.jax_op(
        f"recsys_tpu::exchange_lines_{axis.label}",
        mesh=mesh,
        input_partition_specs=(shards, None, None, None, None),
        output_partition_specs=(shards,),
    )
    def exchange_lines(
        lines: jax.Array, counts: list[int], back: bool, scale: float, bf16: bool
    ) -> jax.Array:
        options: dict[str, Any] = {
            "axis": axis.name,
            "collective_id": axis.index,
            "scale": scale,
            "wire_dtype": jnp.bfloat16 if bf16 else None,
        }

        def one_chip(lines: jax.Array) -> jax.Array:
            if len(set(counts)) == 1:
                return api.all_to_all(lines, **options)
            to_everyone = np.repeat(np.array(counts)[:, None], len(counts), axis=1)
            return api.planned_all_to_all(lines, to_everyone.T if back else to_everyone, **options)

        return _on_every_chip(one_chip, mesh, shards)(lines)

    return _of_local(exchange_lines, axis)


@functools.cache
def sum_op(axis: MeshAxis) -> Callable[..., Tensor]:
    """The reduce-scatter: float32 ``[ranks, lines, 128]`` partial sums to this rank's ``[lines, 128]``."""
    mesh, shards = _mesh(axis)

    @_pallas.jax_op(
        f"recsys_tpu::sum_lines_{axis.label}",
        mesh=mesh,
        input_partition_specs=(shards,),
        output_partition_specs=(shards,),
    )
    def sum_lines(lines: jax.Array) -> jax.Array:
        total = functools.partial(api.reduce_scatter, axis=axis.name, collective_id=axis.index)
        return _on_every_chip(total, mesh, shards)(lines)

    return _of_local(sum_lines, axis)


@functools.cache
def gather_op(axis: MeshAxis) -> Callable[..., Tensor]:
    """The all-gather: ``[lines, 128]`` to every rank's, ``[ranks, lines, 128]``."""
    mesh, shards = _mesh(axis)

    @_pallas.jax_op(
        f"recsys_tpu::gather_lines_{axis.label}",
        mesh=mesh,
        input_partition_specs=(shards,),
        output_partition_specs=(shards,),
    )
    def gather_lines(lines: jax.Array) -> jax.Array:
        everyone = functools.partial(api.all_gather, axis=axis.name, collective_id=axis.index)
        return _on_every_chip(everyone, mesh, shards)(lines)

    return _of_local(gather_lines, axis)


def _mesh(axis: MeshAxis) -> tuple[Mesh, PartitionSpec]:
    """The mesh of all ranks, and how a local tensor lies on it: a leading dimension of 1 for each axis."""
    mesh = _pallas.get_pallas_mesh(axis.names, mesh_shape=axis.shape, process_group=axis.world)
    return mesh, PartitionSpec(*axis.names)


def _of_local(op: Callable[..., Tensor], axis: MeshAxis) -> Callable[..., Tensor]:
    """`op` for tensors without the leading dimensions."""
    axes = len(axis.shape)

    def call(lines: Tensor, *options: Any) -> Tensor:
        result = op(lines.reshape(*[1] * axes, *lines.shape), *options)
        return result.reshape(result.shape[axes:])

    return call


def _on_every_chip(function: Callable[[jax.Array], jax.Array], mesh: Mesh, shards: PartitionSpec) -> Any:
    axes = len(mesh.axis_names)

    def one_chip(lines: jax.Array) -> jax.Array:
        result = function(lines.reshape(lines.shape[axes:]))
        return result.reshape(*[1] * axes, *result.shape)

    def run(lines: jax.Array) -> jax.Array:
        # not under the mesh of one chip that lookups in the same program may be traced in
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            sharded = jax.shard_map(one_chip, mesh=mesh, in_specs=shards, out_specs=shards, check_vma=False)
            return sharded(lines)

    return run
