"""The exchange kernels as an op of the `tpu` device.  Import only where that device is active."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
from jax.sharding import PartitionSpec
from torch import Tensor

from recsys_tpu.kernels.all_to_all import api, pooled
from recsys_tpu.kernels.all_to_all.lines import LANES

assert pooled.LANES == LANES

_pallas = torch.get_device_module("tpu").pallas


@functools.cache
def exchange_op(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """The exchange between the ranks of `group`, which must be all ranks, registered on first use.

    Takes lines ``[ranks, lines, 128]``; the lines that each rank's tables fill; whether this is the way
    back, on which a rank receives its own tables' lines from everyone instead of sending them to everyone;
    the factor; and whether lines travel as bfloat16.  All but the lines are the same on every rank.
    """
    mesh = _pallas.get_pallas_mesh(("rank",), process_group=group)
    shards = PartitionSpec("rank")

    @_pallas.jax_op(
        f"recsys_tpu::exchange_lines_{group.group_name}",
        mesh=mesh,
        input_partition_specs=(shards, None, None, None, None),
        output_partition_specs=(shards,),
    )
    def exchange_lines(
        lines: jax.Array, counts: list[int], back: bool, scale: float, bf16: bool
    ) -> jax.Array:
        options: dict[str, Any] = {
            "axis": "rank",
            "scale": scale,
            "wire_dtype": jnp.bfloat16 if bf16 else None,
        }

        def one_chip(lines: jax.Array) -> jax.Array:
            if len(set(counts)) == 1:
                return api.all_to_all(lines, **options)
            to_everyone = np.repeat(np.array(counts)[:, None], len(counts), axis=1)
            return api.planned_all_to_all(lines, to_everyone.T if back else to_everyone, **options)

        return jax.shard_map(one_chip, mesh=mesh, in_specs=shards, out_specs=shards, check_vma=False)(lines)

    return exchange_lines
