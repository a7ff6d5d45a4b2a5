"""What each rank of the tests of `exchange_pooled` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll

from recsys_tpu.kernels.all_to_all.pooled import exchange_pooled
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding import pooled_shardings
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


class _Output(torch.nn.Module):
    """A table-wise output dist on our exchange."""

    def __init__(self, group: dist.ProcessGroup, dims: list[int]) -> None:
        super().__init__()
        self._group, self._dims = group, dims

    def forward(self, pooled: torch.Tensor, context: Any = None) -> Any:
        from torchrec.distributed.types import NoWait

        ranks = len(self._dims)
        out = exchange_pooled(
            pooled, self._group, dims=self._dims, transport="collective", grad_scale=1 / ranks
        )
        return NoWait(out)


def train_with_both(runtime: Runtime, case: Any) -> dict[str, Any]:
    """The same table-wise training, with TorchRec's exchange and with ours."""
    theirs = sharded.train_sharded(runtime, case)

    def create_output_dist(self: Any, device: torch.device | None = None) -> torch.nn.Module:
        return _Output(self._env.process_group, self._dim_sum_per_rank())

    pooled_shardings.TableWise.create_output_dist = create_output_dist
    try:
        ours = sharded.train_sharded(runtime, case)
    finally:
        del pooled_shardings.TableWise.create_output_dist
    return {"torchrec": theirs, "ours": ours}
