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
    emulated,
    make_plan,
)
from recsys_tpu.sharding.planner.torchrec_bridge import (
    TpuEmbeddingShardingPlanner,
    to_sharding_plan,
    workload_of,
)
from tests.sharding import training
from tests.sharding.planner.byte_counts import counted, modelled
from tests.sharding.planner.strategies import plan_of_type, small_topology
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
SHORT = replace(CASE, steps=2)


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
    plans = [plan_of_type(CASE, 2, 1, kind) for kind in TYPES]
    _check(tmp_path, plans + _solver_plans(2, 1), 2, "cpu", True)


def test_every_type_and_the_solvers_plans_train_with_torchrecs_own_sharder(tmp_path: Path) -> None:
    plans = [plan_of_type(CASE, 2, 1, kind) for kind in TYPES]
    # TorchRec 1.9.2's grid sharding does not train mean-pooled tables as unsharded ones are.
    sums = replace(CASE, tables=tuple(replace(table, mean=False) for table in CASE.tables))
    _check(tmp_path, plans + _solver_plans(2, 1), 2, "cpu", False, sums)


@pytest.mark.skipif(
    bool(requirements.problems()), reason=f"no emulated tpu device. Run: {requirements.INSTALL}"
)
@pytest.mark.parametrize(
    ("world", "hosts"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_the_solvers_plans_train_on_the_emulated_device(tmp_path: Path, world: int, hosts: int) -> None:
    plans = _solver_plans(world, hosts) if world > 1 else _solver_plans(1, 1)[:1]
    _check(tmp_path, plans, world, "tpu-emulated", True, SHORT)


@pytest.mark.long
@pytest.mark.skipif(
    bool(requirements.problems()), reason=f"no emulated tpu device. Run: {requirements.INSTALL}"
)
def test_types_over_two_hosts_train_on_the_emulated_device(tmp_path: Path) -> None:
    kinds = (ShardingType.GRID_SHARD, ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE)
    _check(tmp_path, [plan_of_type(CASE, 4, 2, kind) for kind in kinds], 4, "tpu-emulated", True, SHORT)


def test_a_step_moves_the_bytes_that_the_cost_model_counts() -> None:
    tables = (Table(20_000, 128, ("a",), ""), Table(3_000, 32, ("b", "c"), ""), Table(200, 32, ("d",), ""))
    case = Case(tables, optimizer="rowwise_adagrad", batch=512, longest_bag=8)
    kinds = [kind for kind in TYPES if kind is not ShardingType.DATA_PARALLEL]
    plans = [plan_of_type(case, 2, 1, kind) for kind in kinds]
    for kind, plan, found in zip(kinds, plans, counted(case, plans, "cpu"), strict=True):
        predicted = modelled(case, plan)
        for term in ("ids", "partial sums"):
            assert predicted[term] == pytest.approx(found[term]), (kind, term)
        if kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
            # Sums of a row group go to other groups only; the model lets them go to all ranks.
            assert predicted["vectors"] > found["vectors"] == 0
        else:
            assert predicted["vectors"] == pytest.approx(found["vectors"]), kind
        for term in ("lookup", "update"):
            assert predicted[term] == pytest.approx(found[term], rel=0.05), (kind, term)


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
    plan = plan_of_type(CASE, 2, 1, ShardingType.TABLE_WISE)
    model = Model(replace(CASE, tables=(*CASE.tables[:3], Table(98, 8, ("e",), ""), Table(5, 8, ("g",), ""))))
    with pytest.raises(
        PlanDriftError, match=r"table t3: the plan has \(97, 8\).*; table t4 is not in the plan"
    ):
        to_sharding_plan(plan, model)


def test_a_row_group_that_the_job_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(PlanDriftError, match="set LOCAL_WORLD_SIZE=2"):
        to_sharding_plan(plan_of_type(CASE, 4, 2, ShardingType.TABLE_ROW_WISE), Model(CASE))


@pytest.mark.parametrize(
    ("given", "expected"), [(False, set()), (["t1"], {"t1"}), (True, {"t0", "t1", "t2", "t3"})]
)
def test_deduplicated_tables_are_priced_as_such(given: bool | list[str], expected: set[str]) -> None:
    work = workload_of(Model(CASE), batch_per_rank=6, deduplicate=given)
    assert {table.name for table in work.tables if table.deduplicated} == expected
    planner = TpuEmbeddingShardingPlanner(emulated(2), batch_size=6, deduplicate=given)
    assert len(planner.make(Model(CASE), []).tables) == len(CASE.tables)


def test_hosts_of_one_rank_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    planner = TpuEmbeddingShardingPlanner(emulated(2, host_ranks=1), batch_size=6)
    plan = planner.make(Model(CASE), [])
    assert plan.row_group == 1 and plan.topology.ranks == 2
