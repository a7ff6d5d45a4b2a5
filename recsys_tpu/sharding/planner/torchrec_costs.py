"""The solver under TorchRec's own cost model: `EmbeddingShardingPlanner` with another search.

TorchRec enumerates and prices its sharding options; only its proposers and partitioner are replaced.  Its
objective is kept: the largest sum of `Perf.total` over the ranks, within each rank's HBM.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner, to_sharding_plan
from torchrec.distributed.planner.types import Perf, ShardingOption, Storage
from torchrec.distributed.planner.types import Topology as TorchRecTopology
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

from recsys_tpu.sharding.planner.errors import InfeasibleError
from recsys_tpu.sharding.planner.problem import EVERY, GROUP, STRIPS, Options, Problem, Strips, item_ranks
from recsys_tpu.sharding.planner.search import Effort
from recsys_tpu.sharding.planner.solver import solve
from recsys_tpu.sharding.planner.topology import Topology

_KINDS = {
    ShardingType.DATA_PARALLEL.value: EVERY,
    ShardingType.ROW_WISE.value: EVERY,
    ShardingType.TABLE_ROW_WISE.value: GROUP,
    ShardingType.GRID_SHARD.value: GROUP,
    ShardingType.TABLE_WISE.value: STRIPS,
    ShardingType.COLUMN_WISE.value: STRIPS,
}


def torchrec_topology(topology: Topology) -> TorchRecTopology:
    """A slice as TorchRec's planner can see it: ranks, hosts, HBM and two levels of links.

    What has no place there is lost: the torus (each rank sends at the speed of all its links), its bisection,
    row groups other than a host.  TorchRec counts HBM for "cuda" and "mtia" only (for "tpu" as 0), so the
    device is called "cuda"; its plans then name that device too.
    """
    host = topology.row_group(topology.host_ranks)
    between = topology.dcn_bytes_per_s if topology.slices > 1 else topology.injection_bytes_per_s
    per_ms = 1e-3
    return TorchRecTopology(
        world_size=topology.ranks,
        compute_device="cuda",
        hbm_cap=topology.hbm_bytes,
        local_world_size=topology.host_ranks,
        hbm_mem_bw=topology.hbm_bytes_per_s * per_ms,
        intra_host_bw=host.ring_bytes_per_s * per_ms,
        inter_host_bw=between * per_ms,
    )


class TorchRecCostPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner with this package's solver; same arguments, same options, same prices."""

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan.

        Raises:
            InfeasibleError: no option of some table, or no combination, fits HBM.
        """
        constrained = self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )
        options = self._enumerator.enumerate(module=module, sharders=sharders)
        chosen = choose_options(options, constrained)
        return to_sharding_plan(chosen, self._topology)


def choose_options(
    options: list[ShardingOption], topology: TorchRecTopology, effort: Effort | None = None
) -> list[ShardingOption]:
    """One option per table, with the ranks of its shards set.

    Options that use host memory are left out, and so is table-column-wise, whose placements
    column-wise includes.

    Raises:
        InfeasibleError: a table has no option in HBM, or nothing fits.
    """
    usable = [
        option for option in options if option.sharding_type in _KINDS and not _storage(option)[1].any()
    ]
    names = list(dict.fromkeys(option.fqn for option in options))
    by_table = [
        sorted((option for option in usable if option.fqn == name), key=lambda o: _KINDS[o.sharding_type])
        for name in names
    ]
    empty = [name for name, mine in zip(names, by_table, strict=True) if not mine]
    if empty:
        raise InfeasibleError(f"tables without an option in HBM: {', '.join(empty)}")
    problem = _problem(by_table, topology)
    solution = solve([problem], effort or Effort(time_slack=0.0))
    if solution is None:
        raise InfeasibleError(f"no plan fits {problem.memory_limit / 2**30:.2f} GiB of HBM a rank")
    flat = [option for mine in by_table for option in mine]
    chosen = []
    for index, placement in zip(solution.assignment.choice, solution.assignment.placements, strict=True):
        option = _of_pieces(flat, problem, int(index), len(placement.places))
        ranks = item_ranks(problem, int(index), placement).tolist()
        for shard, rank in zip(option.shards, ranks, strict=True):
            shard.rank = rank
        chosen.append(option)
    return chosen


def _of_pieces(flat: list[ShardingOption], problem: Problem, index: int, pieces: int) -> ShardingOption:
    """The option behind a choice; balancing may have merged column shards into a whole table or split one."""
    if problem.options.kind[index] != STRIPS:
        return flat[index]
    mine = problem.of_table(int(problem.options.table[index]))
    return next(
        option
        for option in flat[mine]
        if _KINDS[option.sharding_type] == STRIPS and option.num_shards == pieces
    )


def _problem(by_table: list[list[ShardingOption]], topology: TorchRecTopology) -> Problem:
    flat = [(table, option) for table, mine in enumerate(by_table) for option in mine]
    group = topology.intra_group_size
    work = np.array([_perf(option).max() for _, option in flat])
    memory = np.array([_storage(option)[0].max() for _, option in flat])
    kinds = np.array([_KINDS[option.sharding_type] for _, option in flat])
    shards = np.array([option.num_shards for _, option in flat])
    units = np.ones(len(by_table), dtype=np.int64)
    for table, option in flat:
        if option.sharding_type == ShardingType.COLUMN_WISE.value:
            units[table] = option.num_shards
    table_of = np.array([table for table, _ in flat])
    strip = kinds == STRIPS
    width = np.where(strip, units[table_of] // np.maximum(shards, 1), 0)
    zeros = np.zeros(len(flat))
    return Problem(
        options=Options(
            table=table_of,
            kind=kinds,
            units=width,
            count=np.where(kinds == EVERY, 1.0, np.where(kinds == GROUP, shards / group, shards)),
            work=work,
            send=zeros,
            memory=memory,
            receive=zeros,
            bisection=zeros,
        ),
        strips=_strips(units, table_of, strip, width, work, memory),
        tables=len(by_table),
        ranks=topology.world_size,
        group=group,
        memory_limit=float(min(device.storage.hbm for device in topology.devices)),
    )


def _strips(
    units: np.ndarray,
    table_of: np.ndarray,
    strip: np.ndarray,
    width: np.ndarray,
    work: np.ndarray,
    memory: np.ndarray,
) -> Strips:
    """Pieces of one unit (a column shard) or of all (the table); other widths are not on offer."""
    shape = (len(units), int(units.max()) + 1)
    costs = {"work": np.full(shape, np.inf), "memory": np.full(shape, np.inf)}
    for column in costs.values():
        column[:, 0] = 0.0
    whole, divisible = np.zeros(len(units), dtype=bool), np.zeros(len(units), dtype=bool)
    # Slowest first, so that of two kernels for one layout the faster one stays.
    for index in np.argsort(-work, kind="stable")[
        np.isin(np.argsort(-work, kind="stable"), np.flatnonzero(strip))
    ]:
        table = table_of[index]
        costs["work"][table, width[index]] = work[index]
        costs["memory"][table, width[index]] = memory[index]
        whole[table] |= width[index] == units[table]
        divisible[table] |= width[index] < units[table]
    zeros = np.zeros(len(units))
    return Strips(
        units=units,
        divisible=divisible,
        whole=whole,
        **costs,
        send=np.zeros(shape),
        receive=zeros,
        bisection=zeros,
        fixed_receive=zeros,
        fixed_bisection=zeros,
    )


def _perf(option: ShardingOption) -> np.ndarray:
    return np.array([cast(Perf, shard.perf).total for shard in option.shards])


def _storage(option: ShardingOption) -> tuple[np.ndarray, np.ndarray]:
    """HBM and host bytes of each shard."""
    storages = [cast(Storage, shard.storage) for shard in option.shards]
    return np.array([s.hbm for s in storages]), np.array([s.ddr + s.ssd for s in storages])
