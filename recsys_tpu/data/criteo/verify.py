"""Compare preprocessed data, or MLPerf's own files, with what is published: expected beside found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recsys_tpu.data.criteo.published import PUBLISHED_LOGS, mlperf_checksums
from recsys_tpu.data.metadata import DatasetError, DatasetMetadata

_BLOCK = 1 << 24


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    expected: str
    found: str
    ok: bool


def check_preprocessed(directory: Path, protocol: str) -> list[Check]:
    """Rows of each source file and split, and click rates, of a directory that `preprocess` wrote.

    Args:
        protocol: ``kaggle`` or ``1tb``.

    Raises:
        DatasetError: the directory is not preprocessed data.
    """
    metadata, published = DatasetMetadata.load(directory), PUBLISHED_LOGS[protocol]
    files = metadata.source.get("files")
    assert isinstance(files, list)
    lines = {
        str(item["name"]).split(".")[0]: int(str(item["lines"])) for item in files if isinstance(item, dict)
    }
    checks = [
        _rows(f"rows of {name}", expected, lines.get(name)) for name, expected in published.rows.items()
    ]
    checks += [_rows(f"rows of {name}", None, lines[name]) for name in lines if name not in published.rows]
    first, second = ("val", "test") if metadata.recipe.get("last_day") == "val-first" else ("test", "val")
    rejected = metadata.source.get("rows_rejected")
    checks.append(Check("rows rejected", "0", str(rejected), rejected == 0))
    for split, key in (("train", "train"), (first, "first half"), (second, "second half")):
        found = metadata.splits.get(split)
        title = split if split == key else f"{split} ({key} of the last day)"
        checks.append(_rows(f"rows of split {title}", published.splits[key], found.rows if found else None))
        if found and found.positives is not None:
            low, high = published.click_rates
            rate = found.positives / found.rows
            checks.append(
                Check(f"click rate of {split}", f"{low} to {high}", f"{rate:.4f}", low <= rate <= high)
            )
    return checks


def check_mlperf_files(directory: Path) -> Iterator[Check]:
    """MD5 of every file in the directory that MLPerf publishes one for; reads the files whole.

    Raises:
        DatasetError: there is none.
    """
    known = mlperf_checksums()
    names = [name for name in known if (directory / name).is_file()]
    if not names:
        raise DatasetError(
            f"{directory}: has none of the files that MLPerf publishes checksums of (day_0_dense.npy, "
            "day_0_sparse_multi_hot.npz, …)"
        )
    for name in names:
        digest = hashlib.md5(usedforsecurity=False)
        with (directory / name).open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        yield Check(f"MD5 of {name}", known[name], digest.hexdigest(), known[name] == digest.hexdigest())


def print_checks(checks: list[Check], console: Console) -> bool:
    """Print expected beside found; returns whether all agree."""
    table = Table()
    for column in ("", "expected", "found", "agrees"):
        table.add_column(column)
    for check in checks:
        table.add_row(check.name, check.expected, check.found, "yes" if check.ok else "NO")
    console.print(table)
    wrong = sum(not check.ok for check in checks)
    console.print("everything agrees" if not wrong else f"{wrong} of {len(checks)} do not agree")
    return not wrong


def _rows(name: str, expected: int | None, found: int | None) -> Check:
    return Check(
        name,
        "no such file" if expected is None else f"{expected:,}",
        "missing" if found is None else f"{found:,}",
        expected == found,
    )
