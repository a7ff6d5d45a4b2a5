"""Cut the source files into parts: one output file each, in the order in which a split is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recsys_tpu.data.criteo.source import SourceFile
from recsys_tpu.data.criteo.splits import RowRange


@dataclass(frozen=True)
class Part:
    """Lines `first_line` to `last_line` (inclusive, from 1) of source file number `source`."""

    split: str
    number: int
    source: int
    first_line: int
    last_line: int

    @property
    def lines(self) -> int:
        return self.last_line - self.first_line + 1

    @property
    def file(self) -> str:
        """Path of the output, relative to the output directory."""
        return f"{self.split}/part-{self.number:05d}.parquet"

    @property
    def key(self) -> str:
        return f"{self.split}-{self.number:05d}"


def plan_parts(sources: Sequence[SourceFile], ranges: Sequence[RowRange], rows_per_part: int) -> list[Part]:
    """All parts, in order, of at most `rows_per_part` lines; none spans two files or two splits."""
    parts: list[Part] = []
    numbers = {item.split: 0 for item in ranges}
    row = 1  # of the first line of this file, over all files
    for index, source in enumerate(sources):
        for item in ranges:
            first = max(item.first, row) - row + 1
            last = min(item.last, row + source.lines - 1) - row + 1
            for start in range(first, last + 1, rows_per_part):
                stop = min(start + rows_per_part - 1, last)
                parts.append(Part(item.split, numbers[item.split], index, start, stop))
                numbers[item.split] += 1
        row += source.lines
    assert sum(part.lines for part in parts) == sum(item.rows for item in ranges)
    return parts


def group_parts(parts: Sequence[Part], sources: Sequence[SourceFile]) -> list[list[Part]]:
    """Parts that one worker takes together: one of a plain file, all of a gzip file (it has no seek)."""
    groups: list[list[Part]] = []
    for part in parts:
        sequential = sources[part.source].offsets is None
        if sequential and groups and groups[-1][0].source == part.source:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups
