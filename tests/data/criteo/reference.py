"""A slow, plain reading of Criteo rows, independent of the package, and helpers for its tests."""

import math
import os
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

DENSE = [f"I{i}" for i in range(1, 14)]
SPARSE = [f"C{i}" for i in range(1, 27)]


def parse_line(line: bytes, *, labelled: bool = True) -> tuple[int, list[int | None], list[int | None]]:
    """Label, integers and hashes of one valid line; None where missing."""
    fields = line.decode("ascii").split("\t")
    label = int(fields.pop(0)) if labelled else -1
    assert len(fields) == 39
    integers = [int(field) if field else None for field in fields[:13]]
    hashes = [int(field, 16) if field else None for field in fields[13:]]
    return label, integers, hashes


def dense_value(integer: int | None) -> float:
    return math.log(1 + max(integer or 0, 0))


def vocabulary(lines: list[bytes], min_count: int) -> list[dict[int, int]]:
    """Per feature, the id of every hash seen at least `min_count` times."""
    counters = [Counter() for _ in SPARSE]
    for line in lines:
        for counter, value in zip(counters, parse_line(line)[2], strict=True):
            if value is not None:
                counter[value] += 1
    return [
        {
            value: index + 2
            for index, value in enumerate(sorted(v for v, n in counter.items() if n >= min_count))
        }
        for counter in counters
    ]


def expected_hashed(lines: list[bytes], sizes: list[int], *, labelled: bool = True) -> list[list[float]]:
    rows = []
    for line in lines:
        label, integers, hashes = parse_line(line, labelled=labelled)
        ids = [(value or 0) % size for value, size in zip(hashes, sizes, strict=True)]
        rows.append([label, *(dense_value(integer) for integer in integers), *ids])
    return rows


def expected_vocabulary(lines: list[bytes], train: list[bytes], min_count: int) -> list[list[float]]:
    known = vocabulary(train, min_count)
    rows = []
    for line in lines:
        label, integers, hashes = parse_line(line)
        ids = [0 if value is None else ids.get(value, 1) for value, ids in zip(hashes, known, strict=True)]
        rows.append([label, *(dense_value(integer) for integer in integers), *ids])
    return rows


def read_split(directory: Path, files: list[str]) -> pa.Table:
    return pa.concat_tables([pq.read_table(directory / file) for file in files])


def assert_rows_equal(table: pa.Table, expected: list[list[float]]) -> None:
    """Labels and ids exactly; dense features to the last float32 digit but one."""
    assert table.column_names == ["label", *DENSE, *SPARSE]
    assert table.num_rows == len(expected)
    columns = list(zip(*expected, strict=True)) if expected else [[]] * 40
    for name, values in zip(table.column_names, columns, strict=True):
        actual = table[name].to_pylist()
        if name in DENSE:
            assert actual == pytest.approx(list(values), rel=2e-7, abs=0), name
        else:
            assert actual == list(values), name


def random_line(rng: random.Random, *, labelled: bool = True, distinct: int | None = None) -> bytes:
    """A valid line; `distinct` bounds the number of different hashes per feature."""
    fields = [str(rng.randint(0, 1))] if labelled else []
    for _ in DENSE:
        digits = rng.choice([0, 1, 2, 4, 8, 9, 16])
        sign = rng.choice(["", "", "-"])
        fields.append(sign + str(rng.randrange(10**digits)) if digits else "")
    for _ in SPARSE:
        value = rng.randrange(distinct or 2**32) * (2**32 // (distinct or 2**32))
        fields.append("" if rng.random() < 0.2 else f"{value:08x}")
    return "\t".join(fields).encode()


def random_lines(count: int, seed: int, **options: object) -> list[bytes]:
    rng = random.Random(seed)
    return [random_line(rng, **options) for _ in range(count)]


def criteo_sample(name: str) -> Path:
    """A real sample, or skip: it may not be redistributed, so the project has no copy."""
    root = os.environ.get("RECSYS_TPU_DATA")
    path = Path(root or "") / "criteo" / name
    if not root or not path.is_file():
        pytest.skip(
            f"needs {name}: accept the terms of the Criteo Kaggle challenge data, put the first rows of its "
            "train.txt there as gzip and set RECSYS_TPU_DATA to the folder above criteo/"
        )
    return path
