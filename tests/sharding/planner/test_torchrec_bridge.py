"""Plans drive TorchRec's DistributedModelParallel: every sharding type, and the solver's own plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recsys_tpu.emulation import requirements
from recsys_tpu.sharding.planner import (
    Effort,
    Plan,
    PlanDriftError,
    ShardingType,
    TableConstraint,
    TablePlan,
    emulated,
    make_plan,
)
from recsys_tpu.sharding.planner.costs import ID_BYTES, CostModel
from recsys_tpu.sharding.planner.estimate import table_terms
from recsys_tpu.sharding.planner.torchrec_bridge import (
    TpuEmbeddingShardingPlanner,
    to_sharding_plan,
    workload_of,
)
from tests.sharding import training
from tests.sharding.planner.strategies import small_topology
from tests.sharding.ranks import on_ranks
from tests.sharding.training import Case, Model, Table

TRAIN = "tests.sharding.planner.bridge_ranks:train_planned"
CASE = Case(
    (
        Table(50, 16, ("a", "b"), ""),
        Table(3, 8, ("c",), ""),
        Table(300, 32, ("d", "a"), "", mean=True),
        Table(97, 8, ("e",), ""),
    ),
    optimizer="sgd",
    steps=4,
)
EVERYWHERE = (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE)


def _plan(ranks: int, hosts: int, kind: ShardingType) -> Plan:
    """All tables of the case under one sharding type, column shards as uneven as the type allows."""
    topology = small_topology(ranks, hosts=hosts)
    group = topology.host_ranks
    planned = []
    for index, table in enumerate(CASE.tables):
        owner = index % ranks
        match kind:
            case ShardingType.COLUMN_WISE if table.dim == 32:
                shards = ((owner, 20), ((owner + 1) % ranks, 12))
            case ShardingType.COLUMN_WISE if table.dim == 16:
                shards = ((owner, 4), ((owner + 1) % ranks, 12))
            case ShardingType.TABLE_COLUMN_WISE:
                first = (index % hosts) * group
                shards = tuple((first + column, table.dim // group) for column in range(group))
            case ShardingType.GRID_SHARD if hosts > 1:
                shards = tuple((host * group, table.dim // hosts) for host in reversed(range(hosts)))
            case ShardingType.TABLE_ROW_WISE | ShardingType.GRID_SHARD:
                shards = (((index % hosts) * group, table.dim),)
            case _:
                shards = ((0 if kind in EVERYWHERE else owner, table.dim),)
        planned.append(
            TablePlan(name=f"t{index}", rows=table.rows, dim=table.dim, kind=kind, column_shards=shards)
        )
    plan = Plan(topology=topology, row_group=group, tables=tuple(planned))
    plan.check_complete()
    return plan


def _solver_plans(ranks: int, hosts: int) -> list[Plan]:
    """Plans that the solver makes when it may use one type only, or all."""
    work = workload_of(Model(CASE), batch_per_rank=CASE.batch // ranks)
    topology = small_topology(ranks, hosts=hosts)
    group = topology.host_ranks
    choices = [
        (),
        (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE),
        (ShardingType.ROW_WISE,),
        (ShardingType.TABLE_COLUMN_WISE,),
    ]
    return [
        make_plan(
            replace(
                work, constraints={t.name: TableConstraint(types=types, min_width=4) for t in work.tables}
            ),
            topology,
            row_group=group,
            effort=Effort(steps=10),
        )
        for types in choices
    ]


def _check(tmp_path: Path, plans: list[Plan], world: int, device: str, ours: bool, case: Case = CASE) -> None:
    files = []
    for index, plan in enumerate(plans):
        path = tmp_path / f"plan{index}.json"
        plan.save(path)
        files.append(str(path))
    results = on_ranks(TRAIN, world, device, case, files, ours)
    expected = training.train_unsharded(case)["tables"]
    for index, plan in enumerate(plans):
        for name, value in expected.items():
            parts = [rank[index][name] for rank in results]
            if plan.table(name.split(".")[1]).kind is ShardingType.DATA_PARALLEL:
                parts = parts[:1]
            trained = training.assembled(parts, value.shape)
            torch.testing.assert_close(trained, value, rtol=1e-5, atol=1e-5)
            assert not torch.equal(trained, training.initial_tables(case)[name]), "was not trained"


TYPES = list(ShardingType)


def test_every_type_and_the_solvers_plans_train_on_two_ranks(tmp_path: Path) -> None:
    plans = [_plan(2, 1, kind) for kind in TYPES]
    _check(tmp_path, plans + _solver_plans(2, 1), 2, "cpu", True)


def test_every_type_and_the_solvers_plans_train_with_torchrecs_own_sharder(tmp_path: Path) -> None:
    plans = [_plan(2, 1, kind) for kind in TYPES]
    # TorchRec 1.9.2's grid sharding does not train mean-pooled tables as unsharded ones are.
    sums = replace(CASE, tables=tuple(replace(table, mean=False) for table in CASE.tables))
    _check(tmp_path, plans + _solver_plans(2, 1), 2, "cpu", False, sums)


@pytest.mark.slow
@pytest.mark.skipif(
    bool(requirements.problems()), reason=f"no emulated tpu device. Run: {requirements.INSTALL}"
)
@pytest.mark.parametrize(("world", "hosts"), [(1, 1), (2, 1), (4, 2)])
def test_the_solvers_plans_train_on_the_emulated_device(tmp_path: Path, world: int, hosts: int) -> None:
    plans = _solver_plans(world, hosts) if world > 1 else _solver_plans(1, 1)[:1]
    _check(tmp_path, plans, world, "tpu-emulated", True)


@pytest.mark.slow
@pytest.mark.skipif(
    bool(requirements.problems()), reason=f"no emulated tpu device. Run: {requirements.INSTALL}"
)
def test_types_over_two_hosts_train_on_the_emulated_device(tmp_path: Path) -> None:
    kinds = (ShardingType.GRID_SHARD, ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE)
    _check(tmp_path, [_plan(4, 2, kind) for kind in kinds], 4, "tpu-emulated", True)


def _exchanged_bytes(plan: Plan) -> float:
    """Bytes of vectors and gradients that the cost model lets all ranks send to others in a step."""
    work = workload_of(Model(CASE), batch_per_rank=CASE.batch // plan.topology.ranks)
    model = CostModel(work, plan.topology, plan.topology.row_groups[0])
    total = 0.0
    for spec in work.tables:
        table = plan.table(spec.name)
        seconds = table_terms(model, plan, spec, table)["send"].sum()
        ids = CASE.batch * spec.ids_per_sample * len(table.column_shards)
        total += seconds * plan.topology.injection_bytes_per_s - ID_BYTES * ids / 2
    return total


def test_the_exchange_moves_the_bytes_that_the_cost_model_counts(tmp_path: Path) -> None:
    plans = [_plan(2, 1, ShardingType.TABLE_WISE), _plan(2, 1, ShardingType.COLUMN_WISE)]
    files = [str(tmp_path / f"plan{index}.json") for index in range(len(plans))]
    for plan, name in zip(plans, files, strict=True):
        plan.save(Path(name))
    counted = on_ranks("tests.sharding.planner.bridge_ranks:count_exchange", 2, "cpu", CASE, files)
    for index, plan in enumerate(plans):
        assert sum(rank[index] for rank in counted) == pytest.approx(_exchanged_bytes(plan))


def test_the_drop_in_class_plans_collectively() -> None:
    results = on_ranks("tests.sharding.planner.bridge_ranks:train_with_planner_class", 2, "cpu", CASE)
    assert results[0] == results[1]
    assert set(results[0][0]) == {f"t{index}" for index in range(len(CASE.tables))}


def test_the_drop_in_class_obeys_torchrec_constraints() -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.types import ParameterConstraints

    planner = TpuEmbeddingShardingPlanner(
        emulated(4),
        batch_size=64,
        constraints={"t2": ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[3.0, 1.0])},
    )
    model = Model(CASE)
    plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
    assert plan.plan["ebc"]["t2"].sharding_type == "row_wise"


def test_a_plan_of_other_tables_is_refused() -> None:
    plan = _plan(2, 1, ShardingType.TABLE_WISE)
    model = Model(replace(CASE, tables=(*CASE.tables[:3], Table(98, 8, ("e",), ""), Table(5, 8, ("g",), ""))))
    with pytest.raises(
        PlanDriftError, match=r"table t3: the plan has \(97, 8\).*; table t4 is not in the plan"
    ):
        to_sharding_plan(plan, model)


def test_a_row_group_that_the_job_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(PlanDriftError, match="set LOCAL_WORLD_SIZE=2"):
        to_sharding_plan(_plan(4, 2, ShardingType.TABLE_ROW_WISE), Model(CASE))


@pytest.mark.parametrize(
    ("given", "expected"), [(False, set()), (["t1"], {"t1"}), (True, {"t0", "t1", "t2", "t3"})]
)
def test_deduplicated_tables_are_priced_as_such(given: bool | list[str], expected: set[str]) -> None:
    work = workload_of(Model(CASE), batch_per_rank=6, deduplicate=given)
    assert {table.name for table in work.tables if table.deduplicated} == expected
    planner = TpuEmbeddingShardingPlanner(emulated(2), batch_size=6, deduplicate=given)
    assert len(planner.make(Model(CASE), []).tables) == len(CASE.tables)
