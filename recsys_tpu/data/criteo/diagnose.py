"""Why one line is not a valid Criteo row.  Used only for lines that the vectorised parser refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from recsys_tpu.data.criteo.schema import DENSE_FEATURES, field_names

MAX_DIGITS = 16  # every integer of 16 digits fits int64, so parsing can't overflow
_SHOWN_BYTES = 40
_INTEGER = re.compile(rb"-?[0-9]+")
_HASH = re.compile(rb"[0-9a-fA-F]{8}")


@dataclass(frozen=True)
class BadRow:
    """A line that is not a valid row: its 1-based number in its file, the reason and its bytes."""

    line: int
    reason: str
    raw: bytes


def diagnose(line: bytes, *, labelled: bool) -> str:
    """Say what is wrong with `line` (without its line end) and what to do about it.

    Raises:
        AssertionError: the line is valid, so the vectorised parser refused it wrongly.
    """
    names = field_names(labelled)
    fields = line.split(b"\t")
    if not line:
        return "blank line inside the file; only the end of a file may have blank lines"
    if len(fields) != len(names):
        return _wrong_field_count(len(fields), len(names), labelled)
    if fields[0].lower() in (b"label", b"click", b"i1"):
        return f"header line ({_show(line)}); Criteo logs have none, remove it (tail -n +2)"
    for name, field in zip(names, fields, strict=True):
        reason = _field_problem(name, field)
        if reason:
            return f"{name} {reason}"
    raise AssertionError(f"the parser refused a valid line: {line!r}")


def _wrong_field_count(found: int, expected: int, labelled: bool) -> str:
    reason = f"{found} tab-separated fields instead of {expected}"
    if labelled and found == expected - 1:
        return f"{reason}; for a log without labels (Kaggle's test.txt) give --unlabeled"
    if not labelled and found == expected + 1:
        return f"{reason}; the log seems to have labels, leave --unlabeled out"
    return reason


def _field_problem(name: str, field: bytes) -> str | None:
    if name == "label":
        return None if field in (b"0", b"1") else f"is {_show(field)}, neither 0 nor 1"
    if not field:
        return None
    if name in DENSE_FEATURES:
        if not _INTEGER.fullmatch(field):
            return f"is {_show(field)}, not an integer"
        if len(field.lstrip(b"-")) > MAX_DIGITS:
            return f"is {_show(field)}: integer overflow, more than {MAX_DIGITS} digits"
        return None
    return None if _HASH.fullmatch(field) else f"is {_show(field)}, not 8 hexadecimal digits"


def _show(field: bytes) -> str:
    shown = field if len(field) <= _SHOWN_BYTES else field[:_SHOWN_BYTES]
    ellipsis = "" if len(field) <= _SHOWN_BYTES else "..."
    try:
        return repr(shown.decode("utf-8")) + ellipsis
    except UnicodeDecodeError:
        return f"{shown!r}{ellipsis} (invalid UTF-8)"
