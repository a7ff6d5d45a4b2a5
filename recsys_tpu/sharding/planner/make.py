"""From a workload and a topology to a plan."""

from __future__ import annotations

from dataclasses import replace

from recsys_tpu.sharding.planner.costs import CostModel
from recsys_tpu.sharding.planner.errors import InfeasibleError
from recsys_tpu.sharding.planner.estimate import estimate
from recsys_tpu.sharding.planner.infeasible import why_infeasible
from recsys_tpu.sharding.planner.options import Candidates, Known, enumerate_options
from recsys_tpu.sharding.planner.plan import Plan, TablePlan, made_for, table_plan
from recsys_tpu.sharding.planner.problem import GROUP, STRIPS, Placement
from recsys_tpu.sharding.planner.search import Effort
from recsys_tpu.sharding.planner.solver import Solution, solve
from recsys_tpu.sharding.planner.tables import ShardingType, TableSpec, Workload
from recsys_tpu.sharding.planner.topology import Topology


def make_plan(
    workload: Workload, topology: Topology, *, row_group: int | None = None, effort: Effort | None = None
) -> Plan:
    """The fastest plan found within HBM; the same one for the same input.

    Args:
        row_group: ranks that share rows of table-row-wise and grid shards; None: the best of those likely.

    Raises:
        InfeasibleError: nothing fits; the message says which memory term is too large, and what would fit.
        PlanInputError: a constraint cannot be met, or no such row group exists.
    """
    ordered = replace(workload, tables=tuple(sorted(workload.tables, key=_canonical)))
    groups = topology.likely_row_groups if row_group is None else (topology.row_group(row_group),)
    known: Known = {}
    candidates = [enumerate_options(CostModel(ordered, topology, group), known) for group in groups]
    solution = solve([candidate.problem for candidate in candidates], effort)
    if solution is None:
        raise InfeasibleError(why_infeasible(workload, topology, candidates))
    plan = _to_plan(candidates[solution.problem], solution)
    by_name = {table.name: table for table in plan.tables}
    plan = replace(
        plan, tables=tuple(by_name[table.name] for table in workload.tables), made_for=made_for(workload)
    )
    plan.check_complete()
    return replace(plan, summary=_summary(plan, workload, solution))


def _canonical(table: TableSpec) -> tuple[object, ...]:
    """Order that depends on names only between equal tables: a plan does not depend on the tables' order."""
    return (
        -table.total_bytes,
        -table.dim,
        tuple(-factor for factor in table.pooling_factors),
        table.weight_bytes,
        table.optimizer,
        table.pooled,
        () if table.statistics is None else table.statistics.block_shares,
        table.name,
    )


def _to_plan(candidates: Candidates, solution: Solution) -> Plan:
    model = candidates.model
    tables: list[TablePlan] = []
    assignment = solution.assignment
    for index, table in enumerate(model.workload.tables):
        option = int(assignment.choice[index])
        layout = candidates.layouts[option]
        shards = _column_shards(
            candidates, option, assignment.placements[index], candidates.unit_columns[index], table.dim
        )
        tables.append(table_plan(table, layout.kind, shards))
    return Plan(topology=model.topology, row_group=model.row_group.ranks, tables=tuple(tables))


def _column_shards(
    candidates: Candidates, option: int, placement: Placement, unit: int, dim: int
) -> tuple[tuple[int, int], ...]:
    problem, layout = candidates.problem, candidates.layouts[option]
    kind = problem.options.kind[option]
    if kind == STRIPS:
        return tuple(
            (int(rank), int(units) * unit)
            for rank, units in zip(placement.places, placement.units, strict=True)
        )
    if kind == GROUP:
        first = [int(place) * problem.group for place in placement.places]
        if layout.kind is ShardingType.TABLE_COLUMN_WISE:
            return tuple((first[0] + column, layout.width) for column in range(layout.shards))
        return tuple((rank, layout.width) for rank in first)
    return ((0, dim),)


def _summary(plan: Plan, workload: Workload, solution: Solution) -> dict[str, float]:
    numbers = estimate(plan, workload)
    time, memory, tables = numbers.time, numbers.memory, numbers.table_memory
    slowest = float(time.max())
    return {
        "slowest_rank_s": slowest,
        "slowest_over_mean": slowest / float(time.mean()) if slowest else 1.0,
        "slowest_over_mean_bound": solution.even_bound,
        "time_bound_s": solution.time_bound,
        "gap": solution.time / solution.time_bound - 1 if solution.time_bound else 0.0,
        "hbm_max_bytes": float(memory.max()),
        "hbm_max_over_mean": float(memory.max() / memory.mean()),
        "hbm_bound_bytes": min(
            solution.memory_bound + sum(numbers.fixed_memory.values()), float(memory.max())
        ),
        "table_hbm_max_over_mean": float(tables.max() / tables.mean()) if tables.mean() else 1.0,
        "step_s": numbers.step,
        "samples_per_s": numbers.samples_per_s,
    }
