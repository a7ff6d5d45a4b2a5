"""Command line: ``python -m recsys_tpu.data.criteo preprocess --input 'day_*.gz' --output DIR``."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from recsys_tpu.config import ClickDataConfig, load_config
from recsys_tpu.data.criteo.estimate import estimate, print_estimate
from recsys_tpu.data.criteo.pool import WorkerDied
from recsys_tpu.data.criteo.preprocess import preprocess
from recsys_tpu.data.criteo.recipe import ROW_GROUP_ROWS, ROW_GROUPS_PER_PART, Hashed, Recipe, Vocabulary
from recsys_tpu.data.criteo.schema import MLPERF_NUM_EMBEDDINGS, SPARSE_FEATURES
from recsys_tpu.data.criteo.splits import LastDay
from recsys_tpu.data.criteo.verify import check_mlperf_files, check_preprocessed, print_checks
from recsys_tpu.data.metadata import DatasetMetadata
from recsys_tpu.data.multi_hot import ensure_multi_hot_tables
from recsys_tpu.errors import ConfigError

_EXAMPLES = """examples:
  # Kaggle, hashed into tables of 100,000 rows, split by the published protocol
  python -m recsys_tpu.data.criteo preprocess --input train.txt --output kaggle \\
      --recipe hashed --num-embeddings 100000 --split kaggle
  # 1TB, the table sizes of MLPerf
  python -m recsys_tpu.data.criteo preprocess --input 'day_*.gz' --output 1tb \\
      --recipe hashed --num-embeddings mlperf --split 1tb
  # a vocabulary of the hashes seen at least 10 times in the first 70,000 rows
  python -m recsys_tpu.data.criteo preprocess --input head80k.txt.gz --output sample \\
      --recipe vocabulary --min-count 10 --split train=1-70000 --split test=70001-
