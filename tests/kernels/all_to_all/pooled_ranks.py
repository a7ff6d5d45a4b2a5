"""What each rank of the tests of `exchange_pooled` runs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext

from recsys_tpu.kernels.all_to_all.pooled import exchange_pooled, sum_pooled
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.pooled_exchange import PooledExchange
from tests.sharding import sharded


def both_exchanges(runtime: Runtime, cases: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    """Outputs and gradients of our exchange and of TorchRec's, for (dims, batch a rank)."""
    return [_both(runtime, dims, batch) for dims, batch in cases]


def _both(runtime: Runtime, dims: list[int], batch: int) -> dict[str, Any]:
    group, ranks = runtime.process_group, runtime.world_size
    generator = torch.Generator().manual_seed(runtime.rank)
    pooled = torch.randn(ranks * batch, dims[runtime.rank], generator=generator)
    weight = torch.randn(batch, sum(dims), generator=generator).to(runtime.device)

    def run(exchange: Any) -> list[torch.Tensor]:
        rows = pooled.to(runtime.device).requires_grad_()
        out = exchange(rows)
        (out * weight).sum().backward()
        return [out.detach().cpu(), rows.grad.cpu()]

    def ours(rows: torch.Tensor, **options: Any) -> torch.Tensor:
        return exchange_pooled(rows, group, dims=dims, transport="collective", **options)

    def bf16(rows: torch.Tensor) -> torch.Tensor:
        return ours(rows, wire_dtype=torch.bfloat16, grad_wire_dtype=torch.bfloat16, grad_scale=1 / ranks)

    theirs = PooledEmbeddingsAllToAll(group, dims, runtime.device)
    return {
        "ours": run(lambda rows: ours(rows, grad_scale=1 / ranks)),
        "torchrec": run(lambda rows: theirs(rows).wait()),
        "bf16": run(bf16),
    }


def on_two_ranks(runtime: Runtime, cases: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Together, because starting ranks takes seconds."""
    refused = [*refusals(runtime), uneven_batches(runtime)] if runtime.device.type == "cpu" else []
    return {
        "cases": both_exchanges(runtime, cases),
        "sums": sums_on_two_ranks(runtime),
        "refused": refused,
    }


def refusals(runtime: Runtime) -> list[str]:
    """What is said to wrong arguments, on a CPU rank of two."""
    group = runtime.process_group
    calls: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (torch.zeros(4, 8), {"dims": [8]}),
        (torch.zeros(5, 8), {"dims": [8, 8]}),
        (torch.zeros(4, 7), {"dims": [8, 8]}),
        (torch.zeros(4, 8, dtype=torch.float64), {"dims": [8, 8]}),
        (torch.zeros(4, 8), {"dims": [8, 8], "wire_dtype": torch.float16}),
        (torch.zeros(4, 8), {"dims": [8, 8], "transport": "kernel"}),
    ]
    said = []
    for pooled, options in calls:
        try:
            exchange_pooled(pooled, group, **{"transport": "collective", **options})
        except ValueError as error:
            said.append(str(error))
    return said


def sums_on_two_ranks(runtime: Runtime) -> dict[str, list[torch.Tensor]]:
    """Output and gradient of our reduce-scatter and of TorchRec's."""
    group, ranks, batch, dim = runtime.process_group, runtime.world_size, 3, 40
    generator = torch.Generator().manual_seed(runtime.rank)
    partial = torch.randn(ranks * batch, dim, generator=generator)
    weight = torch.randn(batch, dim, generator=generator).to(runtime.device)

    def run(exchange: Any) -> list[torch.Tensor]:
        rows = partial.to(runtime.device).requires_grad_()
        out = exchange(rows)
        (out * weight).sum().backward()
        return [out.detach().cpu(), rows.grad.cpu()]

    theirs = PooledEmbeddingsReduceScatter(group)
    return {
        "ours": run(lambda rows: sum_pooled(rows, group, transport="collective", grad_scale=1 / ranks)),
        "torchrec": run(lambda rows: theirs(rows).wait()),
    }


def train_with_both(runtime: Runtime, cases: list[Any]) -> list[dict[str, Any]]:
    """The same training with TorchRec's exchange and with ours; table-wise also in bf16 on the wire."""
    shard, results = sharded.shard, []
    for case in cases:
        runs = {}
        ways = {"collective": {"exchange": "collective"}, "pallas": {"exchange": "pallas"}}
        if case.tables[0].sharding == "table_wise":
            ways["bf16"] = {"exchange": "pallas", "wire": "bf16"}
        for way, options in ways.items():
            sharded.shard = functools.partial(shard, **options)
            runs[way] = sharded.train_sharded(runtime, case)
        results.append(runs)
    sharded.shard = shard
    return results


def uneven_batches(runtime: Runtime) -> str:
    """What is said when ranks bring batches of different sizes."""
    context = EmbeddingShardingContext(batch_size_per_rank=[3, 4])
    try:
        PooledExchange([])(torch.zeros(7, 8), context)
    except ValueError as error:
        return str(error)
    return ""
