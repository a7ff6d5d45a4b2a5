"""On a rank: a compiled dense tower behind sharded embeddings, with batches of widely varying id counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recsys_tpu.runtime import Runtime
from tests.sharding.sharded import pieces, shard
from tests.sharding.training import Case, batch_of


def train_with_tower(runtime: Runtime, case: Case, longest_bags: list[int]) -> dict[str, Any]:
    """Steps with a compiled tower; bags of step `i` have up to ``longest_bags[i]`` ids."""
    dmp = shard(case, runtime)
    width = sum(table.dim * len(table.features) for table in case.tables)
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1)).to(runtime.device)
    compiled = runtime.compile(tower)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.05)
    compilations, losses = [], []
    for step in range(case.steps):
        grown = replace(case, longest_bag=longest_bags[step % len(longest_bags)])
        values = dmp.module.ebc(batch_of(grown, step, runtime.rank, runtime.world_size)).values()
        loss = (compiled(values)[:, 0] - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in tower.parameters():  # every rank holds the tower
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= runtime.world_size
        optimizer.step()
        dmp.fused_optimizer.step()
        losses.append(float(loss.detach()))
        watch = runtime.compile_watch
        before = len(watch.warmup) + len(watch.after_warmup)
        watch.step_done()
        compilations.append(len(watch.warmup) + len(watch.after_warmup) - before)
    counters = dmp.module.ebc.capacity_counters
    return {
        "compilations": compilations,
        "after_warmup": [str(compilation) for compilation in runtime.compile_watch.after_warmup],
        "losses": losses,
        "late": counters.late,
        "shapes": len(counters.shapes),
        "waste": counters.padding_waste,
        "tables": {name: pieces(value) for name, value in dmp.module.ebc.state_dict().items()},
    }
