"""Why nothing fits: the memory term that is too large, and the smallest slice that has room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recsys_tpu.sharding.planner.chips import CHIPS, GIB
from recsys_tpu.sharding.planner.costs import CostModel
from recsys_tpu.sharding.planner.errors import PlanInputError
from recsys_tpu.sharding.planner.options import Candidates, enumerate_options
from recsys_tpu.sharding.planner.search import Effort
from recsys_tpu.sharding.planner.solver import solve
from recsys_tpu.sharding.planner.tables import Workload
from recsys_tpu.sharding.planner.topology import Topology, compact_shape, slice_shapes, slice_topology


def why_infeasible(workload: Workload, topology: Topology, candidates: Sequence[Candidates]) -> str:
    """One message: what is too large, and what would help."""
    fixed = candidates[0].fixed_memory
    hbm = topology.hbm_bytes
    problem = candidates[0].problem
    spent = ", ".join(f"{term} {size / GIB:.2f} GiB" for term, size in fixed.items())
    if sum(fixed.values()) >= hbm:
        term = max(fixed, key=lambda name: fixed[name])
        reason = (
            f"{term} alone take {fixed[term] / GIB:.2f} of {hbm / GIB:.2f} GiB on every rank ({spent}); "
            f"lower the batch per rank (now {workload.batch_per_rank:,}) or the dense part"
        )
    else:
        limit = problem.memory_limit
        smallest = np.minimum.reduceat(problem.options.memory, problem.first[:-1])
        worst = int(np.argmax(smallest))
        table = candidates[0].model.workload.tables[worst]
        total = sum(one.total_bytes for one in workload.tables)
        if smallest[worst] > limit:
            reason = (
                f"table {table.name} ({table.rows:,} x {table.dim}, {table.total_bytes / GIB:.2f} GiB with "
                f"optimizer state): its smallest possible shard needs {smallest[worst] / GIB:.2f} GiB with "
                f"buffers, a rank has {limit / GIB:.2f} GiB for tables ({spent}); allow more sharding types "
                "or split it finer"
            )
        else:
            reason = (
                f"weights and optimizer state take {total / GIB:.2f} GiB over {topology.ranks} ranks "
                f"({total / topology.ranks / GIB:.2f} GiB each) plus capacity buffers; a rank has "
                f"{limit / GIB:.2f} of {hbm / GIB:.2f} GiB for tables ({spent})"
            )
    return f"no plan fits {topology}: {reason}. {_smallest_that_fits(workload, topology)}"


def _smallest_that_fits(workload: Workload, topology: Topology) -> str:
    """The smallest slice of the same chip for which a quick search finds a plan."""
    if topology.chip.name not in CHIPS:
        return "Give it more ranks or more HBM a rank."
    sizes = sorted({int(np.prod(shape)) for shape in slice_shapes(topology.chip)})
    for chips in sizes:
        shape = compact_shape(topology.chip, chips)
        if shape is None or chips <= topology.chips:
            continue
        larger = slice_topology(topology.chip.name, shape)
        try:
            problem = enumerate_options(CostModel(workload, larger, larger.row_groups[0])).problem
        except PlanInputError:
            continue
        if solve([problem], Effort(starts=0, steps=10)) is not None:
            return f"The smallest {topology.chip.name} slice with room at this batch per rank is {larger}."
    return (
        f"No single slice of {topology.chip.name} has room: use more HBM a chip or a smaller batch per rank."
    )
