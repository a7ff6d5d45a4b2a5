"""On a rank: a compiled dense tower behind sharded embeddings, with a batch that outgrows its capacities."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recsys_tpu.runtime import Runtime
from tests.sharding.sharded import pieces, shard
from tests.sharding.training import Case, batch_of

WARMUP = 2


def train_with_tower(runtime: Runtime, case: Case, burst: int) -> dict[str, Any]:
    """Steps with a compiled tower; step `burst` has bags 40 times as long."""
    dmp = shard(case, runtime)
    width = sum(table.dim * len(table.features) for table in case.tables)
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1)).to(runtime.device)
    compiled = runtime.compile(tower)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.05)
    compilations, losses = [], []
    for step in range(case.steps):
        longest = case.longest_bag * (40 if step == burst else 1)
        grown = Case(case.tables, batch=case.batch, longest_bag=longest, seed=case.seed)
        values = dmp.module.ebc(batch_of(grown, step, runtime.rank, runtime.world_size)).values()
        loss = (compiled(values)[:, 0] - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
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
        "losses": losses,
        "moves": counters.moves,
        "shapes": len(counters.shapes),
        "waste": counters.padding_waste,
        "tables": {name: pieces(value) for name, value in dmp.module.ebc.state_dict().items()},
    }
