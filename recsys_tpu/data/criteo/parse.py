"""Parse a block of Criteo lines into arrays, without a loop over rows.

Fields are found from the positions of the separators.  A field's last 8 bytes are then read as one
64-bit word whose bytes hold one digit each, and the digits of a word are combined in three steps
(pairs, fours, eights), for all cells of a block at once.  Every byte of every field is checked: what
is not exactly a valid row becomes a `BadRow`.

Shape legend: ``B`` rows of the block, ``I`` = 13 dense features, ``C`` = 26 sparse features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys_tpu.data.criteo.diagnose import MAX_DIGITS, BadRow, diagnose
from recsys_tpu.data.criteo.schema import DENSE_FEATURES, SPARSE_FEATURES, field_names

_TAB, _NEWLINE, _RETURN, _MINUS = b"\t\n\r-"
_WORD_BYTES = 8

# Value of each byte as a hexadecimal digit; 0x80 (top bit) where it is none.
_DIGIT = np.full(256, 0x80, np.uint8)
for _value, _character in enumerate(b"0123456789abcdef"):
    _DIGIT[_character] = _value
for _value, _character in enumerate(b"ABCDEF", start=10):
    _DIGIT[_character] = _value

# Words are little-endian: a field's last character is the top byte.  Keeps the last n characters.
_KEEP_LAST = np.array([0] + [(1 << 64) - (1 << (64 - 8 * n)) for n in range(1, 9)], np.uint64)
_HIGH_NIBBLES = np.uint64(0xF0F0F0F0F0F0F0F0)
_SIXES = np.uint64(0x0606060606060606)
_BYTE_PAIRS = np.uint64(0x00FF00FF00FF00FF)
_BYTE_QUADS = np.uint64(0x0000FFFF0000FFFF)
_LOW_HALF = np.uint64(0x00000000FFFFFFFF)


@dataclass(frozen=True)
class Rows:
    """Valid rows of a block, feature-major."""

    labels: NDArray[np.int8]  # [B]; -1 where the log has no labels
    counts: NDArray[np.int64]  # [I, B]; 0 where missing
    counts_missing: NDArray[np.bool_]  # [I, B]
    hashes: NDArray[np.uint32]  # [C, B]; 0 where missing
    hashes_missing: NDArray[np.bool_]  # [C, B]


@dataclass(frozen=True)
class ParsedBlock:
    """Every line of a block: `rows` and `bad` together, and how many lines ended in CRLF."""

    rows: Rows
    bad: list[BadRow]
    crlf_lines: int


def parse_block(text: bytes, *, first_line: int, labelled: bool) -> ParsedBlock:
    """Parse complete lines.

    Args:
        text: lines, each ended by a newline.  A carriage return before it is accepted and counted.
        first_line: number of the first line in its file, for `BadRow.line`.
        labelled: whether a line has 40 fields, the first the label, or 39.
    """
    assert text.endswith(b"\n")
    # Words reach up to two word lengths in front of a field's end, hence the padding.
    padded = np.frombuffer(bytes(2 * _WORD_BYTES) + text, np.uint8)
    num_fields = len(field_names(labelled))

    separators = np.flatnonzero((padded - _TAB) < 2)  # tab or newline: the only bytes 9 and 10
    newlines = np.flatnonzero(padded[separators] == _NEWLINE)
    line_starts = np.append(2 * _WORD_BYTES, separators[newlines[:-1]] + 1)
    line_ends = separators[newlines]
    complete = np.diff(newlines, prepend=-1) == num_fields

    lines = np.flatnonzero(complete)
    if len(lines) == len(complete):
        ends = separators.reshape(-1, num_fields)
    else:
        ends = separators[newlines[lines, None] - np.arange(num_fields - 1, -1, -1)]
    ends = np.ascontiguousarray(ends.T)  # [fields, B]
    starts = np.concatenate([line_starts[None, lines], ends[:-1] + 1])

    crlf = (padded[line_ends - 1] == _RETURN) & (line_ends > line_starts)
    ends[-1] -= crlf[lines]

    valid = np.ones(len(lines), bool)
    labels = np.full(len(lines), -1, np.int8)
    if labelled:
        labels = (padded[starts[0]] - ord("0")).astype(np.int8)
        valid &= (ends[0] - starts[0] == 1) & (labels >> 1 == 0)
        starts, ends = starts[1:], ends[1:]

    digits = _DIGIT[padded]
    num_dense = len(DENSE_FEATURES)
    negative = padded[starts[:num_dense]] == _MINUS
    counts, counts_missing, counts_valid = _parse_integers(
        digits, starts[:num_dense], ends[:num_dense], negative
    )
    hashes, hashes_missing, hashes_valid = _parse_hashes(digits, starts[num_dense:], ends[num_dense:])
    valid &= counts_valid.all(axis=0) & hashes_valid.all(axis=0)
    assert len(hashes) == len(SPARSE_FEATURES)

    rows = Rows(labels, counts, counts_missing, hashes, hashes_missing)
    bad_lines = np.flatnonzero(~complete)
    if not valid.all():
        bad_lines = np.sort(np.concatenate([bad_lines, lines[~valid]]))
        rows = Rows(
            labels[valid],
            counts[:, valid],
            counts_missing[:, valid],
            hashes[:, valid],
            hashes_missing[:, valid],
        )
    bad = []
    for line in bad_lines.tolist():
        raw = padded[line_starts[line] : line_ends[line] - crlf[line]].tobytes()
        bad.append(BadRow(first_line + line, diagnose(raw, labelled=labelled), raw))
    return ParsedBlock(rows, bad, crlf_lines=int(crlf.sum()))


def _words(digits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """View at whose position p lie, as one word, the 8 bytes before `digits[p]` (p >= 8)."""
    shape = (len(digits) - _WORD_BYTES + 1,)
    overlapping: NDArray[np.uint64] = np.ndarray(shape, "<u8", digits, strides=(1,))
    return overlapping


def _parse_hashes(
    digits: NDArray[np.uint8], starts: NDArray[np.intp], ends: NDArray[np.intp]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_], NDArray[np.bool_]]:
    """Values, missing and valid of fields that hold 8 hexadecimal digits or nothing."""
    lengths = ends - starts
    missing = lengths == 0
    word = _words(digits)[ends - _WORD_BYTES]
    valid = missing | ((lengths == _WORD_BYTES) & (word & _HIGH_NIBBLES == 0))
    word = ((word << np.uint64(4)) | (word >> np.uint64(8))) & _BYTE_PAIRS
    word = ((word << np.uint64(8)) | (word >> np.uint64(16))) & _BYTE_QUADS
    word = ((word << np.uint64(16)) | (word >> np.uint64(32))) & _LOW_HALF
    word[missing] = 0
    return word.astype(np.uint32), missing, valid


def _parse_integers(
    digits: NDArray[np.uint8],
    starts: NDArray[np.intp],
    ends: NDArray[np.intp],
    negative: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Values, missing and valid of fields that hold an integer of up to `MAX_DIGITS` digits or nothing."""
    lengths = ends - starts
    missing = lengths == 0
    num_digits = lengths - (negative & ~missing)
    words = _words(digits)
    values, valid = _parse_decimal(words[ends - _WORD_BYTES], np.minimum(num_digits, _WORD_BYTES))
    valid &= (num_digits > 0) & (num_digits <= MAX_DIGITS)

    long = np.nonzero((num_digits > _WORD_BYTES) & valid)
    if len(long[0]):
        upper, upper_valid = _parse_decimal(
            words[ends[long] - 2 * _WORD_BYTES], num_digits[long] - _WORD_BYTES
        )
        values[long] += upper * 10**_WORD_BYTES
        valid[long] &= upper_valid
    np.negative(values, where=negative, out=values)
    values[missing] = 0
    return values, missing, valid | missing


def _parse_decimal(
    word: NDArray[np.uint64], num_digits: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Values of the last `num_digits` (0 to 8) characters of each word, whether all are decimal."""
    word = word & _KEEP_LAST[num_digits]
    valid = (word | (word + _SIXES)) & _HIGH_NIBBLES == 0  # a digit over 9, plus 6, reaches the high nibble
    word = (word * np.uint64(10) + (word >> np.uint64(8))) & _BYTE_PAIRS
    word = (word * np.uint64(100) + (word >> np.uint64(16))) & _BYTE_QUADS
    word = (word * np.uint64(10_000) + (word >> np.uint64(32))) & _LOW_HALF
    return word.astype(np.int64), valid
