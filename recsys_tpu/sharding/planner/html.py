"""One self-contained page that draws a plan on its slice."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from recsys_tpu.sharding.planner.estimate import Estimate, estimate, tables_by_rank
from recsys_tpu.sharding.planner.plan import Plan
from recsys_tpu.sharding.planner.report import describe, where
from recsys_tpu.sharding.planner.scale import Point, scale, sizes
from recsys_tpu.sharding.planner.tables import Workload

_MOST_NAMES = 12


def write_page(
    path: Path, plan: Plan, workload: Workload, workload_at: Callable[[int], Workload] | None = None
) -> None:
    """Write the page: HBM and time of each chip, tables on hover, slowest ranks, what-if for other sizes.

    Args:
        workload_at: the workload on another number of ranks; None leaves the what-if out.
    """
    numbers = estimate(plan, workload)
    points = what_if(plan, workload_at) if workload_at is not None else []
    data = page_data(plan, workload, numbers, points)
    template = files("recsys_tpu.sharding.planner").joinpath("page.html").read_text(encoding="utf-8")
    # "</" would end the script element early.
    text = json.dumps(data, allow_nan=False).replace("</", "<\\/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        template.replace("__TITLE__", html.escape(f"Plan for {plan.topology}")).replace("__DATA__", text),
        encoding="utf-8",
    )


def what_if(plan: Plan, workload_at: Callable[[int], Workload]) -> list[Point]:
    """The same model on a quarter to four times the chips."""
    chip, chips = plan.topology.chip.name, plan.topology.chips
    try:
        around = sizes(
            chip, [count for count in (chips // 4, chips // 2, chips, 2 * chips, 4 * chips) if count]
        )
    except ValueError:  # a chip of the user's own has no catalogue of slices
        return []
    return scale(workload_at, around)


def page_data(plan: Plan, workload: Workload, numbers: Estimate, points: list[Point]) -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    topology = plan.topology
    held = tables_by_rank(plan)
    ranks = []
    for rank in range(topology.ranks):
        slice_index, position, device = topology.coordinates(rank)
        names = held.get(rank, [])
        ranks.append(
            {
                "at": [slice_index, *position, *[0] * (3 - len(position))],
                "device": device,
                "us": round(float(numbers.time[rank]) * 1e6, 2),
                "gib": round(float(numbers.memory[rank]) / 2**30, 3),
                "tables": names[:_MOST_NAMES],
                "more": max(len(names) - _MOST_NAMES, 0),
            }
        )
    shape = [*topology.shape, *[1] * (3 - len(topology.shape))]
    return {
        "topology": str(topology),
        "shape": shape,
        "slices": topology.slices,
        "devices": topology.chip.devices,
        "hbmGib": topology.hbm_bytes / 2**30,
        "rowGroup": plan.row_group,
        "ranks": ranks,
        "parts": [
            {
                "rank": rank,
                **{
                    name: round(float(numbers.terms[name][rank]) * 1e6, 2)
                    for name in ("lookup", "update", "ring")
                },
                "exchange": round(float(numbers.exchange[rank]) * 1e6, 2),
            }
            for rank in np.argsort(-numbers.time, kind="stable")[:10].tolist()
        ],
        "tables": [
            {
                "name": table.name,
                "rows": table.rows,
                "dim": table.dim,
                "sharding": describe(table),
                "where": where(table, plan),
            }
            for table in plan.tables
        ],
        "summary": {
            "step_ms": numbers.step * 1e3,
            "samples_per_s": numbers.samples_per_s,
            "limit": numbers.limit,
            "slowest_over_mean": plan.summary["slowest_over_mean"],
            "gap": plan.summary["gap"],
            "bound_us": plan.summary["time_bound_s"] * 1e6,
            "hbm_max_over_mean": plan.summary["hbm_max_over_mean"],
            "all_ranks": sum(1 for table in plan.tables if table.kind.value in ("data_parallel", "row_wise")),
        },
        "whatIf": [
            {
                "slice": str(point.topology),
                "chips": point.topology.chips,
                "step_ms": None if point.step is None else point.step * 1e3,
                "samples_per_s": point.samples_per_s,
                "gib": None if point.hbm is None else point.hbm / 2**30,
                "limit": point.limit,
            }
            for point in points
        ],
    }
