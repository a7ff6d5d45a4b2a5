"""Bad Criteo logs by name: every case ends in an error that names the place, or in a documented result.

Public bug reports that a case stands for are in its name.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_tpu.data.criteo.__main__ import main as criteo
from recsys_tpu.data.criteo.parse import parse_block
from recsys_tpu.data.metadata import DatasetMetadata
from tests.data.criteo.reference import random_lines

LINES = random_lines(60, seed=5)


def _field(number: int, value: bytes, line: bytes = LINES[7]) -> bytes:
    fields = line.split(b"\t")
    fields[number] = value
    return b"\t".join(fields)


# a line that takes the place of line 8, and what the error says of it
BAD_LINES = {
    "39 columns": (LINES[7].rsplit(b"\t", 1)[0], "39 tab-separated fields.*--unlabeled"),
    "41 columns": (LINES[7] + b"\t", "41 tab-separated fields instead of 40"),
    "one column": (b"1", "1 tab-separated fields instead of 40"),
    "commas for tabs": (LINES[7].replace(b"\t", b","), "1 tab-separated fields"),
    "spaces for tabs": (LINES[7].replace(b"\t", b" "), "1 tab-separated fields"),
    "blank line inside": (b"", "blank line inside the file"),
    "label 2": (_field(0, b"2"), "label is '2', neither 0 nor 1"),
    "label empty": (_field(0, b""), "label is '', neither 0 nor 1"),
    "label 1.0": (_field(0, b"1.0"), r"label is '1\.0'"),
    "label -1": (_field(0, b"-1"), "label is '-1'"),
    "count 1.5": (_field(1, b"1.5"), r"I1 is '1\.5', not an integer"),
    "count 1e3": (_field(13, b"1e3"), "I13 is '1e3', not an integer"),
    "count nan": (_field(1, b"nan"), "I1 is 'nan', not an integer"),
    "count +1": (_field(1, b"+1"), r"I1 is '\+1', not an integer"),
    "count minus alone": (_field(1, b"-"), "I1 is '-', not an integer"),
    "count two minuses": (_field(1, b"--1"), "I1 is '--1', not an integer"),
    "count with space": (_field(1, b" 1"), "I1 is ' 1', not an integer"),
    "count of 17 digits": (_field(1, b"9" * 17), "I1 .*overflow"),
    "count of 40 digits": (_field(1, b"1" * 40), "I1 .*overflow"),
    "count in Arabic digits": (_field(1, "٣".encode()), "I1 is '٣', not an integer"),
    "category of 7 digits": (_field(14, b"1234567"), "C1 is '1234567', not 8 hexadecimal digits"),
    "category of 9 digits": (_field(14, b"123456789"), "C1 is '123456789', not 8 hexadecimal digits"),
    "category not hex": (_field(39, b"g2345678"), "C26 is 'g2345678', not 8 hexadecimal digits"),
    "category 0x": (_field(14, b"0x345678"), "C1 is '0x345678'"),
    "category NULL": (_field(14, b"NULL"), "C1 is 'NULL'"),
    "category signed": (_field(14, b"-1234567"), "C1 is '-1234567'"),
    "quoted field": (_field(14, b'"12345678"'), "C1 is '\"12345678\"'"),
    "NUL byte": (_field(14, b"1234\x005678"), "C1 is"),
    "not UTF-8": (_field(14, b"\xff\xfe34567"), "C1 is .*invalid UTF-8"),
    "byte order mark": (b"\xef\xbb\xbf" + LINES[7], "label is"),
}


def _preprocess(folder: Path, content: bytes, *options: str, recipe: str = "hashed") -> int:
    (folder / "day_0").write_bytes(content)
    ids = ["--num-embeddings", "100"] if recipe == "hashed" else ["--min-count", "2"]
    places = ["--input", str(folder / "day_0"), "--output", str(folder / "out")]
    return criteo(["preprocess", *places, "--jobs", "1", "--recipe", recipe, *ids, *options])


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line(case):
    bad, reason = BAD_LINES[case]
    text = b"\n".join([*LINES[:7], bad, *LINES[8:]]) + b"\n"
    parsed = parse_block(text, first_line=101, labelled=True)
    (row,) = parsed.bad
    assert row.line == 108 and row.raw == bad
    assert re.search(reason, row.reason), row.reason
    assert len(parsed.rows.labels) == len(LINES) - 1  # no neighbour is lost


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "the file has no rows"),
    "newlines only": (b"\n\n\n", "the file has no rows"),
    "no newline in 3 MB": (b"x" * 3_000_000, "no row ends within"),
    "truncated gzip": (gzip.compress(b"\n".join(LINES))[:-20], "truncated"),
    "corrupted gzip": (gzip.compress(b"\n".join(LINES))[:100] + b"\0" * 400, "damaged gzip"),
    "a zip file": (b"PK\x03\x04" + bytes(200) + b"\n", "fields instead of 40"),
    "a Parquet file": (b"PAR1" + bytes(50) + b"PAR1\n", "fields instead of 40"),
    "header": (b"label\tI1\n" + b"\n".join(LINES), "2 tab-separated fields"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(tmp_path, capsys, case):
    content, reason = BAD_FILES[case]
    assert _preprocess(tmp_path, content) == 1
    message = capsys.readouterr().err
    assert re.search(rf"error: {tmp_path}/day_0: line \d+.*{reason}", message), message
    assert not (tmp_path / "out" / "metadata.json").exists()


def _train(folder: Path) -> pa.Table:
    metadata = DatasetMetadata.load(folder / "out")
    return pa.concat_tables(pq.read_table(folder / "out" / f) for f in metadata.splits["train"].files)


def _all(field: int, value: bytes) -> bytes:
    return b"\n".join(_field(field, value, line) for line in LINES) + b"\n"


def test_dlrm_363_a_count_of_minus_3_is_clamped_to_a_finite_0(tmp_path):
    assert _preprocess(tmp_path, _all(1, b"-3")) == 0
    assert set(_train(tmp_path)["I1"].to_pylist()) == {0.0}


def test_dlrm_57_a_hash_over_2_31_gives_an_id_in_range(tmp_path):
    assert _preprocess(tmp_path, _all(14, b"97279dd8")) == 0
    assert set(_train(tmp_path)["C1"].to_pylist()) == {0x97279DD8 % 100}


def test_reczoo_37_an_empty_last_category_is_the_missing_id(tmp_path):
    assert _preprocess(tmp_path, _all(39, b"")) == 0
    assert set(_train(tmp_path)["C26"].to_pylist()) == {0}


@pytest.mark.parametrize("recipe", ["hashed", "vocabulary"])
@pytest.mark.parametrize("field", [5, 20])
def test_hugectr_386_a_column_that_is_missing_everywhere(tmp_path, recipe, field):
    split = ["--split", "train=1-60"]
    assert _preprocess(tmp_path, _all(field, b""), *split, recipe=recipe) == 0
    name = f"I{field}" if field < 14 else f"C{field - 13}"
    assert set(_train(tmp_path)[name].to_pylist()) == {0}


def test_deepctr_24_a_category_seen_only_in_test_is_id_1(tmp_path):
    lines = [_field(14, b"aaaaaaaa", line) for line in LINES[:50]]
    lines += [_field(14, b"bbbbbbbb", line) for line in LINES[50:]]
    split = ["--split", "train=1-50", "--split", "test=51-60"]
    assert _preprocess(tmp_path, b"\n".join(lines), *split, recipe="vocabulary") == 0
    metadata = DatasetMetadata.load(tmp_path / "out")
    (file,) = metadata.splits["test"].files
    assert set(pq.read_table(tmp_path / "out" / file)["C1"].to_pylist()) == {1}


def test_hugectr_386_a_split_of_no_rows(tmp_path, capsys):
    assert _preprocess(tmp_path, b"\n".join(LINES), "--split", "train=61-") == 1
    assert "--split train=61-: selects no rows" in capsys.readouterr().err
