"""Source files: find them, fingerprint them and stream their lines, plain or gzip, with exact line numbers.

Rules for line ends: LF and CRLF are accepted (CRLF lines are counted by the parser); the last line may
lack its line end; blank lines at the very end of a file are accepted and counted here.  A blank line
elsewhere is a bad row.
"""

from __future__ import annotations

import glob
import hashlib
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from recsys_tpu.errors import UserError

READ_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20
INDEX_LINES = 65_536  # one stored byte offset per so many lines of a plain file
_GZIP_MAGIC = b"\x1f\x8b"
_NEWLINE = b"\n"


class SourceError(UserError, ValueError):
    """A source file can't be read as a Criteo log; the message names the file, the line and what to do."""


@dataclass(frozen=True)
class SourceFile:
    """A scanned file: what identifies it and how many lines it has.

    `offsets[k]` is the byte offset of line ``1 + k * INDEX_LINES`` of a plain file; None for gzip,
    which can only be read from its start.
    """

    path: str
    bytes: int
    mtime_ns: int
    sha256: str
    lines: int
    blank_lines_at_end: int
    offsets: list[int] | None = field(repr=False)

    @property
    def name(self) -> str:
        return Path(self.path).name


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Files that match `patterns` (paths or globs), numbers in names in numeric order: day_2 before day_10.

    Raises:
        SourceError: a pattern matches nothing, or a file is named twice.
    """
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if Path(pattern).is_file() else glob.glob(pattern)  # noqa: PTH207 (absolute patterns)
        matches = [path for path in found if Path(path).is_file()]
        if not matches:
            raise SourceError(
                f"{pattern}: no such file; quote patterns such as 'day_*.gz' and check the path"
            )
        paths.extend(sorted(matches, key=_numeric_order))
    repeated = sorted({path for path in paths if paths.count(path) > 1})
    if repeated:
        raise SourceError(f"{repeated[0]}: given twice; its rows would count twice")
    return paths


def _numeric_order(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def scan(path: str, on_bytes: Callable[[int], None] = lambda count: None) -> SourceFile:
    """Read a whole file once: count its lines, index them and fingerprint its bytes.

    Raises:
        SourceError: the file is empty, truncated or no text.
    """
    status = Path(path).stat()
    digest = hashlib.sha256()

    def on_raw(raw: bytes) -> None:
        digest.update(raw)
        on_bytes(len(raw))

    offsets: list[int] = []
    lines = offset = 0
    with Path(path).open("rb") as file:
        compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        stream = LineStream(path, file, compressed=compressed, on_raw=on_raw)
        for block in stream.blocks():
            count = block.count(_NEWLINE)
            while len(offsets) * INDEX_LINES < lines + count:
                offsets.append(offset + _nth_line_start(block, len(offsets) * INDEX_LINES - lines))
            lines += count
            offset += len(block)
    if not lines:
        raise SourceError(f"{path}: line 1: the file has no rows; download it again or leave it out")
    return SourceFile(
        path=path,
        bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        sha256=digest.hexdigest(),
        lines=lines,
        blank_lines_at_end=stream.blank_lines_at_end,
        offsets=None if compressed else offsets,
    )


def _nth_line_start(block: bytes, n: int) -> int:
    """Byte offset in `block` of its line `n`, counted from 0."""
    newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    return int(newlines[n - 1]) + 1 if n else 0


class _GzipDamage(Exception):
    """What is wrong with compressed data, before file and line are known."""


class LineStream:
    """The lines of an open file, in blocks of whole lines, in order.

    Args:
        path: for messages.
        file: open in binary mode, at the first byte of line `line`; gzip must be at its start.
        compressed: whether it is gzip.
        line: number of the first line, from 1.
        on_raw: called with every piece read, before decompression.
        read_bytes: text bytes per block, about.
    """

    def __init__(
        self,
        path: str,
        file: BinaryIO,
        *,
        compressed: bool,
        line: int = 1,
        on_raw: Callable[[bytes], None] = lambda raw: None,
        read_bytes: int = READ_BYTES,
    ) -> None:
        self.blank_lines_at_end = 0
        self._path = path
        self._file = file
        self._line = line  # number of the next line
        self._on_raw = on_raw
        self._read_bytes = read_bytes
        self._rest = b""  # whole lines read ahead by `read`
        self._compressed = compressed
        self._source = self.blocks()

    def close(self) -> None:
        """Drop what was read ahead, which would stay until the garbage collector finds the cycle."""
        self._source.close()
        self._rest = b""

    def read(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Blocks of the lines `first` to `last` (inclusive), each with the number of its first line.

        Ranges must be asked for in ascending order: the stream only moves forwards.

        Raises:
            SourceError: the file ends before line `last`, so it changed since it was scanned.
        """
        assert first >= self._line
        while self._line <= last:
            block = self._rest or next(self._source, b"")
            if not block:
                raise SourceError(
                    f"{self._path}: line {self._line - 1} is the last, but {last} were counted before: the "
                    "file changed; preprocess it into a new directory"
                )
            count = block.count(_NEWLINE)
            skipped = min(count, max(0, first - self._line))
            wanted = min(count, last + 1 - self._line)
            start, stop = _nth_line_start(block, skipped), len(block)
            if skipped == count:
                start = stop
            elif wanted < count:
                stop = _nth_line_start(block, wanted)
            self._rest = block[stop:]
            if start < stop:
                yield self._line + skipped, block[start:stop]
            self._line += wanted

    def blocks(self) -> Generator[bytes, None, None]:
        """Blocks of whole lines, each ended by a newline, without the blank lines at the end of the file."""
        rest, line = b"", self._line
        try:
            for text in self._text():
                rest += text
                content = rest[: rest.rfind(_NEWLINE) + 1].rstrip(b"\r\n")
                if content:
                    stop = rest.index(_NEWLINE, len(content)) + 1
                    block, rest = rest[:stop], rest[stop:]
                    line += block.count(_NEWLINE)
                    yield block
                elif len(rest) > MAX_LINE_BYTES + self._read_bytes:
                    raise SourceError(
                        f"{self._path}: line {line}: no row ends within {MAX_LINE_BYTES:,} bytes, so this is "
                        "no Criteo log"
                    )
        except _GzipDamage as damage:
            raise SourceError(
                f"{self._path}: line {line + rest.count(_NEWLINE)}: {damage}; download the file again"
            ) from None
        content = rest.rstrip(b"\r\n")
        if content:
            stop = rest.find(_NEWLINE, len(content)) + 1 or len(rest)
            block, rest = rest[:stop], rest[stop:]
            yield block if block.endswith(_NEWLINE) else block + _NEWLINE
        self.blank_lines_at_end = len(rest.split(_NEWLINE)) - (rest[-1:] in (b"", _NEWLINE))

    def _text(self) -> Iterator[bytes]:
        if self._compressed:
            yield from self._decompressed()
        else:
            while text := self._read_raw():
                yield text

    def _decompressed(self) -> Iterator[bytes]:
        """Text of all members of a gzip file."""
        member = None
        try:
            while raw := self._read_raw():
                while raw:
                    if member is None:
                        raw = raw.lstrip(b"\0")  # members may be followed by zero padding
                        member = zlib.decompressobj(wbits=31) if raw else None
                    if member is not None:
                        yield member.decompress(raw, self._read_bytes)
                        raw = member.unused_data if member.eof else member.unconsumed_tail
                        member = None if member.eof else member
            if member is not None:
                yield member.flush()
        except zlib.error as error:
            raise _GzipDamage(f"damaged gzip data ({error})") from None
        if member is not None and not member.eof:
            raise _GzipDamage("the gzip data ends too early, the file is truncated")

    def _read_raw(self) -> bytes:
        raw = self._file.read(self._read_bytes)
        if raw:
            self._on_raw(raw)
        return raw
