"""What the planner is told about a model: its tables, the ids they see, the dense part, constraints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from recsys_tpu.sharding.planner.errors import PlanInputError

FloatArray = npt.NDArray[np.float64]


class ShardingType(StrEnum):
    """TorchRec's sharding types, by TorchRec's names."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


# Table-column-wise is column-wise with fewer placements, so it is tried only where it is asked for.
DEFAULT_TYPES = tuple(t for t in ShardingType if t is not ShardingType.TABLE_COLUMN_WISE)

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


@dataclass(frozen=True, kw_only=True)
class IdStatistics:
    """How the ids of one table behave, measured by `python -m recsys_tpu.data.stats`.

    Attributes:
        lookups: numbers of ids at which distinct ids were counted, ascending.
        distinct: mean distinct ids among that many consecutive ids.
        block_shares: share of all ids that fall in each of equally long row ranges, in row order.
    """

    lookups: tuple[int, ...]
    distinct: tuple[float, ...]
    block_shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.lookups) != len(self.distinct) or not self.lookups or not self.block_shares:
            raise PlanInputError("id statistics: lookups and distinct must be equally long and not empty")
        if abs(sum(self.block_shares) - 1.0) > 1e-6 or min(self.block_shares) < 0:
            raise PlanInputError("id statistics: block_shares must be at least 0 and sum to 1")


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One embedding table and the features that read it.

    Attributes:
        rows, dim: shape of the weight.
        pooling_factors: mean ids per sample of each feature that reads the table.
        feature_names: their names, in TorchRec's order.
        weight_bytes: bytes of one weight element.
        optimizer: fused optimizer: sgd, rowwise_adagrad, adagrad or adam.
        pooled: whether a bag gives one vector (else one vector per id: a sequence embedding).
        deduplicated: whether the exchange carries each rank's distinct ids and their rows, and bags are
            summed at home (`sharding.deduplicate`), instead of bags that the owners sum.
        statistics: measured ids; None assumes that all rows are equally likely.
        module: path of the collection inside the model, for TorchRec's plan.
    """

    name: str
    rows: int
    dim: int
    pooling_factors: tuple[float, ...] = (1.0,)
    feature_names: tuple[str, ...] = ()
    weight_bytes: int = 4
    optimizer: str = "rowwise_adagrad"
    pooled: bool = True
    deduplicated: bool = False
    statistics: IdStatistics | None = None
    module: str = ""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dim < 1:
            raise PlanInputError(f"table {self.name}: rows={self.rows} and dim={self.dim} must be at least 1")
        if not self.pooling_factors or min(self.pooling_factors) < 0:
            raise PlanInputError(
                f"table {self.name}: pooling_factors={self.pooling_factors}: one number ≥ 0 per feature"
            )
        if self.feature_names and len(self.feature_names) != len(self.pooling_factors):
            raise PlanInputError(f"table {self.name}: one pooling factor per feature is needed")
        if self.optimizer not in OPTIMIZERS:
            raise PlanInputError(
                f"table {self.name}: optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}"
            )

    @property
    def ids_per_sample(self) -> float:
        return sum(self.pooling_factors)

    @property
    def summed_by_owner(self) -> bool:
        """Whether owners send sums over bags."""
        return self.pooled and not self.deduplicated

    @property
    def vectors_per_sample(self) -> float:
        """Vectors that one sample gets back: one per bag, or one per id where ids are not pooled."""
        return float(len(self.pooling_factors)) if self.pooled else self.ids_per_sample

    def state_bytes_per_row(self, width: int) -> int:
        """Optimizer state of `width` columns of a row."""
        return {"sgd": 0, "rowwise_adagrad": 4, "adagrad": 4 * width, "adam": 8 * width}[self.optimizer]

    @property
    def total_bytes(self) -> int:
        """Weights and optimizer state of the whole table, unsharded."""
        return self.rows * (self.dim * self.weight_bytes + self.state_bytes_per_row(self.dim))

    def distinct_ids(self, lookups: FloatArray, rows: FloatArray) -> FloatArray:
        """Expected distinct rows among `lookups` ids that fall on `rows` rows of this table.

        Without statistics every row is equally likely: rows·(1 − (1 − 1/rows)^lookups).  With them:
        log-log interpolation of the measured counts (the ends are extended with slope 1 below and the
        last slope above), scaled to the share of rows.
        """
        rows = np.maximum(rows, 1.0)
        if self.statistics is None:
            # One row is simply the limit of the formula, which log(0) has not.
            return rows * -np.expm1(lookups * np.log1p(-1.0 / np.maximum(rows, 1.0 + 1e-9)))
        share = rows / self.rows
        whole = np.maximum(lookups / share, 1e-9)
        x, y = np.log(self.statistics.lookups), np.log(np.maximum(self.statistics.distinct, 1e-9))
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        at = np.log(whole)
        log_distinct = np.where(
            at < x[0],
            y[0] + (at - x[0]),
            np.where(at > x[-1], y[-1] + slope * (at - x[-1]), np.interp(at, x, y)),
        )
        return np.minimum(np.minimum(np.exp(log_distinct) * share, lookups), rows)

    @cached_property
    def _cumulative_shares(self) -> tuple[FloatArray, FloatArray]:
        assert self.statistics is not None
        shares = np.concatenate([[0.0], np.cumsum(self.statistics.block_shares)])
        return np.linspace(0.0, self.rows, len(shares)), shares / shares[-1]

    def id_share(self, first_row: FloatArray, last_row: FloatArray) -> FloatArray:
        """Share of the table's ids that fall on rows [first_row, last_row)."""
        if self.statistics is None:
            return (last_row - first_row) / self.rows
        at, shares = self._cumulative_shares
        return np.interp(last_row, at, shares) - np.interp(first_row, at, shares)


