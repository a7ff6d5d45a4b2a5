"""How the ids of a preprocessed data directory behave: what the sharding planner wants to know.

    python -m recsys_tpu.data.stats DIRECTORY --output stats.json

For each sparse feature: the mean number of ids per sample, the distinct ids among growing runs of
consecutive ids, the share of ids in each of 64 equal row ranges, and how much the hottest ids take.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from recsys_tpu.data.metadata import DatasetError, DatasetMetadata
from recsys_tpu.errors import run_command

BLOCKS = 64
_RUNS = tuple(2**power for power in range(8, 25, 2))

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FeatureStatistics:
    """One sparse feature.

    Attributes:
        rows: rows of its table.
        pooling_factor: mean ids per sample.
        samples, ids: read.
        distinct_ids: different ids among all read.
        top_1_percent: share of ids that the hottest 1 % of the ids seen take.
        lookups, distinct: mean distinct ids among runs of that many consecutive ids.
        block_shares: share of ids in each of `BLOCKS` equal row ranges, in row order.
    """

    rows: int
    pooling_factor: float
    samples: int
    ids: int
    distinct_ids: int
    top_1_percent: float
    lookups: list[int]
    distinct: list[float]
    block_shares: list[float]


def measure(
    directory: Path, *, split: str = "train", max_samples: int | None = None
) -> dict[str, FeatureStatistics]:
    """Statistics of every sparse feature over (the first `max_samples` samples of) a split.

    Raises:
        DatasetError: the directory is not preprocessed data, a column is missing, an id is outside its table.
    """
    metadata = DatasetMetadata.load(directory)
    files = [directory / name for name in metadata.split(split).files]
    return {
        feature: _measure_feature(files, feature, metadata.num_embeddings[feature], max_samples)
        for feature in metadata.sparse_features
    }


def _measure_feature(
    files: Sequence[Path], feature: str, rows: int, max_samples: int | None
) -> FeatureStatistics:
    parts: list[Ids] = []
    samples = 0
    for path, count, ids in _columns(files, feature, max_samples):
        outside = np.flatnonzero((ids < 0) | (ids >= rows))
        if len(outside):
            raise DatasetError(
                f"{path}: feature {feature} has id {ids[outside[0]]} outside its table of {rows:,} rows; "
                "preprocess the data again"
            )
        samples += count
        parts.append(ids)
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    if not len(ids):
        raise DatasetError(f"feature {feature}: no ids in {len(files)} files; nothing can be measured")
    counts = np.bincount(np.unique(ids, return_inverse=True)[1])
    hottest = np.sort(counts)[::-1][: max(1, len(counts) // 100)]
    blocks = np.bincount(ids * BLOCKS // rows, minlength=BLOCKS)
    lookups, distinct = _distinct_in_runs(ids)
    return FeatureStatistics(
        rows=rows,
        pooling_factor=len(ids) / samples,
        samples=samples,
        ids=len(ids),
        distinct_ids=len(counts),
        top_1_percent=float(hottest.sum() / len(ids)),
        lookups=lookups,
        distinct=distinct,
        block_shares=(blocks / len(ids)).tolist(),
    )


def _distinct_in_runs(ids: Ids, most_runs: int = 8) -> tuple[list[int], list[float]]:
    """Mean distinct ids in evenly spaced runs of each length; the last length is all ids."""
    lengths = [run for run in _RUNS if run < len(ids)] + [len(ids)]
    means = []
    for length in lengths:
        starts = np.unique(np.linspace(0, len(ids) - length, most_runs).astype(np.int64))
        means.append(float(np.mean([len(np.unique(ids[start : start + length])) for start in starts])))
    return lengths, means


def _columns(files: Sequence[Path], feature: str, max_samples: int | None) -> Iterator[tuple[Path, int, Ids]]:
    """(file, samples, ids) of each row group, lists flattened, until enough samples were read."""
    left = max_samples
    for path in files:
        with pq.ParquetFile(path) as file:
            if feature not in file.schema_arrow.names:
                raise DatasetError(f"{path}: no column {feature}, though metadata.json lists it")
            for batch in file.iter_batches(columns=[feature]):
                column = batch.column(0)
                if left is not None:
                    column = column[:left]
                    left -= len(column)
                if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
                    values = column.flatten()
                else:
                    values = column
                if values.null_count:
                    raise DatasetError(
                        f"{path}: feature {feature} has empty values; preprocess the data again"
                    )
                yield path, len(column), values.to_numpy(zero_copy_only=False).astype(np.int64)
                if left == 0:
                    return


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m recsys_tpu.data.stats", description=__doc__)
    parser.add_argument("directory", type=Path, help="output of a preprocess command")
    parser.add_argument("--split", default="train")
    parser.add_argument("--max-samples", type=int, help="read this many samples only, from the start")
    parser.add_argument("--output", type=Path, help="write JSON for the planner's --stats")
    options = parser.parse_args(arguments)
    run_command(lambda: _run(options, Console()))


def _run(options: argparse.Namespace, console: Console) -> None:
    features = measure(options.directory, split=options.split, max_samples=options.max_samples)
    out = Table(title=f"ids of {options.directory}, split {options.split}")
    for column in ("feature", "rows", "ids/sample", "ids", "distinct", "unique share", "hottest 1 %", "skew"):
        out.add_column(column, justify="left" if column == "feature" else "right")
    for name, one in features.items():
        out.add_row(
            name,
            f"{one.rows:,}",
            f"{one.pooling_factor:.3g}",
            f"{one.ids:,}",
            f"{one.distinct_ids:,}",
            f"{one.distinct_ids / one.ids:.1%}",
            f"{one.top_1_percent:.1%}",
            f"{max(one.block_shares) * BLOCKS:.1f}",
        )
    console.print(out)
    console.print(f"skew: ids in the fullest of {BLOCKS} equal row ranges, against the mean range.")
    if options.output:
        tree = {"directory": str(options.directory), "split": options.split}
        tree |= {"features": {name: asdict(one) for name, one in features.items()}}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        console.print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
