"""Predicted throughput against slice size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recsys_tpu.sharding.planner.chips import CHIPS
from recsys_tpu.sharding.planner.errors import InfeasibleError, PlanInputError
from recsys_tpu.sharding.planner.estimate import estimate
from recsys_tpu.sharding.planner.make import make_plan
from recsys_tpu.sharding.planner.search import Effort
from recsys_tpu.sharding.planner.tables import Workload
from recsys_tpu.sharding.planner.topology import Topology, compact_shape, slice_topology

QUICK = Effort(starts=1, steps=40)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One slice size; without numbers where nothing fits.

    Attributes:
        efficiency: samples/s per chip against the smallest slice that fits.
    """

    topology: Topology
    step: float | None = None
    samples_per_s: float | None = None
    efficiency: float | None = None
    limit: str = ""
    hbm: float | None = None


def parse_chips(text: str) -> list[int]:
    """`8..8192` (doubling) or `8,64,256`.

    Raises:
        PlanInputError: neither form.
    """
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split(".."))
            if not 1 <= low <= high:
                raise ValueError
            return [low * 2**i for i in range(int(math.log2(high / low)) + 1)]
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanInputError(
            f"chips {text!r}: give FROM..TO, such as 8..8192, or a list, such as 8,64"
        ) from None


def sizes(chip: str, chips: Sequence[int]) -> list[Topology]:
    """A compact slice for each number of chips; beyond one slice, several over DCN.

    Raises:
        PlanInputError: unknown chip.
    """
    if chip not in CHIPS:
        raise PlanInputError(f"unknown chip {chip!r}; known: {', '.join(CHIPS)}")
    found = []
    for count in chips:
        for slices in (1, 2, 4, 8, 16, 32):
            shape = compact_shape(CHIPS[chip], count // slices) if count % slices == 0 else None
            if shape is not None:
                found.append(slice_topology(chip, shape, slices=slices))
                break
    return found


def scale(workload_at: Callable[[int], Workload], topologies: Sequence[Topology]) -> list[Point]:
    """Plan each size; `workload_at` gives the workload on a number of ranks."""
    points: list[Point] = []
    base: float | None = None
    for topology in topologies:
        workload = workload_at(topology.ranks)
        try:
            plan = make_plan(workload, topology, effort=QUICK)
        except InfeasibleError as error:
            points.append(Point(topology=topology, limit=str(error).split(": ", 1)[1].split(";")[0]))
            continue
        numbers = estimate(plan, workload)
        per_chip = numbers.samples_per_s / topology.chips
        base = base or per_chip
        points.append(
            Point(
                topology=topology,
                step=numbers.step,
                samples_per_s=numbers.samples_per_s,
                efficiency=per_chip / base,
                limit=numbers.limit,
                hbm=float(numbers.memory.max()),
            )
        )
    return points
