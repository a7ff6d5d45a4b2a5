"""Which rows belong to which split.

Rows are numbered from 1 over all source files in order, and every line counts, bad ones too: a rejected
row moves no boundary.  In the published protocols the last day is cut in two halves, and the first half
has the extra row where the number is odd (numpy.array_split).  facebookresearch/dlrm tests on the first
half and validates on the second; TorchRec and MLPerf validate on the first and test on the second.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from recsys_tpu.errors import UserError

SPLIT_NAMES = ("train", "val", "test")
_KAGGLE_DAYS = 7
_TERABYTE_DAYS = 24


class LastDay(StrEnum):
    """Which half of the last day comes first: TorchRec's order or facebookresearch/dlrm's."""

    VAL_FIRST = "val-first"
    TEST_FIRST = "test-first"


@dataclass(frozen=True)
class RowRange:
    """Rows `first` to `last`, inclusive and counted from 1, form the split `split`."""

    split: str
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first + 1


class SplitError(UserError, ValueError):
    """A --split that makes no sense for these files."""


def resolve_splits(
    specs: Sequence[str], *, names: Sequence[str], rows: Sequence[int], last_day: LastDay
) -> list[RowRange]:
    """Row ranges in ascending order, none empty, none overlapping.

    Args:
        specs: nothing (all rows are `train`), ``["kaggle"]``, ``["1tb"]``, or items ``NAME=FIRST-LAST``
            where LAST may be left out for the last row.
        names: names of the source files, in order.
        rows: lines of each.
        last_day: order of the halves of the last day, for ``kaggle`` and ``1tb``.

    Raises:
        SplitError: a range is malformed, empty, overlaps another or reaches past the end; or the files
            don't fit the protocol.
    """
    total = sum(rows)
    if not specs:
        return [RowRange("train", 1, total)]
    if list(specs) == ["kaggle"]:
        return _with_last_day_halved(_kaggle_train_rows(total), total, last_day)
    if list(specs) == ["1tb"]:
        _check_terabyte_days(names)
        return _with_last_day_halved(total - rows[-1], total, last_day)
    ranges = sorted((_parse_range(spec, total) for spec in specs), key=lambda item: item.first)
    for before, after in itertools.pairwise(ranges):
        if after.first <= before.last:
            raise SplitError(
                f"--split: {before.split} and {after.split} share rows "
                f"{after.first}-{min(before.last, after.last)}"
            )
    repeated = {item.split for item in ranges if sum(other.split == item.split for other in ranges) > 1}
    if repeated:
        raise SplitError(f"--split: {', '.join(sorted(repeated))} is given more than one range")
    return ranges


def _parse_range(spec: str, total: int) -> RowRange:
    match = re.fullmatch(r"(\w+)=(\d+)-(\d*)", spec)
    if match is None or match[1] not in SPLIT_NAMES:
        raise SplitError(
            f"--split {spec}: must be kaggle, 1tb, or NAME=FIRST-LAST with NAME one of "
            f"{', '.join(SPLIT_NAMES)}, such as train=1-70000"
        )
    first, last = int(match[2]), int(match[3] or total)
    if not 1 <= first <= last:
        raise SplitError(f"--split {spec}: selects no rows; rows are numbered from 1 to {total:,}")
    if last > total:
        raise SplitError(f"--split {spec}: the files have only {total:,} rows")
    return RowRange(match[1], first, last)


def _kaggle_train_rows(total: int) -> int:
    """Rows of the first six of seven days that differ by at most a row, the longer ones first."""
    if total < 2 * _KAGGLE_DAYS:
        raise SplitError(
            f"--split kaggle: {total} rows are too few for seven days of which the last is halved"
        )
    return total - total // _KAGGLE_DAYS


def _check_terabyte_days(names: Sequence[str]) -> None:
    days = [int(match[1]) if (match := re.match(r"day_(\d+)(\D|$)", name)) else name for name in names]
    if days != list(range(_TERABYTE_DAYS)):
        raise SplitError(
            f"--split 1tb: needs the files day_0 to day_23 in this order, got {', '.join(names)}. "
            "For a part of the log give row ranges instead, such as train=1-1000000"
        )


def _with_last_day_halved(train_rows: int, total: int, last_day: LastDay) -> list[RowRange]:
    first_half = (total - train_rows + 1) // 2
    if total - train_rows < 2:
        raise SplitError(f"--split: the last day has {total - train_rows} rows and can't be halved")
    names = ("val", "test") if last_day is LastDay.VAL_FIRST else ("test", "val")
    middle = train_rows + first_half
    return [
        RowRange("train", 1, train_rows),
        RowRange(names[0], train_rows + 1, middle),
        RowRange(names[1], middle + 1, total),
    ]
