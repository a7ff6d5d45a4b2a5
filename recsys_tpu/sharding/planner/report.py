"""Plans as tables on a terminal: the summary, the difference of two, the reasons for one table."""

from __future__ import annotations

from collections import Counter

import numpy as np
from rich.console import Console
from rich.table import Table

from recsys_tpu.sharding.planner.chips import GIB
from recsys_tpu.sharding.planner.costs import CostModel
from recsys_tpu.sharding.planner.estimate import Estimate, estimate, table_terms, tables_by_rank
from recsys_tpu.sharding.planner.explain import Alternative
from recsys_tpu.sharding.planner.plan import Plan, TablePlan
from recsys_tpu.sharding.planner.tables import ShardingType, Workload

ROOFLINE = "Times are roofline estimates (bytes over peak bandwidth), not measurements."


def print_plan(plan: Plan, workload: Workload, console: Console, *, most_tables: int = 40) -> None:
    """The summary that `python -m recsys_tpu.plan` ends with."""
    numbers = estimate(plan, workload)
    console.print(_tables(plan, workload, most_tables))
    console.print(_slice(plan, numbers))
    console.print(_ranks(plan, numbers))
    assumed = [table.name for table in workload.tables if table.statistics is None]
    if assumed:
        console.print(
            f"Assumed for {len(assumed)} of {len(workload.tables)} tables: all rows equally likely, no skew. "
            "Measure: python -m recsys_tpu.data.stats DIRECTORY --output stats.json, then --stats stats.json"
        )
    console.print(ROOFLINE)


def _tables(plan: Plan, workload: Workload, most: int) -> Table:
    model = CostModel(workload, plan.topology, plan.topology.row_group(plan.row_group))
    specs = {table.name: table for table in workload.tables}
    out = Table(title=f"{len(plan.tables)} tables on {plan.topology} ({plan.topology.ranks} ranks)")
    for column in ("table", "rows", "dim", "ids/sample"):
        out.add_column(column, justify="right" if column != "table" else "left")
    for column in ("sharding", "where", "GiB", "slowest shard us"):
        out.add_column(column, justify="left" if column in ("sharding", "where") else "right")
    shown = sorted(plan.tables, key=lambda table: -specs[table.name].total_bytes)
    for table in shown[:most]:
        terms = table_terms(model, plan, specs[table.name], table)
        seconds = terms["lookup"] + terms["update"] + terms["ring"] + terms["send"]
        out.add_row(
            table.name,
            f"{table.rows:,}",
            str(table.dim),
            f"{specs[table.name].ids_per_sample:g}",
            describe(table),
            where(table, plan),
            f"{specs[table.name].total_bytes / GIB:.3f}",
            f"{seconds.max() * 1e6:.1f}",
        )
    if len(shown) > most:
        out.add_row(f"... and {len(shown) - most} smaller tables", *[""] * 7)
    return out


def _slice(plan: Plan, numbers: Estimate) -> Table:
    s = plan.summary
    out = Table(title="estimate", show_header=False)
    out.add_row("step", f"{numbers.step * 1e3:.3f} ms, waits for {numbers.limit}")
    out.add_row("throughput", f"{numbers.samples_per_s:,.0f} samples/s ({numbers.samples:,} a step)")
    even = s.get("slowest_over_mean_bound", 1.0)
    proven = f"; no plan as fast is below {even:.3f}" if even > 1 else ""
    out.add_row(
        "slowest rank", f"{numbers.time.max() * 1e3:.3f} ms, {s['slowest_over_mean']:.3f} x the mean{proven}"
    )
    out.add_row("proven bound", f"{s['time_bound_s'] * 1e3:.3f} ms; the plan is within {s['gap']:.1%} of it")
    out.add_row(
        "HBM of the fullest rank",
        f"{numbers.memory.max() / GIB:.2f} of {numbers.hbm_bytes / GIB:.2f} GiB, "
        f"{s['hbm_max_over_mean']:.3f} x the mean; bound {s['hbm_bound_bytes'] / GIB:.2f} GiB",
    )
    fixed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in numbers.fixed_memory.items())
    out.add_row("of which on every rank", f"{fixed} GiB")
    out.add_row(
        "beside it",
        f"host {numbers.host * 1e3:.3f} ms (overlapped), dense towers {numbers.dense * 1e3:.3f} ms, "
        f"dense all-reduce {numbers.all_reduce * 1e3:.3f} ms",
    )
    counts = Counter(table.kind.value for table in plan.tables)
    out.add_row("tables by type", ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    if any(t.kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD) for t in plan.tables):
        box = "x".join(map(str, plan.topology.row_group(plan.row_group).box))
        out.add_row(
            "row group", f"{plan.row_group} ranks ({box} chips): run with LOCAL_WORLD_SIZE={plan.row_group}"
        )
    return out


