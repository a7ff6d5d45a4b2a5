"""Hypothesis strategies and small helpers shared by the planner's tests."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from recsys_tpu.sharding.planner import (
    DensePart,
    Plan,
    ShardingType,
    TablePlan,
    TableSpec,
    Topology,
    Workload,
)
from recsys_tpu.sharding.planner.chips import CHIPS
from tests.sharding.training import Case


def small_topology(ranks: int, *, hosts: int = 1, hbm_bytes: int | None = None) -> Topology:
    """A line of `ranks` v6e chips in `hosts` hosts, with as much HBM as wanted."""
    chip = dataclasses.replace(CHIPS["v6e"], name="line", mesh_axes=1)
    if hbm_bytes is not None:
        chip = dataclasses.replace(chip, hbm_bytes=hbm_bytes)
    return Topology(chip=chip, shape=(ranks,), wrap=(False,), slices=1, host_shape=(ranks // hosts,))


def tables(*, most: int, dims: tuple[int, ...] = (8, 16, 32)) -> st.SearchStrategy[tuple[TableSpec, ...]]:
    """Up to `most` tables of very different sizes and pooling factors."""
    one = st.tuples(
        st.integers(1, 2_000_000),
        st.sampled_from(dims),
        st.lists(st.sampled_from((0.5, 1.0, 3.0, 20.0)), min_size=1, max_size=2),
        st.sampled_from(("sgd", "rowwise_adagrad", "adagrad", "adam")),
    )
    return st.lists(one, min_size=1, max_size=most).map(
        lambda drawn: tuple(
            TableSpec(name=f"t{i}", rows=rows, dim=dim, pooling_factors=tuple(factors), optimizer=optimizer)
            for i, (rows, dim, factors, optimizer) in enumerate(drawn)
        )
    )


def workload(specs: tuple[TableSpec, ...], *, batch_per_rank: int = 256) -> Workload:
    """A workload without a dense part, so that HBM holds tables and buffers only."""
    return Workload(tables=specs, batch_per_rank=batch_per_rank, dense=DensePart())


def plan_of_type(case: Case, ranks: int, hosts: int, kind: ShardingType) -> Plan:
    """All tables of a training case under one sharding type, column shards as uneven as the type allows."""
    topology = small_topology(ranks, hosts=hosts)
    group = topology.host_ranks
    planned = []
    for index, table in enumerate(case.tables):
        owner = index % ranks
        match kind:
            case ShardingType.COLUMN_WISE if table.dim % 16 == 0:
                shards = ((owner, table.dim // 4), ((owner + 1) % ranks, table.dim - table.dim // 4))
            case ShardingType.TABLE_COLUMN_WISE:
                first = (index % hosts) * group
                shards = tuple((first + column, table.dim // group) for column in range(group))
            case ShardingType.GRID_SHARD if hosts > 1:
                shards = tuple((host * group, table.dim // hosts) for host in reversed(range(hosts)))
            case ShardingType.TABLE_ROW_WISE | ShardingType.GRID_SHARD:
                shards = (((index % hosts) * group, table.dim),)
            case ShardingType.DATA_PARALLEL | ShardingType.ROW_WISE:
                shards = ((0, table.dim),)
            case _:
                shards = ((owner, table.dim),)
        planned.append(
            TablePlan(name=f"t{index}", rows=table.rows, dim=table.dim, kind=kind, column_shards=shards)
        )
    plan = Plan(topology=topology, row_group=group, tables=tuple(planned))
    plan.check_complete()
    return plan
