import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.data.criteo.diagnose import diagnose
from recsys_tpu.data.criteo.parse import parse_block
from tests.data.criteo.reference import DENSE, SPARSE, parse_line, random_line, random_lines

integers = st.one_of(
    st.just(""),
    st.integers(-3, 20).map(str),
    st.integers(-(10**16) + 1, 10**16 - 1).map(str),
    st.sampled_from(["-0", "007", "99999999", "100000000", "-99999999", "2147483648", "9999999999999999"]),
)
hashes = st.one_of(
    st.just(""),
    st.integers(0, 2**32 - 1).map(lambda value: f"{value:08x}"),
    st.sampled_from(["97279dd8", "ffffffff", "80000000", "00000000", "ABCDEF09", "aBcDeF90"]),
)
valid_fields = st.tuples(
    st.sampled_from(["0", "1"]), st.tuples(*[integers] * len(DENSE)), st.tuples(*[hashes] * len(SPARSE))
).map(lambda row: [row[0], *row[1], *row[2]])


def assert_parsed(lines, parsed, *, labelled=True):
    """The block's rows equal the plain reading of `lines`."""
    rows = parsed.rows
    assert rows.labels.shape == (len(lines),)
    for index, line in enumerate(lines):
        label, expected_integers, expected_hashes = parse_line(line, labelled=labelled)
        assert rows.labels[index] == label
        assert rows.counts[:, index].tolist() == [value or 0 for value in expected_integers]
        assert rows.counts_missing[:, index].tolist() == [value is None for value in expected_integers]
        assert rows.hashes[:, index].tolist() == [value or 0 for value in expected_hashes]
        assert rows.hashes_missing[:, index].tolist() == [value is None for value in expected_hashes]


@settings(deadline=None)
@given(st.lists(valid_fields, min_size=1, max_size=5), st.sampled_from([b"\n", b"\r\n"]))
def test_valid_rows_equal_the_plain_reading(rows, line_end):
    lines = ["\t".join(fields).encode() for fields in rows]
    parsed = parse_block(b"".join(line + line_end for line in lines), first_line=1, labelled=True)
    assert not parsed.bad
    assert parsed.crlf_lines == (len(lines) if line_end == b"\r\n" else 0)
    assert_parsed(lines, parsed)


@pytest.mark.parametrize("labelled", [True, False])
def test_many_random_rows(labelled):
    lines = random_lines(2_000, seed=1, labelled=labelled)
    parsed = parse_block(b"\n".join(lines) + b"\n", first_line=1, labelled=labelled)
    assert_parsed(lines, parsed, labelled=labelled)


def is_valid(line: bytes) -> bool:
    """Validity by another road than the package's: Python's own number parsers plus the format's limits."""
    fields = line.split(b"\t")
    if len(fields) != 40 or fields[0] not in (b"0", b"1"):
        return False
    for field in fields[1:14]:
        digits = field[1:] if field[:1] == b"-" else field
        if field and not (1 <= len(digits) <= 16 and all(48 <= byte <= 57 for byte in digits)):
            return False
    return all(
        not field or (len(field) == 8 and all(chr(byte) in "0123456789abcdefABCDEF" for byte in field))
        for field in fields[14:]
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_row_is_refused_exactly_when_it_is_invalid(data):
    rng = random.Random(data.draw(st.integers(0, 1000)))
    lines = [random_line(rng) for _ in range(3)]
    victim = bytearray(lines[1])
    for _ in range(data.draw(st.integers(1, 2))):
        position = data.draw(st.integers(0, len(victim) - 1))
        byte = data.draw(
            st.one_of(st.integers(0, 255), st.sampled_from(b"\t-+ 0aAgG.\r")).filter(lambda b: b != 10)
        )
        action = data.draw(st.sampled_from(["replace", "insert", "delete"]))
        if action == "replace":
            victim[position] = byte
        elif action == "insert":
            victim.insert(position, byte)
        elif len(victim) > 1:
            del victim[position]
    damaged = bytes(victim)
    content = damaged[:-1] if damaged.endswith(b"\r") else damaged
    parsed = parse_block(b"\n".join([lines[0], damaged, lines[2]]) + b"\n", first_line=10, labelled=True)
    if is_valid(content):
        assert not parsed.bad
        assert_parsed([lines[0], content, lines[2]], parsed)
    else:
        assert [(row.line, row.raw) for row in parsed.bad] == [(11, content)]
        assert_parsed([lines[0], lines[2]], parsed)


GOOD = random_line(random.Random(7)).split(b"\t")


def changed(field: int, value: bytes) -> bytes:
    return b"\t".join([*GOOD[:field], value, *GOOD[field + 1 :]])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\t".join(GOOD[:-1]), "39 tab-separated fields instead of 40.*--unlabeled"),
        (b"\t".join([*GOOD, b""]), "41 tab-separated fields instead of 40"),
        (b",".join(GOOD), "1 tab-separated fields instead of 40"),
        (b"", "blank line inside the file"),
        (b"\t".join([b"label", *(name.encode() for name in DENSE + SPARSE)]), "header line"),
        (changed(0, b"2"), "label is '2', neither 0 nor 1"),
        (changed(0, b""), "label is '', neither 0 nor 1"),
        (changed(0, b"-1"), "label is '-1', neither 0 nor 1"),
        (changed(3, b"1.5"), "I3 is '1.5', not an integer"),
        (changed(3, b"-"), "I3 is '-', not an integer"),
        (changed(3, b"+5"), r"I3 is '\+5', not an integer"),
        (changed(13, b" 5"), "I13 is ' 5', not an integer"),
        (changed(1, b"12345678901234567"), "I1 is '12345678901234567': integer overflow"),
        (changed(1, b"-99999999999999999999999"), "I1 is .*: integer overflow"),
        (changed(14, b"68fd1e6g"), "C1 is '68fd1e6g', not 8 hexadecimal digits"),
        (changed(14, b"68fd1e6"), "C1 is '68fd1e6', not 8"),
        (changed(39, b"068fd1e64"), "C26 is '068fd1e64', not 8"),
        (changed(20, b"-8fd1e64"), "C7 is '-8fd1e64', not 8"),
        (changed(20, b"68fd\xff\xfe64"), r"C7 is b'68fd\\xff\\xfe64' \(invalid UTF-8\), not 8"),
        (changed(39, b"68fd1e64\r\r"), "C26 is .*, not 8"),
        (changed(20, b"x" * 1000), r"C7 is 'x{40}'\.\.\., not 8"),
    ],
)
def test_the_reason_names_the_feature(line, reason):
    parsed = parse_block(b"\t".join(GOOD) + b"\n" + line + b"\n", first_line=45_840_616, labelled=True)
    assert len(parsed.rows.labels) == 1
    (row,) = parsed.bad
    assert row.line == 45_840_617
    assert re.match(reason, row.reason), row.reason


def test_a_labelled_log_read_as_unlabelled_says_so():
    assert "leave --unlabeled out" in diagnose(b"\t".join(GOOD), labelled=False)


def test_empty_c26_and_a_missing_column():
    lines = [
        b"\t".join([*line.split(b"\t")[:13], b"", *line.split(b"\t")[14:39], b""])
        for line in random_lines(50, 3)
    ]
    parsed = parse_block(b"\n".join(lines) + b"\n", first_line=1, labelled=True)
    assert not parsed.bad
    assert parsed.rows.counts_missing[12].all()
    assert parsed.rows.hashes_missing[25].all()
    assert_parsed(lines, parsed)