def _ranks(plan: Plan, numbers: Estimate, most: int = 5) -> Table:
    out = Table(title="slowest ranks")
    for column in ("rank", "chip", "us", "lookup", "update", "ring", "exchange", "GiB", "tables"):
        out.add_column(column, justify="left" if column in ("chip", "tables") else "right")
    held = tables_by_rank(plan)
    for rank in np.argsort(-numbers.time, kind="stable")[:most].tolist():
        names = held.get(rank, [])
        slice_index, position, _ = plan.topology.coordinates(rank)
        parts = [numbers.terms[name][rank] for name in ("lookup", "update", "ring")]
        out.add_row(
            str(rank),
            (f"{slice_index}: " if plan.topology.slices > 1 else "") + ",".join(map(str, position)),
            *[f"{value * 1e6:.1f}" for value in (numbers.time[rank], *parts, numbers.exchange[rank])],
            f"{numbers.memory[rank] / GIB:.2f}",
            ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        )
    return out


def describe(table: TablePlan) -> str:
    """Sharding type and column widths in a few characters."""
    widths = sorted({columns for _, columns in table.column_shards}, reverse=True)
    if len(table.column_shards) == 1:
        return table.kind.value
    return f"{table.kind.value} {len(table.column_shards)} x {'/'.join(map(str, widths))}"


def where(table: TablePlan, plan: Plan, most: int = 4) -> str:
    """Its ranks in a few characters."""
    if table.kind in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL):
        return "all ranks"
    places = [place for place, _ in table.column_shards]
    if table.kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        names = [f"{place}-{place + plan.row_group - 1}" for place in places]
    else:
        names = [str(place) for place in places]
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")


def print_diff(old: Plan, new: Plan, console: Console) -> None:
    """What changed between two plans."""
    if old.topology != new.topology:
        console.print(f"topology: {old.topology} -> {new.topology}")
    if old.row_group != new.row_group:
        console.print(f"row group: {old.row_group} -> {new.row_group} ranks")
    summary = Table(title="summary")
    for column in ("", "old", "new", "change"):
        summary.add_column(column, justify="left" if not column else "right")
    for key in old.summary.keys() & new.summary.keys():
        a, b = old.summary[key], new.summary[key]
        summary.add_row(key, f"{a:.6g}", f"{b:.6g}", f"{(b / a - 1):+.1%}" if a else "")
    mine, theirs = ({table.name: table for table in plan.tables} for plan in (old, new))
    tables = Table(title="tables")
    for column in ("table", "old", "new"):
        tables.add_column(column)
    same = 0
    for name in sorted(mine.keys() | theirs.keys()):
        a_table, b_table = mine.get(name), theirs.get(name)
        if a_table == b_table:
            same += 1
            continue
        texts = [
            f"{describe(table)} on {where(table, plan)}" if table else "(absent)"
            for table, plan in ((a_table, old), (b_table, new))
        ]
        if a_table and b_table and (a_table.rows, a_table.dim) != (b_table.rows, b_table.dim):
            texts = [
                f"{t.rows:,} x {t.dim}: {text}" for t, text in zip((a_table, b_table), texts, strict=True)
            ]
        tables.add_row(name, *texts)
    if old.summary and new.summary:
        console.print(summary)
    if tables.row_count:
        console.print(tables)
    console.print(f"{same} tables unchanged, {tables.row_count} changed")


def print_explanation(plan: Plan, name: str, alternatives: list[Alternative], console: Console) -> None:
    """Why a table is sharded as it is."""
    table = plan.table(name)
    console.print(f"{name}: {table.rows:,} x {table.dim}, {describe(table)} on {where(table, plan)}")
    out = Table(title="the whole plan, if this table were sharded otherwise")
    for column in ("sharding type", "slowest rank us", "against the plan", "fullest rank GiB", "why (not)"):
        out.add_column(column, justify="left" if column in ("sharding type", "why (not)") else "right")
    for one in alternatives:
        time = "" if one.time is None else f"{one.time * 1e6:.1f}"
        ratio = "" if one.time is None else f"{one.time / plan.summary['slowest_rank_s'] - 1:+.1%}"
        memory = "" if one.memory is None else f"{one.memory / GIB:.2f}"
        out.add_row(one.kind.value, time, ratio, memory, one.reason)
    console.print(out)
    console.print(ROOFLINE)
