"""Why not otherwise: plan again with one table forced to each other sharding type."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recsys_tpu.sharding.planner.costs import CostModel
from recsys_tpu.sharding.planner.errors import InfeasibleError, PlanInputError
from recsys_tpu.sharding.planner.estimate import estimate, table_terms
from recsys_tpu.sharding.planner.make import make_plan
from recsys_tpu.sharding.planner.plan import Plan
from recsys_tpu.sharding.planner.search import Effort
from recsys_tpu.sharding.planner.tables import ShardingType, Workload


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The plan with one table forced to one type.

    Attributes:
        time, memory: slowest rank's seconds and fullest rank's bytes; None where no such plan exists.
    """

    kind: ShardingType
    time: float | None
    memory: float | None
    reason: str


def alternatives(
    plan: Plan, workload: Workload, name: str, *, effort: Effort | None = None
) -> list[Alternative]:
    """Every sharding type for table `name`, the plan's own first, the others fastest first.

    Raises:
        PlanInputError: the plan has no such table.
    """
    own = plan.table(name)
    mine = estimate(plan, workload)
    found = [
        Alternative(
            kind=own.kind,
            time=float(mine.time.max()),
            memory=float(mine.memory.max()),
            reason=f"the plan's choice; its largest term: {_largest_term(plan, workload, name)}",
        )
    ]
    others = [_forced(plan, workload, name, kind, effort) for kind in ShardingType if kind is not own.kind]
    return found + sorted(others, key=lambda one: (one.time is None, one.time or 0.0, one.kind.value))


def _forced(
    plan: Plan, workload: Workload, name: str, kind: ShardingType, effort: Effort | None
) -> Alternative:
    user = workload.constraint(name)
    if user.types and kind not in user.types:
        return Alternative(kind=kind, time=None, memory=None, reason="not allowed by the table's constraint")
    constraints = {**workload.constraints, name: replace(user, types=(kind,))}
    forced = replace(workload, constraints=constraints)
    try:
        other = make_plan(
            forced, plan.topology, row_group=plan.row_group, effort=effort or Effort(starts=1, steps=60)
        )
    except PlanInputError:
        return Alternative(kind=kind, time=None, memory=None, reason=_impossible(plan, workload, name, kind))
    except InfeasibleError as error:
        return Alternative(kind=kind, time=None, memory=None, reason=str(error).split(". ")[0])
    numbers = estimate(other, workload)
    slower = float(numbers.time.max()) / plan.summary["slowest_rank_s"] - 1
    term = _largest_term(other, workload, name)
    reason = f"slower; its largest term: {term}" if slower > 1e-3 else f"as fast; its largest term: {term}"
    return Alternative(
        kind=kind, time=float(numbers.time.max()), memory=float(numbers.memory.max()), reason=reason
    )


def _impossible(plan: Plan, workload: Workload, name: str, kind: ShardingType) -> str:
    table = next(one for one in workload.tables if one.name == name)
    lanes = workload.constraint(name).min_width or plan.topology.chip.lanes
    if kind in (ShardingType.COLUMN_WISE, ShardingType.GRID_SHARD, ShardingType.TABLE_COLUMN_WISE):
        return f"{table.dim} columns do not split into enough shards of {lanes} (a vector register)"
    return f"{table.rows:,} rows or {plan.topology.ranks} ranks leave no such layout"


def _largest_term(plan: Plan, workload: Workload, name: str) -> str:
    """Where the table's slowest shard spends its time."""
    spec = next(one for one in workload.tables if one.name == name)
    model = CostModel(workload, plan.topology, plan.topology.row_group(plan.row_group))
    terms = table_terms(model, plan, spec, plan.table(name))
    seconds = {key: terms[key] for key in ("lookup", "update", "ring", "send")}
    worst = int(np.argmax(sum(seconds.values())))
    key = max(seconds, key=lambda term: seconds[term][worst])
    label = {"ring": "reduce-scatter or all-reduce", "send": "exchange"}.get(key, f"{key} in HBM")
    return f"{label}, {seconds[key][worst] * 1e6:.1f} us"
