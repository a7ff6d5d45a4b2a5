"""The choices that decide the content of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from recsys_tpu.data.criteo.schema import SPARSE_FEATURES
from recsys_tpu.data.criteo.splits import LastDay

ROW_GROUP_ROWS = 65_536
ROW_GROUPS_PER_PART = 32


@dataclass(frozen=True)
class Hashed:
    """``id = hash mod num_embeddings``; see `encode.HashedEncoder`."""

    num_embeddings: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_table_sizes(self.num_embeddings)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "hashed",
            "num_embeddings": dict(zip(SPARSE_FEATURES, self.num_embeddings, strict=True)),
            "missing_category": "hash 0, thus id 0",
        }


@dataclass(frozen=True)
class Vocabulary:
    """Contiguous ids for hashes seen `min_count` times; see `encode.VocabularyEncoder`.

    `fit_on` says in which rows they are counted: those of train, or of all splits as MLPerf's reference
    does (so that a category first seen on the last day has a row of its own).  With `num_embeddings` an id is
    taken modulo its feature's table size, as MLPerf caps its tables at 40 million rows.
    """

    min_count: int
    fit_on: Literal["train", "all"] = "train"
    num_embeddings: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"--min-count: {self.min_count} must be at least 1")
        if self.num_embeddings is not None:
            _check_table_sizes(self.num_embeddings)

    def describe(self) -> dict[str, Any]:
        sizes = self.num_embeddings
        return {
            "kind": "vocabulary",
            "min_count": self.min_count,
            "missing_category": "id 0",
            "rare_or_unseen_category": "id 1",
            # None where an earlier version wrote no such key, so that its directories stay valid
            "fit_on": None if self.fit_on == "train" else self.fit_on,
            "modulo": None if sizes is None else dict(zip(SPARSE_FEATURES, sizes, strict=True)),
        }


def _check_table_sizes(num_embeddings: tuple[int, ...]) -> None:
    if len(num_embeddings) != len(SPARSE_FEATURES):
        raise ValueError(
            f"--num-embeddings: {len(num_embeddings)} sizes for {len(SPARSE_FEATURES)} features; "
            "give one size for all or one for each"
        )
    for feature, rows in zip(SPARSE_FEATURES, num_embeddings, strict=True):
        if not 1 <= rows < 2**31:
            raise ValueError(f"--num-embeddings: {feature} has {rows} rows; must be 1 to 2147483647")


@dataclass(frozen=True)
class Recipe:
    """Everything but the source files.

    `splits` are the specs of `splits.resolve_splits`; a part is an output file's worth of source lines.
    """

    ids: Hashed | Vocabulary
    splits: tuple[str, ...] = ()
    last_day: LastDay = LastDay.VAL_FIRST
    labelled: bool = True
    row_group_rows: int = ROW_GROUP_ROWS
    rows_per_part: int = ROW_GROUP_ROWS * ROW_GROUPS_PER_PART
    compression: str = "zstd"

    def __post_init__(self) -> None:
        if self.row_group_rows < 1:
            raise ValueError(f"--row-group-rows: {self.row_group_rows} must be at least 1")
        if self.rows_per_part < 1 or self.rows_per_part % self.row_group_rows:
            raise ValueError(
                f"--rows-per-part: {self.rows_per_part} must be a multiple of --row-group-rows "
                f"({self.row_group_rows})"
            )

    def describe(self) -> dict[str, Any]:
        return {
            **self.ids.describe(),
            "dense": "log(1 + max(x, 0)); missing is 0",
            "labelled": self.labelled,
            "splits": list(self.splits),
            "last_day": self.last_day.value,
            "row_group_rows": self.row_group_rows,
            "rows_per_part": self.rows_per_part,
            "compression": self.compression,
        }
