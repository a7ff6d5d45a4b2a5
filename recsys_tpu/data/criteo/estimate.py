"""Disk, time and memory of a preprocess run before it starts, from a trial on the first rows."""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from recsys_tpu.data.criteo.preprocess import preprocess
from recsys_tpu.data.criteo.recipe import Recipe, Vocabulary
from recsys_tpu.data.criteo.schema import DENSE_FEATURES, SPARSE_FEATURES
from recsys_tpu.data.criteo.source import SourceError, expand_inputs
from recsys_tpu.data.criteo.vocabulary import MEMORY_ENTRIES

_TRIAL_BYTES = 8 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_PROCESS_BYTES = 200_000_000  # Python with numpy and pyarrow, as measured
_COUNTED_BYTES = 25  # of a (hash, count) pair while it is merged: vocabulary.MEMORY_ENTRIES
_RUN_BYTES = 12  # of a pair on disk


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        rows: of all files, from the size of the first lines.
        output_bytes, work_bytes: on disk at the end, and at most beside it meanwhile.
        seconds: with `workers` processes.
        memory_bytes: of all processes; files that are mapped into memory are not in it.
        mapped_bytes: of the vocabulary, at most: page cache, shared by the processes.
        trial_rows, trial_rows_per_s: what the figures were extrapolated from.
    """

    rows: int
    output_bytes: int
    work_bytes: int
    seconds: float
    workers: int
    memory_bytes: int
    mapped_bytes: int
    trial_rows: int
    trial_rows_per_s: float


@dataclass(frozen=True)
class _Head:
    """The first whole lines of a file, and how many bytes of the file they take."""

    lines: bytes
    rows: int
    file_bytes: float
    compressed: bool


def estimate(inputs: Sequence[str], recipe: Recipe, *, jobs: int) -> Estimate:
    """Try the recipe on the first 8 MiB of text of the first file, one process, and extrapolate.

    Raises:
        SourceError: a file is missing or has no line end in its first 8 MiB.
        BadRowError: a row of the trial is bad.
    """
    paths = [Path(path) for path in expand_inputs(inputs)]
    heads = [_head(path) for path in paths]
    rows = sum(
        round(path.stat().st_size * head.rows / head.file_bytes)
        for path, head in zip(paths, heads, strict=True)
    )
    first = heads[0]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "trial"
        source.write_bytes(first.lines)
        started = time.perf_counter()
        metadata = preprocess([str(source)], Path(scratch) / "out", replace(recipe, splits=()), jobs=1)
        rate = first.rows / (time.perf_counter() - started)
        written = sum(
            (Path(scratch) / "out" / name).stat().st_size
            for split in metadata.splits.values()
            for name in split.files
        )
    workers = min(jobs, len(paths)) if first.compressed else jobs
    vocabulary = isinstance(recipe.ids, Vocabulary)
    distinct = sum(metadata.num_embeddings.values()) if vocabulary else 0
    counted = min(distinct * rows // first.rows, rows * len(SPARSE_FEATURES))
    row_group = recipe.row_group_rows * (1 + 4 * len(DENSE_FEATURES) + 4 * len(SPARSE_FEATURES))
    per_worker = _PROCESS_BYTES + 3 * row_group + (_COUNTED_BYTES * MEMORY_ENTRIES if vocabulary else 0)
    return Estimate(
        rows=rows,
        output_bytes=written * rows // first.rows,
        work_bytes=_RUN_BYTES * counted,
        seconds=rows / (rate * workers),
        workers=workers,
        memory_bytes=_PROCESS_BYTES + workers * per_worker,
        mapped_bytes=4 * min(counted, 2**32 * len(SPARSE_FEATURES)),
        trial_rows=first.rows,
        trial_rows_per_s=rate,
    )


def print_estimate(found: Estimate, output: Path, console: Console) -> None:
    """A table, and what of it the disk has."""
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    table = Table(title=f"estimate for {output}", show_header=False)
    for name, value in (
        ("rows", f"{found.rows:,}"),
        ("disk, output", decimal(found.output_bytes)),
        ("disk, meanwhile", f"at most {decimal(found.work_bytes)} more"),
        ("disk, free now", decimal(free)),
        ("time", f"{timedelta(seconds=round(found.seconds))} with {found.workers} process(es)"),
        ("memory", f"at most {decimal(found.memory_bytes)}"),
        ("memory, mapped files", f"at most {decimal(found.mapped_bytes)} of page cache"),
    ):
        table.add_row(name, value)
    console.print(table)
    console.print(
        f"Extrapolated from the first {found.trial_rows:,} rows: {found.trial_rows_per_s:,.0f} rows/s by one "
        "process, all passes. Nothing was written. Upper bounds take new categories to keep coming so."
    )
    if found.output_bytes + found.work_bytes > free:
        console.print("The disk may be too small: free space or choose another --output.")


def _head(path: Path) -> _Head:
    with path.open("rb") as raw:
        compressed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        if compressed:
            with gzip.GzipFile(fileobj=io.BufferedReader(raw)) as file:
                text = file.read(_TRIAL_BYTES)
                position = raw.tell()
        else:
            text = raw.read(_TRIAL_BYTES)
            position = len(text)
    end = text.rfind(b"\n") + 1
    if not end:
        raise SourceError(f"{path}: no line end in its first {_TRIAL_BYTES >> 20} MiB; not a Criteo log")
    return _Head(text[:end], text.count(b"\n"), position * end / len(text), compressed)
