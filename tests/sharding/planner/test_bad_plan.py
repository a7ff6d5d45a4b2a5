"""Bad plans by name: every case ends in an error that names the place, or in a documented result.

Public bug reports that a case stands for are in its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from recsys_tpu.sharding.planner.errors import PlanError, PlanInputError
from recsys_tpu.sharding.planner.make import make_plan
from recsys_tpu.sharding.planner.plan import Plan
from recsys_tpu.sharding.planner.tables import TableSpec, Workload
from recsys_tpu.sharding.planner.topology import emulated, parse_topology


def _plan() -> dict[str, Any]:
    tables = tuple(
        TableSpec(name=f"t{i}", rows=1000 * (i + 1), dim=16, pooling_factors=(1.0,)) for i in range(4)
    )
    return make_plan(Workload(tables=tables, batch_per_rank=64), emulated(4)).to_dict()


def _table(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda plan: plan["tables"][0].__setitem__(key, value)


BAD_PLANS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other version": (lambda p: p.update(format_version=99), "format_version 99"),
    "no version": (lambda p: p.pop("format_version"), "format_version None"),
    "no tables": (lambda p: p.pop("tables"), "tables"),
    "tables empty": (lambda p: p.update(tables=[]), "the plan has no tables"),
    "no topology": (lambda p: p.pop("topology"), "topology"),
    "topology a list": (lambda p: p.update(topology=[1]), "not a plan"),
    "topology of an unknown chip": (lambda p: p["topology"].update(chip="v99"), "chip"),
    "tables a mapping": (lambda p: p.update(tables={"t0": 1}), "not a plan"),
    "table without name": (lambda p: p["tables"][0].pop("name"), "name"),
    "table name null": (_table("name", None), "table name None is no text"),
    "unknown sharding type": (_table("sharding_type", "diagonal"), "diagonal"),
    "rows a text": (_table("rows", "many"), "not a plan"),
    "rows negative": (_table("rows", -5), "table t0: -5 rows"),
    "dim 0": (_table("dim", 0), "table t0: .*dim 0"),
    "rank that is not there": (_table("column_shards", [[77, 16]]), r"places \[77\]"),
    "rank negative": (_table("column_shards", [[-1, 16]]), r"places \[-1\]"),
    "columns not covered": (_table("column_shards", [[0, 8]]), "cover 8 of 16"),
    "columns covered twice": (_table("column_shards", [[0, 16], [1, 16]]), "cover 32 of 16"),
    "columns negative": (_table("column_shards", [[0, 24], [1, -8]]), "table t0"),
    "no shards": (_table("column_shards", []), "table t0"),
    "table twice": (lambda p: p["tables"].append(p["tables"][0]), "table t0 is there twice"),
    "row group 0": (lambda p: p.update(row_group=0), "row_group"),
    "summary a number": (lambda p: p.update(summary=3), "not a plan"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_bad_plan(tmp_path, case, suffix):
    change, message = BAD_PLANS[case]
    tree = _plan()
    change(tree)
    path = tmp_path / f"plan{suffix}"
    path.write_text(json.dumps(tree) if suffix == ".json" else yaml.safe_dump(tree))
    with pytest.raises(PlanInputError, match=rf"plan\{suffix}: .*(?:{message})"):
        Plan.load(path)


BAD_PLAN_FILES = {
    "empty": b"",
    "cut": b'{"format_version": 1, "tab',
    "a list": b"[1]",
    "binary": bytes(range(256)),
    "python object": b"!!python/object/apply:os.system ['true']",
}


@pytest.mark.parametrize("case", BAD_PLAN_FILES)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_bad_plan_file(tmp_path, case, suffix):
    path = tmp_path / f"plan{suffix}"
    path.write_bytes(BAD_PLAN_FILES[case])
    with pytest.raises(PlanInputError, match=rf"plan\{suffix}"):
        Plan.load(path)


def test_torchrec_3652_a_table_that_the_plan_lacks_is_named():
    plan = Plan.from_dict(_plan())
    tables = tuple(
        TableSpec(name=f"t{i}", rows=1000 * (i + 1), dim=16, pooling_factors=(1.0,)) for i in range(5)
    )
    with pytest.raises(PlanError, match="table t4 is not in the plan"):
        plan.check_fits(Workload(tables=tables, batch_per_rank=64), emulated(4))


@pytest.mark.parametrize(
    "text", ["", "v5p", "v5p:", "v5p:0x1", "v5p:4x", "v5p:3x3x3x3", "v9:2x2", "5*", "../x.yaml"]
)
def test_bad_topology(text):
    with pytest.raises(PlanError):
        parse_topology(text)
