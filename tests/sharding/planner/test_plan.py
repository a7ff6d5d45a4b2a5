"""Plan files and the shards that a plan means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from recsys_tpu.sharding.planner import ShardingType
from recsys_tpu.sharding.planner.errors import PlanDriftError, PlanInputError
from recsys_tpu.sharding.planner.make import make_plan
from recsys_tpu.sharding.planner.plan import Plan, TablePlan, table_plan
from recsys_tpu.sharding.planner.tables import TableSpec, Workload
from recsys_tpu.sharding.planner.topology import emulated

TABLES = tuple(TableSpec(name=f"t{i}", rows=1000 * (i + 1), dim=16, pooling_factors=(1.0,)) for i in range(4))
WORKLOAD = Workload(tables=TABLES, batch_per_rank=64)


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan.yml"])
def test_a_file_holds_the_whole_plan(tmp_path: Path, name: str):
    plan = make_plan(WORKLOAD, emulated(4))
    path = tmp_path / "new" / name
    plan.save(path)
    assert Plan.load(path) == plan
    text = path.read_text()
    tree = json.loads(text) if name.endswith("json") else yaml.safe_load(text)
    assert text.startswith("{" if name.endswith("json") else "format_version: ") and text.endswith("\n")
    assert list(tree) == ["format_version", "topology", "row_group", "summary", "made_for", "tables"]
    assert [table["name"] for table in tree["tables"]] == ["t0", "t1", "t2", "t3"]
    plan.save(path)  # over an existing one


def test_a_table_by_name():
    plan = make_plan(WORKLOAD, emulated(4))
    assert plan.table("t2").rows == 3000
    with pytest.raises(PlanInputError, match=r"no table 'x'; it has 4, such as t0, t1, t2, t3$"):
        plan.table("x")


def test_a_plan_puts_rows_on_its_own_row_groups():
    table = TablePlan(name="t0", rows=10, dim=8, kind=ShardingType.TABLE_ROW_WISE, column_shards=((2, 8),))
    plan = replace(make_plan(WORKLOAD, emulated(4)), tables=(table,), row_group=2)
    assert [(shard.rank, shard.first_row, shard.rows) for _, shard in plan.shards()] == [(2, 0, 5), (3, 5, 5)]


def _covered(table: TablePlan, ranks: int, row_group: int) -> list[int]:
    """Ranks in the order of the shards, after a check that these cover each cell of the table once."""
    cells = np.zeros((table.rows, table.dim), np.int64)
    found = list(table.shards(ranks, row_group))
    for shard in found:
        cells[
            shard.first_row : shard.first_row + shard.rows,
            shard.first_column : shard.first_column + shard.columns,
        ] += 1
    assert (cells == 1).all()
    return [shard.rank for shard in found]


@pytest.mark.parametrize(
    ("kind", "column_shards", "ranks"),
    [
        (ShardingType.TABLE_WISE, ((3, 8),), [3]),
        (ShardingType.COLUMN_WISE, ((2, 4), (0, 4)), [2, 0]),
        (ShardingType.ROW_WISE, ((0, 8),), [0, 1, 2, 3]),
        (ShardingType.TABLE_ROW_WISE, ((2, 8),), [2, 3]),
        (ShardingType.GRID_SHARD, ((2, 4), (0, 4)), [2, 3, 0, 1]),
    ],
)
def test_shards_cover_a_table_once(kind, column_shards, ranks):
    for rows in (4, 7, 10):
        table = TablePlan(name="t", rows=rows, dim=8, kind=kind, column_shards=column_shards)
        assert _covered(table, ranks=4, row_group=2) == ranks


def test_a_data_parallel_table_is_whole_on_every_rank():
    table = TablePlan(name="t", rows=5, dim=8, kind=ShardingType.DATA_PARALLEL, column_shards=((0, 8),))
    shards = list(table.shards(3, 1))
    assert [shard.rank for shard in shards] == [0, 1, 2]
    assert {(shard.first_row, shard.rows, shard.first_column, shard.columns) for shard in shards} == {
        (0, 5, 0, 8)
    }


def test_all_shards_come_with_their_tables():
    plan = make_plan(WORKLOAD, emulated(2))
    found = list(plan.shards())
    assert {table.name for table, _ in found} == {"t0", "t1", "t2", "t3"}
    assert sum(shard.rows * shard.columns for _, shard in found) == sum(t.rows * t.dim for t in TABLES)


def test_everything_that_has_changed_is_told_at_once():
    plan = make_plan(WORKLOAD, emulated(4))
    changed = (
        TableSpec(name="t0", rows=1001, dim=8, pooling_factors=(1.0,)),
        *TABLES[1:3],
        TableSpec(name="new", rows=5, dim=16, pooling_factors=(1.0,)),
    )
    plan.check_fits(WORKLOAD, emulated(4))
    with pytest.raises(PlanDriftError) as error:
        plan.check_fits(Workload(tables=changed, batch_per_rank=32), emulated(4))
    message = str(error.value)
    for part in (
        "the plan was made for something else: ",
        "table t0: rows was 1,000, is 1,001",
        "table t0: dim was 16, is 8",
        "table new is not in the plan",
        "table t3 of the plan is not in the model",
        "batch_per_rank: was 64, is 32",
        "python -m recsys_tpu.plan",
    ):
        assert part in message
    with pytest.raises(PlanDriftError, match=r"topology: .* was .*, is "):
        plan.check_fits(WORKLOAD, emulated(2))


def test_a_row_group_must_start_where_groups_do():
    tree = make_plan(WORKLOAD, emulated(4)).to_dict() | {"row_group": 2}
    tree["tables"][0] |= {"sharding_type": "table_row_wise", "column_shards": [[1, 16]]}
    with pytest.raises(PlanInputError, match=r"table t0: places \[1\] do not start row groups of 2"):
        Plan.from_dict(tree)
    tree["tables"][0]["column_shards"] = [[2, 16]]
    assert Plan.from_dict(tree).table("t0").column_shards == ((2, 16),)
    tree["tables"][0]["column_shards"] = [[4, 16]]  # the group would reach over the last rank
    with pytest.raises(PlanInputError, match=r"table t0: places \[4\] are not different ranks"):
        Plan.from_dict(tree)


@pytest.mark.parametrize(
    ("kind", "pieces", "named"),
    [
        (ShardingType.COLUMN_WISE, ((1, 16),), ShardingType.TABLE_WISE),
        (ShardingType.TABLE_WISE, ((1, 8), (0, 8)), ShardingType.COLUMN_WISE),
        (ShardingType.COLUMN_WISE, ((1, 8), (0, 8)), ShardingType.COLUMN_WISE),
        (ShardingType.ROW_WISE, ((0, 16),), ShardingType.ROW_WISE),
    ],
)
def test_a_table_is_named_by_what_it_is(kind, pieces, named):
    made = table_plan(TABLES[0], kind, pieces)
    assert made == TablePlan(name="t0", rows=1000, dim=16, kind=named, column_shards=pieces)
