"""Price a plan shard by shard: seconds and bytes of every rank, term by term.

Estimates from a roofline, never measurements.  A step is

    max(host preparation, slowest rank's embeddings + dense towers + dense all-reduce)

as the pipeline prepares the next batch while the chips work on this one, and the exchange waits for the
slowest rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from recsys_tpu.sharding.planner.costs import CostModel
from recsys_tpu.sharding.planner.plan import Plan, TablePlan
from recsys_tpu.sharding.planner.problem import FloatArray, IntArray
from recsys_tpu.sharding.planner.tables import ShardingType, TableSpec, Workload

TIME_TERMS = ("lookup", "update", "ring", "send")
MEMORY_TERMS = ("weights", "state", "buffers")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Arrays over ranks, seconds and bytes.

    Attributes:
        terms: lookup, update, ring (seconds); send (link seconds); weights, state, buffers (bytes).
        receive, bisection: link seconds of every rank.
        fixed_memory: bytes of every rank by term.
        host, dense, all_reduce: seconds.
        tables: tables on each rank.
    """

    terms: dict[str, FloatArray]
    receive: float
    bisection: float
    fixed_memory: dict[str, float]
    host: float
    dense: float
    all_reduce: float
    samples: int
    hbm_bytes: int

    @property
    def exchange(self) -> FloatArray:
        """Link seconds of each rank."""
        return np.maximum(self.terms["send"], max(self.receive, self.bisection))

    @property
    def time(self) -> FloatArray:
        """Seconds of embeddings of each rank."""
        return self.terms["lookup"] + self.terms["update"] + self.terms["ring"] + self.exchange

    @property
    def table_memory(self) -> FloatArray:
        """Bytes that tables take on each rank."""
        return self.terms["weights"] + self.terms["state"] + self.terms["buffers"]

    @property
    def memory(self) -> FloatArray:
        """All bytes of each rank."""
        return self.table_memory + sum(self.fixed_memory.values())

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return max(self.host, float(self.time.max()) + self.dense + self.all_reduce)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step

    @property
    def limit(self) -> str:
        """What the step waits for."""
        if self.host >= float(self.time.max()) + self.dense + self.all_reduce:
            return "host preparation"
        worst = int(np.argmax(self.time))
        parts = {name: float(self.terms[name][worst]) for name in ("lookup", "update", "ring")}
        parts |= {"exchange": float(self.exchange[worst]), "dense": self.dense, "all-reduce": self.all_reduce}
        return max(parts, key=lambda name: parts[name])


def estimate(plan: Plan, workload: Workload) -> Estimate:
    """Price every shard of a plan.

    Raises:
        PlanDriftError: the plan is of other tables.
    """
    topology = plan.topology
    plan.check_fits(workload, topology)
    model = CostModel(workload, topology, topology.row_group(plan.row_group))
    terms = {name: np.zeros(topology.ranks) for name in (*TIME_TERMS, *MEMORY_TERMS)}
    receive = bisection = 0.0
    specs = {table.name: table for table in workload.tables}
    for table in plan.tables:
        for name, values in table_terms(model, plan, specs[table.name], table).items():
            terms[name] += values
        shared = model.shared(specs[table.name], table.kind, float(len(table.column_shards)))
        receive += shared.receive
        bisection += shared.bisection
    return Estimate(
        terms=terms,
        receive=receive,
        bisection=bisection,
        fixed_memory=model.fixed_memory(),
        host=model.host_seconds(),
        dense=model.dense_seconds(),
        all_reduce=model.all_reduce_seconds(),
        samples=model.samples,
        hbm_bytes=topology.hbm_bytes,
    )


def table_terms(model: CostModel, plan: Plan, spec: TableSpec, table: TablePlan) -> dict[str, FloatArray]:
    """Every cost term of one table on every rank."""
    ranks = plan.topology.ranks
    at: IntArray = np.arange(ranks, dtype=np.int64)
    first, rows, columns = (np.array([number], dtype=np.int64) for number in (0, table.rows, table.dim))
    if table.kind is not ShardingType.DATA_PARALLEL:
        at, first, rows, columns = table.shard_arrays(ranks, plan.row_group)
    cost = model.shard(
        spec,
        table.kind,
        first_row=first.astype(np.float64),
        rows=rows.astype(np.float64),
        width=columns.astype(np.float64),
    )
    return {
        name: np.bincount(at, np.broadcast_to(getattr(cost, name), at.shape), ranks).astype(np.float64)
        for name in (*TIME_TERMS, *MEMORY_TERMS)
    }


def tables_by_rank(plan: Plan) -> dict[int, list[str]]:
    """Names of the tables of which a rank holds rows, largest shard first; data-parallel ones left out."""
    held: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for table, shard in plan.shards():
        if table.kind is not ShardingType.DATA_PARALLEL and shard.rows:
            held[shard.rank].append((-shard.rows * shard.columns, table.name))
    return {rank: [name for _, name in sorted(names)] for rank, names in held.items()}
