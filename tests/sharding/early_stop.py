"""On a rank: leave a prepared-ahead loop in its midst, then train on."""

from __future__ import annotations

from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.pipeline import prepared_ahead
from tests.sharding.sharded import shard, train_steps
from tests.sharding.training import Case, Table, batch_of


def run(runtime: Runtime) -> int:
    case = Case((Table(20, 8, ("a",), "row_wise"),))
    dmp = shard(case, runtime)
    batches = (batch_of(case, step, runtime.rank, runtime.world_size) for step in range(10))
    steps = 0
    for batch in prepared_ahead(dmp, batches, features_of=lambda features: features):
        dmp.module.ebc(batch).values().sum().backward()
        steps += 1
        if steps == 3:
            break
    train_steps(dmp, case, runtime, range(2))
    return steps
