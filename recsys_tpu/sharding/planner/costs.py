"""The cost model: what one shard costs its rank, and one option the whole slice.

A roofline: bytes over peak bandwidth, nothing measured.  Symbols: B samples a rank, R ranks, G = B·R,
n ids that reach a shard in a step, U distinct rows among them, V vectors (bags) that a shard sends back,
w columns, s bytes of a weight, e bytes of an exchanged element, g the chip's row granule, ⌈x⌉ = x rounded
up to g.  Terms:

HBM of a shard (the kernels' byte counts; fp32 bags)
    lookup   n·(⌈w·s⌉ + 12) + V·4w
    update   n·(⌈4w⌉ + 12) + 2·U·(⌈w·s⌉ + ⌈state⌉)
HBM of a data-parallel table: the lookup of local ids, then a dense gradient (written, reduced, read) and a
    pass over weights and state:  rows·(dim·(8 + 2s) + 2·state)
Exchange of a shard, per rank (all-to-all, full duplex)
    owner's side  2·V·w·e + 8·n          pooled vectors out, their gradients in; ids (and bags) in
    others' side  the same bytes, spread evenly over all ranks
    time on ICI   bytes·(share to other ranks of the slice) / (links · link bandwidth)
    time on DCN   bytes·(share to other slices) / DCN bandwidth of the rank; the slower of both counts
Bisection  each slice sends a quarter of its own traffic across its middle, each way (uniform all-to-all)
Ring collectives (dense row-wise partial sums, dense gradients): (m−1)/m of the bytes once per pass over the
    links of the ring; between slices 1/(ranks of a slice) of that over DCN.  They count as `work`.
Sequence embeddings (not pooled) have no partial sums: row splits exchange one vector per id, all-to-all.
Deduplicated tables likewise, with each rank's distinct ids in place of its ids; summing bags at home is not
    counted, nor is their difference in host preparation.

Memory of a shard: weights, optimizer state, and buffers: two batches of ids in flight, 12 bytes each with
a quarter of padding, and the vectors and their gradients, 2·V·4w.
Memory of every rank: dense parameters with gradients and optimizer state; the vectors that it receives and
    their gradients, 2·4·B·dim; activations and temporaries,
    B·(1.10·layers + 1.39·padding)·(working set of the chip), where layers are the towers' outputs in whole
    lines of 128 floats and padding is what tiles of 8 x 128 floats add to a sample's [features, dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recsys_tpu.sharding.planner.problem import EVERY, GROUP, STRIPS, FloatArray
from recsys_tpu.sharding.planner.tables import ShardingType, TableSpec, Workload
from recsys_tpu.sharding.planner.topology import RowGroup, Topology

ID_BYTES = 8  # an id and the bag it belongs to, int32 each
BUFFER_BYTES_PER_ID = 2 * 1.25 * 12
# Fitted to the peak HBM of two steps that libtpu compiled for v5p (docs/planner.md has both and the checks).
_LAYERS, _PADDING = 1.10, 1.39

_ROW_SPLIT = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


@dataclass(frozen=True, kw_only=True)
class ShardCost:
    """Arrays over shards (or options): seconds and bytes of one rank."""

    lookup: FloatArray
    update: FloatArray
    ring: FloatArray
    send: FloatArray
    weights: FloatArray
    state: FloatArray
    buffers: FloatArray

    @property
    def work(self) -> FloatArray:
        return self.lookup + self.update + self.ring

    @property
    def memory(self) -> FloatArray:
        return self.weights + self.state + self.buffers


@dataclass(frozen=True, kw_only=True)
class SharedCost:
    """Seconds that an option costs every rank: receiving, and waiting for the bisection."""

    receive: float
    bisection: float


class CostModel:
    """Prices shards of a workload on a topology."""

    def __init__(self, workload: Workload, topology: Topology, row_group: RowGroup) -> None:
        self.workload = workload
        self.topology = topology
        self.row_group = row_group
        self.samples = workload.batch_per_rank * topology.ranks

    def row_ways(self, kind: ShardingType) -> int:
        """Ranks that a table's rows are split over."""
        if kind is ShardingType.ROW_WISE:
            return self.topology.ranks
        return self.row_group.ranks if kind in _ROW_SPLIT else 1

    def shard(
        self,
        table: TableSpec,
        kind: ShardingType,
        *,
        first_row: FloatArray,
        rows: FloatArray,
        width: FloatArray,
    ) -> ShardCost:
        """Cost of shards of `table`, arrays of one shape: first row, rows and columns of each."""
        if kind is ShardingType.DATA_PARALLEL:
            return self._replica(table, np.broadcast_shapes(rows.shape, width.shape))
        t = self.topology
        share = table.id_share(first_row, first_row + rows)
        ids = self._sent_ids(table) * share
        distinct = table.distinct_ids(ids, rows)
        ways = self.row_ways(kind)
        vectors = self._vectors(table, share)
        row, grad, state = self._row_bytes(table, width)
        wire = vectors * width * self.workload.exchange_bytes
        partial_sums = ways > 1 and table.summed_by_owner
        ring = self._ring_seconds(wire, kind) if partial_sums else np.zeros_like(wire)
        # After the reduce-scatter over the ways, a rank holds 1/ways of the sums to send on.
        outgoing = wire / ways if partial_sums else wire
        live = rows > 0
        return ShardCost(
            lookup=live * (ids * (row + 12) + vectors * 4 * width) / t.hbm_bytes_per_s,
            update=live * (ids * (grad + 12) + 2 * distinct * (row + state)) / t.hbm_bytes_per_s,
            ring=2 * ring,
            send=self._exchange_seconds(self._exchanges(table, kind) * outgoing + ID_BYTES * ids),
            weights=rows * width * table.weight_bytes,
            state=rows * self._state_bytes(table, width),
            buffers=live * (BUFFER_BYTES_PER_ID * ids + 2 * vectors * 4 * width),
        )

    def shared(self, table: TableSpec, kind: ShardingType, column_shards: float) -> SharedCost:
        """Cost of a layout to every rank; every column shard gets all ids."""
        if kind is ShardingType.DATA_PARALLEL:
            return SharedCost(receive=0.0, bisection=0.0)
        w, t = self.workload, self.topology
        ids = self._sent_ids(table)
        vectors = self.samples * table.vectors_per_sample if table.summed_by_owner else ids
        total = self._exchanges(table, kind) * vectors * table.dim * w.exchange_bytes
        total += ID_BYTES * ids * column_shards
        within_slice = total / t.slices**2
        return SharedCost(
            receive=float(self._exchange_seconds(np.asarray(total / t.ranks))),
            bisection=within_slice / 4 / t.bisection_bytes_per_s,
        )

    def host_seconds(self) -> float:
        """Host preparation of one step: all ids of the host's samples, over its cores."""
        w = self.workload
        ids = w.batch_per_rank * self.topology.host_ranks * sum(table.ids_per_sample for table in w.tables)
        return ids / (w.host_ids_per_s * w.host_cores)

    def dense_seconds(self) -> float:
        """Dense towers at peak bf16 FLOP/s."""
        return self.workload.batch_per_rank * self.workload.dense.flops_per_sample / self.topology.flops

    def all_reduce_seconds(self) -> float:
        """Dense gradients in fp32: reduce-scatter and all-gather."""
        wire = np.asarray(4.0 * self.workload.dense.parameters)
        return 2 * float(self._ring_seconds(wire, ShardingType.ROW_WISE))

    def fixed_memory(self) -> dict[str, float]:
        """Bytes of every rank whatever the plan, by term."""
        w = self.workload
        received = sum(
            table.dim * w.batch_per_rank * table.vectors_per_sample
            + (table.dim * self._sent_ids(table) / self.topology.ranks if table.deduplicated else 0.0)
            for table in w.tables
        )
        working = _LAYERS * w.dense.activation_bytes_per_sample + _PADDING * w.dense.padding_bytes_per_sample
        return {
            "dense parameters": float(w.dense.parameters * w.dense.state_bytes_per_parameter),
            "received embeddings": 2.0 * 4.0 * received,
            "activations and temporaries": w.batch_per_rank * working * self.topology.chip.working_set,
        }

    def _replica(self, table: TableSpec, shape: tuple[int, ...]) -> ShardCost:
        t = self.topology
        ids = self.workload.batch_per_rank * table.ids_per_sample
        vectors = self.workload.batch_per_rank * table.vectors_per_sample
        row, _, _ = self._row_bytes(table, np.asarray(float(table.dim)))
        gradient = 4.0 * table.rows * table.dim
        state = float(table.rows * table.state_bytes_per_row(table.dim))
        weights = float(table.rows * table.dim * table.weight_bytes)
        lookup = ids * (row + 12) + vectors * 4 * table.dim
        update = vectors * 4 * table.dim + 2 * gradient + 2 * weights + 2 * state
        full = np.ones(shape)
        return ShardCost(
            lookup=full * lookup / t.hbm_bytes_per_s,
            update=full * update / t.hbm_bytes_per_s,
            ring=full * 2 * self._ring_seconds(np.asarray(gradient), ShardingType.ROW_WISE),
            send=np.zeros(shape),
            weights=full * weights,
            state=full * state,
            buffers=full * (gradient + BUFFER_BYTES_PER_ID * ids),
        )

    def _sent_ids(self, table: TableSpec) -> float:
        """Ids that all ranks send to the owners of a table: all, or of each rank those that differ."""
        if not table.deduplicated:
            return self.samples * table.ids_per_sample
        of_a_rank = np.asarray(self.workload.batch_per_rank * table.ids_per_sample)
        return self.topology.ranks * float(table.distinct_ids(of_a_rank, np.asarray(float(table.rows))))

    def _vectors(self, table: TableSpec, share: FloatArray) -> FloatArray:
        """Vectors that a shard sends back in a step: of row-split bags, one partial sum on every owner."""
        if table.summed_by_owner:
            return np.full_like(share, self.samples * table.vectors_per_sample)
        return self._sent_ids(table) * share

    @staticmethod
    def _exchanges(table: TableSpec, kind: ShardingType) -> int:
        """Times that the vectors cross the slice all-to-all: out, and their gradients back."""
        return 0 if kind is ShardingType.ROW_WISE and table.summed_by_owner else 2

    def _row_bytes(self, table: TableSpec, width: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """HBM bytes of one access to a row, to a bag's gradient, to a row's optimizer state."""
        granule = self.topology.chip.row_granule_bytes

        def rounded_up(size: FloatArray) -> FloatArray:
            return np.ceil(size / granule) * granule

        return (
            rounded_up(width * table.weight_bytes),
            rounded_up(width * 4.0),
            rounded_up(self._state_bytes(table, width)),
        )

    @staticmethod
    def _state_bytes(table: TableSpec, width: FloatArray) -> FloatArray:
        fixed = table.state_bytes_per_row(0)
        return fixed + (table.state_bytes_per_row(1) - fixed) * width

    def _exchange_seconds(self, size: FloatArray) -> FloatArray:
        """All-to-all of `size` bytes of one rank to all ranks evenly."""
        t = self.topology
        ranks_in_slice = t.ranks // t.slices
        ici = (ranks_in_slice - 1) / t.ranks / t.injection_bytes_per_s
        dcn = (t.slices - 1) / t.slices / t.dcn_bytes_per_s
        return size * max(ici, dcn)

    def _ring_seconds(self, size: FloatArray, kind: ShardingType) -> FloatArray:
        """One pass (reduce-scatter or all-gather) of `size` bytes a rank over all ranks, or a row group."""
        t = self.topology
        if kind is not ShardingType.ROW_WISE:
            group = self.row_group
            return size * (group.ranks - 1) / group.ranks / group.ring_bytes_per_s
        ranks_in_slice = t.ranks // t.slices
        ici = (ranks_in_slice - 1) / ranks_in_slice / t.injection_bytes_per_s
        dcn = (t.slices - 1) / t.slices / ranks_in_slice / t.dcn_bytes_per_s
        return size * (ici + dcn)


def layout_kind(kind: ShardingType) -> int:
    """How the solver places an option of this type."""
    if kind in (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE):
        return EVERY
    return STRIPS if kind in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE) else GROUP