"""
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 on an error, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        return int(options.command(options, console))
    except (ValueError, WorkerDied) as error:
        return _fail(str(error))
    except OSError as error:
        if error.errno in _FULL_DISK:
            return _fail(
                f"no space left for {options.output} ({error.strerror}); free some or move the directory, "
                "then run the same command again: it continues with what is finished"
            )
        return _fail(f"{error.filename or options.output}: {error.strerror or error}")
    except KeyboardInterrupt:
        _fail("interrupted; run the same command again to continue")
        return 130


def _preprocess(options: argparse.Namespace, console: Console) -> int:
    recipe, max_bad = _recipe(options), _max_bad(options)
    if options.estimate:
        print_estimate(estimate(options.input, recipe, jobs=options.jobs), options.output, console)
    else:
        preprocess(options.input, options.output, recipe, jobs=options.jobs, max_bad=max_bad, console=console)
    return 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    if options.protocol == "mlperf-files":
        checks = list(check_mlperf_files(options.directory))
    else:
        checks = check_preprocessed(options.directory, options.protocol)
    return 0 if print_checks(checks, console) else 1


def _multi_hot(options: argparse.Namespace, console: Console) -> int:
    config = load_config(options.config, options.overrides)
    data = config.data
    if not isinstance(data, ClickDataConfig) or data.multi_hot is None:
        raise ConfigError(f"{options.config}: has no data.multi_hot")
    rows = getattr(config.model, "num_embeddings", None)
    if data.path is not None and data.path.exists():
        metadata = DatasetMetadata.load(data.path)
        rows = {name: (rows or metadata.num_embeddings)[name] for name in metadata.sparse_features}
    if rows is None:
        raise ConfigError(f"{options.config}: give the rows of each table as model.num_embeddings")
    tables = ensure_multi_hot_tables(data.multi_hot, rows, data.cache_dir)
    console.print(f"{data.cache_dir / tables.fingerprint}: {decimal(data.multi_hot.bytes_on_disk(rows))}")
    return 0


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recsys_tpu.data.criteo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "preprocess",
        help="turn Criteo logs into Parquet files of ids",
        description="Turn Criteo logs (Kaggle or 1TB, plain or gzip) into Parquet files of ids. A run that "
        "was killed continues when the same command is given again.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="files or quoted patterns, in order")
    add("--output", type=Path, required=True, metavar="DIR", help="directory to write or to continue")
    add("--recipe", choices=["hashed", "vocabulary"], required=True, help="how a hash becomes an id")
    add(
        "--num-embeddings",
        metavar="N|N1,...,N26|mlperf",
        help="table size of all features, of each, or those of MLPerf's DLRM-DCNv2: what a hash, or the id "
        "of a vocabulary, is taken modulo of",
    )
    add("--min-count", type=int, metavar="N", help="vocabulary: keep hashes seen so often (BARS: 10)")
    add(
        "--fit-on",
        choices=["train", "all"],
        help="vocabulary: the rows whose hashes are counted; all: of every split, as MLPerf does "
        "(default: train)",
    )
    add(
        "--split",
        action="append",
        default=[],
        metavar="kaggle|1tb|NAME=FIRST-LAST",
        help="the published protocol, or rows from 1 over all files, once per split; default: all rows train",
    )
    add(
        "--last-day",
        type=LastDay,
        choices=list(LastDay),
        default=LastDay.VAL_FIRST,
        help="order of the last day's halves: TorchRec and MLPerf val-first (default), dlrm test-first",
    )
    add("--unlabeled", action="store_true", help="lines of 39 fields, such as Kaggle's test.txt; label is -1")
    add("--on-bad-row", choices=["error", "skip"], default="error", help="default: error")
    add("--max-bad", type=int, metavar="N", help="with skip: more bad rows than this are an error")
    add(
        "--jobs",
        type=int,
        default=_cores(),
        metavar="N",
        help="worker processes (default: cores, %(default)s)",
    )
    add("--row-group-rows", type=int, default=ROW_GROUP_ROWS, metavar="N", help="default: %(default)s")
    add(
        "--rows-per-part",
        type=int,
        metavar="N",
        help=f"source rows per output file (default: {ROW_GROUPS_PER_PART} row groups)",
    )
    add("--compression", choices=["zstd", "snappy", "lz4"], default="zstd", help="default: %(default)s")
    add("--estimate", action="store_true", help="say what disk, time and memory it takes, and do nothing")
    command.set_defaults(command=_preprocess)

    verify = commands.add_parser(
        "verify",
        help="compare rows, splits, click rates or checksums with the published ones",
        description="Print expected beside found; exit status 1 if anything differs.",
    )
    verify.add_argument("directory", type=Path, help="output of preprocess, or MLPerf's own files")
    verify.add_argument(
        "--protocol",
        choices=["kaggle", "1tb", "mlperf-files"],
        required=True,
        help="mlperf-files: MD5 of the .npy and .npz files that MLPerf distributes",
    )
    verify.set_defaults(command=_verify)

    multi_hot = commands.add_parser(
        "multi-hot",
        help="draw the multi-hot ids that a config asks for",
        description="Draw the ids of data.multi_hot into data.cache_dir. Training does it, too, but the "
        "other hosts of a run wait for it no longer than runtime.collective_timeout_s.",
    )
    multi_hot.add_argument("--config", type=Path, required=True, help="config of the run")
    multi_hot.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")
    multi_hot.set_defaults(command=_multi_hot)
    return parser


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _recipe(options: argparse.Namespace) -> Recipe:
    return Recipe(
        ids=_ids(options),
        splits=tuple(options.split),
        last_day=options.last_day,
        labelled=not options.unlabeled,
        row_group_rows=options.row_group_rows,
        rows_per_part=options.rows_per_part or options.row_group_rows * ROW_GROUPS_PER_PART,
        compression=options.compression,
    )


def _ids(options: argparse.Namespace) -> Hashed | Vocabulary:
    sizes = _table_sizes(options.num_embeddings)
    if options.recipe == "vocabulary":
        if options.min_count is None:
            raise ValueError("--recipe vocabulary: give --min-count")
        return Vocabulary(options.min_count, fit_on=options.fit_on or "train", num_embeddings=sizes)
    if sizes is None or options.min_count is not None or options.fit_on is not None:
        raise ValueError("--recipe hashed: give --num-embeddings (and no --min-count or --fit-on)")
    return Hashed(sizes)


def _table_sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text == "mlperf":
        return MLPERF_NUM_EMBEDDINGS
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(
            f"--num-embeddings {text}: must be a number, "
            f"{len(SPARSE_FEATURES)} of them with commas, or mlperf"
        ) from None
    return sizes * len(SPARSE_FEATURES) if len(sizes) == 1 else sizes


def _max_bad(options: argparse.Namespace) -> int | None:
    if (options.on_bad_row == "skip") != (options.max_bad is not None):
        raise ValueError("--on-bad-row skip and --max-bad N go together: say how many rows may be skipped")
    if options.max_bad is not None and options.max_bad < 0:
        raise ValueError(f"--max-bad {options.max_bad}: must be 0 or more")
    assert options.max_bad is None or isinstance(options.max_bad, int)
    return options.max_bad


if __name__ == "__main__":
    sys.exit(main())
