"""Under TorchRec's own cost model, with HBM enforced, this solver is never worse than TorchRec's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import device, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.perf_models import NoopPerfModel, NoopStorageModel
from torchrec.distributed.planner.types import PlannerError, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsys_tpu.sharding.planner.chips import CHIPS
from recsys_tpu.sharding.planner.topology import parse_topology
from recsys_tpu.sharding.planner.torchrec_costs import (
    TorchRecCostPlanner,
    choose_options,
    torchrec_topology,
)


def _model(seed: int, tables: int) -> nn.Module:
    random = np.random.default_rng(seed)
    return EmbeddingBagCollection(
        device=device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=int(10 ** random.uniform(2, 6.5)),
                embedding_dim=int(random.choice([64, 128, 256])),
                feature_names=[f"f{i}"],
            )
            for i in range(tables)
        ],
    )


def _topology(ranks: int, hbm: int) -> Topology:
    return Topology(world_size=ranks, local_world_size=4, compute_device="cuda", hbm_cap=hbm)


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("ranks", [4, 8])
def test_never_worse_than_torchrecs_planner(seed: int, ranks: int) -> None:
    module = nn.ModuleDict({"ebc": _model(seed, 6 + seed)})
    topology = _topology(ranks, 4 * 2**30)
    sharders = [EmbeddingBagCollectionSharder()]
    theirs = EmbeddingShardingPlanner(topology=topology, batch_size=256)
    theirs.plan(module, sharders)
    mine = TorchRecCostPlanner(topology=topology, batch_size=256)
    plan = mine.plan(module, sharders)
    constrained = mine._storage_reservation.reserve(
        topology=topology, batch_size=256, module=module, sharders=sharders, constraints=None
    )
    chosen = choose_options(mine._enumerator.enumerate(module, sharders), constrained)
    assert {name: sharding.ranks for name, sharding in plan.plan["ebc"].items()} == {
        option.name: [shard.rank for shard in option.shards] for option in chosen
    }
    assert len(chosen) == 6 + seed
    rate = NoopPerfModel(topology).rate
    assert rate(chosen) <= rate(theirs.get_selected_options()) * (1 + 1e-9)
    assert NoopStorageModel(topology).rate(chosen) <= min(d.storage.hbm for d in constrained.devices)


def test_a_slice_as_torchrecs_topology() -> None:
    slice_ = parse_topology("v5p:2x2x2")
    topology = torchrec_topology(slice_)
    assert (topology.world_size, topology.local_world_size) == (8, slice_.host_ranks)
    assert {device.storage.hbm for device in topology.devices} == {slice_.hbm_bytes}
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=256)
    planner.plan(nn.ModuleDict({"ebc": _model(0, 4)}), [EmbeddingBagCollectionSharder()])
    assert 0 < NoopStorageModel(topology).rate(planner.get_selected_options()) <= slice_.hbm_bytes


def test_torchrecs_planner_is_told_that_a_table_does_not_fit() -> None:
    slice_ = replace(parse_topology("v5p:2x2x2"), chip=replace(CHIPS["v5p"], hbm_bytes=10**6))
    planner = EmbeddingShardingPlanner(topology=torchrec_topology(slice_), batch_size=256)
    with pytest.raises(PlannerError):
        planner.plan(nn.ModuleDict({"ebc": _model(0, 4)}), [EmbeddingBagCollectionSharder()])