@dataclass(frozen=True, kw_only=True)
class TableConstraint:
    """What a user fixes about one table.

    Attributes:
        types: allowed sharding types; empty: all but table_column_wise.
        ranks: ranks that may hold shards of it; None: all.  Row-wise and data-parallel need all.
        min_width: fewest columns of a column shard; None: the chip's lanes.
        pinned: exact ranks, shard by shard (needs exactly one type).
    """

    types: tuple[ShardingType, ...] = ()
    ranks: tuple[int, ...] | None = None
    min_width: int | None = None
    pinned: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class DensePart:
    """The part of the model that every rank replicates.

    Attributes:
        parameters: dense parameters.
        state_bytes_per_parameter: weights, gradients and optimizer state together.
        flops_per_sample: forward and backward.
        activation_bytes_per_sample: layers kept from forward to backward, in whole lines of 128 floats.
        padding_bytes_per_sample: what tiles of 8 x 128 floats add to the vectors of a sample.
    """

    parameters: int = 0
    state_bytes_per_parameter: int = 12
    flops_per_sample: float = 0.0
    activation_bytes_per_sample: float = 0.0
    padding_bytes_per_sample: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All that is planned at once.

    Attributes:
        batch_per_rank: samples per rank and step.
        exchange_bytes: bytes of one element of pooled embeddings and gradients on the wire.
        host_ids_per_s: ids that one host core prepares per second.
        host_cores: cores of one host.
        constraints: by table name.
    """

    tables: tuple[TableSpec, ...]
    batch_per_rank: int
    dense: DensePart = DensePart()
    exchange_bytes: int = 4
    host_ids_per_s: float = 2e6
    host_cores: int = 96
    constraints: Mapping[str, TableConstraint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        repeated = (
            sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        )
        if repeated:
            raise PlanInputError(f"tables named twice: {', '.join(repeated)}")
        if not names:
            raise PlanInputError("there are no tables to plan")
        unknown = sorted(set(self.constraints) - set(names))
        if unknown:
            raise PlanInputError(f"constraints on unknown tables: {', '.join(unknown)}")
        if self.batch_per_rank < 1:
            raise PlanInputError(f"batch_per_rank={self.batch_per_rank} must be at least 1")

    def constraint(self, table: str) -> TableConstraint:
        return self.constraints.get(table, TableConstraint())


def dlrm_dense_part(
    *,
    embedding_dim: int,
    dense_features: int,
    sparse_features: int,
    bottom_mlp: Sequence[int],
    over_mlp: Sequence[int],
    cross_layers: int = 0,
    cross_rank: int = 0,
    dot_products: bool = True,
) -> DensePart:
    """Dense part of DLRM (dot interaction) or, with `cross_layers`, DLRM-DCNv2 (low-rank cross network).

    Without either (`dot_products=False`) the over MLP reads all vectors as they are.

    Matrix multiplications only: 2 FLOP a weight and sample forward, twice that backward.
    """
    bottom = [dense_features, *bottom_mlp]
    vectors = sparse_features + 1
    flat = vectors * embedding_dim
    weights = sum(a * b for a, b in itertools.pairwise(bottom))
    biases = sum(bottom[1:])
    extra_flops = 0.0
    if cross_layers:
        weights += cross_layers * 2 * flat * cross_rank
        biases += cross_layers * flat
        over_input = flat
    elif not dot_products:
        over_input = flat
    else:
        over_input = bottom[-1] + vectors * (vectors - 1) // 2
        extra_flops = 2.0 * vectors * vectors * embedding_dim
    over = [over_input, *over_mlp]
    weights += sum(a * b for a, b in itertools.pairwise(over))
    biases += sum(over[1:])
    layers = [*bottom, *over, *[flat, cross_rank] * cross_layers]
    tiled = math.ceil(sparse_features / 8) * 8 * _whole_lines(embedding_dim)
    return DensePart(
        parameters=weights + biases,
        flops_per_sample=3 * (2.0 * weights + extra_flops),
        activation_bytes_per_sample=4.0 * sum(_whole_lines(width) for width in layers),
        padding_bytes_per_sample=4.0 * (tiled - sparse_features * embedding_dim),
    )


def _whole_lines(width: int) -> int:
    """Floats that a row of `width` floats takes in the compiler's tiles."""
    return math.ceil(width / 128) * 128
