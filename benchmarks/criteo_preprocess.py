"""Rows per second of preprocessing a Criteo log, beside TorchRec's own `tsv_to_npys` on the same rows.

`tsv_to_npys` parses and transforms rows in one process into numpy files of raw hashes; this package checks
every byte, turns hashes into ids and writes Parquet, in one process and in one per core.  Methods take turns
within one run; the median round of each is compared.  Time includes starting workers and scanning the file.

    pip install iopath  # tsv_to_npys needs it
    python benchmarks/criteo_preprocess.py [--rows 400000] [--input train.txt]
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from recsys_tpu.data.criteo.preprocess import preprocess
from recsys_tpu.data.criteo.recipe import Hashed, Recipe, Vocabulary

COMPRESSIONS = ("zstd", "snappy", "lz4")


def write_log(path: Path, rows: int, source: Path | None) -> int:
    """The first `rows` rows of `source`, or seeded random Zipf-like ones; returns how many."""
    if source is not None:
        with source.open("rb") as log, path.open("wb") as file:
            file.writelines(islice(log, rows))
        return min(rows, path.read_bytes().count(b"\n"))
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, (rows, 1)).astype("U1")
    counts = np.exp(rng.exponential(2.0, (rows, 13))).astype(np.int64).astype("U8")
    counts[rng.random(counts.shape) < 0.25] = ""
    ranks = rng.zipf(1.2, (rows, 26)).astype(np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    hashes = np.array([f"{value:08x}" for value in ranks.ravel().tolist()]).reshape(rows, 26)
    hashes[rng.random(hashes.shape) < 0.1] = ""
    with path.open("w") as file:
        file.writelines("\t".join(fields) + "\n" for fields in np.hstack([label, counts, hashes]).tolist())
    return rows


def torchrec_npys(log: Path, output: Path) -> None:
    # Imported here, or every worker process of this package would import torch.
    from torchrec.datasets.criteo import BinaryCriteoUtils

    output.mkdir()
    dense, sparse, labels = (str(output / name) for name in ("dense.npy", "sparse.npy", "labels.npy"))
    BinaryCriteoUtils.tsv_to_npys(str(log), dense, sparse, labels)


def recsys_tpu(ids: Hashed | Vocabulary, jobs: int) -> Callable[[Path, Path], None]:
    # A part per job, so that one small file keeps all jobs busy; a real log has many parts.
    recipe = Recipe(ids, rows_per_part=65_536)
    return lambda log, output: void(preprocess([str(log)], output, recipe, jobs=jobs))


def void(result: object) -> None:
    """Drop a result."""


def cpu_seconds() -> float:
    """CPU time of this process and its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compare_compressions(log: Path, folder: Path, rows: int) -> None:
    """Print bytes per row and one thread's reading speed of each compression."""
    print("\nreading the Parquet output, one thread, page cache warm:")
    for compression in COMPRESSIONS:
        output = folder / compression
        metadata = preprocess(
            [str(log)], output, Recipe(Hashed((1_000_000,) * 26), compression=compression), jobs=1
        )
        files = [output / name for name in metadata.splits["train"].files]
        speeds = []
        for _ in range(5):
            started = time.perf_counter()
            for file in files:
                parquet = pq.ParquetFile(file)
                for group in range(parquet.num_row_groups):
                    parquet.read_row_group(group, use_threads=False)
            speeds.append(rows / (time.perf_counter() - started))
        size = sum(file.stat().st_size for file in files) / rows
        print(f"  {compression:7} {size:6.1f} bytes/row {statistics.median(speeds):12,.0f} rows/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input", type=Path, help="a labelled Criteo log, not compressed")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log.txt"
        rows = write_log(log, options.rows, options.input)
        print(f"command: python {' '.join(sys.argv)}")
        machine = platform.processor() or platform.machine()
        print(f"machine: {machine}, {cores} cores, load {os.getloadavg()[0]:.1f}")
        print(f"{rows:,} rows, {log.stat().st_size / rows:.0f} bytes each, {options.rounds} rounds\n")
        hashed, vocabulary = Hashed((1_000_000,) * 26), Vocabulary(10)
        methods = {
            "torchrec tsv_to_npys": torchrec_npys,
            "hashed, 1 job": recsys_tpu(hashed, 1),
            f"hashed, {cores} jobs": recsys_tpu(hashed, cores),
            "vocabulary, 1 job": recsys_tpu(vocabulary, 1),
            f"vocabulary, {cores} jobs": recsys_tpu(vocabulary, cores),
        }
        walls: dict[str, list[float]] = {method: [] for method in methods}
        cpus: dict[str, list[float]] = {method: [] for method in methods}
        import torchrec.datasets.criteo  # noqa: F401 (outside the timing)

        for turn in range(options.rounds):
            for index, (method, run) in enumerate(methods.items()):
                wall, cpu = time.perf_counter(), cpu_seconds()
                run(log, folder / f"out-{turn}-{index}")
                walls[method].append(time.perf_counter() - wall)
                cpus[method].append(cpu_seconds() - cpu)
        slowest = statistics.median(walls["torchrec tsv_to_npys"])
        for method in methods:
            wall, cpu = statistics.median(walls[method]), statistics.median(cpus[method])
            print(
                f"{method:22} {rows / wall:10,.0f} rows/s {rows / cpu:10,.0f} rows per CPU second"
                f"{slowest / wall:8.1f} x torchrec"
            )
        compare_compressions(log, folder, rows)


if __name__ == "__main__":
    main()
