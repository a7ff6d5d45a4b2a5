"""Malformed input: an error with file and line, or a counted and recorded reject.  Nothing vanishes."""

import gzip
import json
import re

import pytest

from recsys_tpu.data.criteo.__main__ import main
from recsys_tpu.data.metadata import DatasetMetadata
from tests.data.criteo.reference import (
    DENSE,
    SPARSE,
    assert_rows_equal,
    expected_hashed,
    random_lines,
    read_split,
)

GOOD = random_lines(400, seed=20)
HASHED = ["--recipe", "hashed", "--num-embeddings", "1000", "--jobs", "1"]


def changed(field: int, value: bytes) -> bytes:
    fields = GOOD[0].split(b"\t")
    return b"\t".join([*fields[:field], value, *fields[field + 1 :]])


BAD = {
    "too few columns": (b"\t".join(GOOD[0].split(b"\t")[:20]), "20 tab-separated fields instead of 40"),
    "too many columns": (GOOD[0] + b"\tx", "41 tab-separated fields instead of 40"),
    "non-hex category": (changed(14, b"notahash"), "C1 is 'notahash', not 8 hexadecimal digits"),
    "non-integer count": (changed(2, b"1e3"), "I2 is '1e3', not an integer"),
    "integer overflow": (changed(2, b"9" * 20), "I2 is '9{20}': integer overflow"),
    "label": (changed(0, b"3"), "label is '3', neither 0 nor 1"),
    "header": ("\t".join(["label", *DENSE, *SPARSE]).encode(), "header line"),
    "invalid UTF-8": (changed(14, b"\xff\xfe\xfd\xfc1234"), r"C1 is b'.*' \(invalid UTF-8\)"),
    "blank line": (b"", "blank line inside the file"),
}


def arguments(tmp_path, *options: str) -> list[str]:
    return ["preprocess", "--input", str(tmp_path / "day_*"), "--output", str(tmp_path / "out"), *options]


def run(tmp_path, capsys, *options: str) -> tuple[int, str]:
    status = main(arguments(tmp_path, *HASHED, *options))
    return status, capsys.readouterr().err


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_bad_row_is_an_error_with_file_and_line(tmp_path, capsys, case, zipped):
    bad, reason = BAD[case]
    line = 1 if case == "header" else 301
    lines = [*GOOD[: line - 1], bad, *GOOD[line - 1 :]]
    text = b"\n".join(lines) + b"\n"
    path = tmp_path / ("day_0.gz" if zipped else "day_0")
    path.write_bytes(gzip.compress(text) if zipped else text)
    status, message = run(tmp_path, capsys)
    assert status == 1
    assert re.search(rf"error: {re.escape(str(path))}: line {line}: {reason}.*--on-bad-row skip", message), (
        message
    )
    assert not (tmp_path / "out" / "metadata.json").exists()


def test_skipped_rows_are_counted_recorded_and_reported(tmp_path, capsys):
    lines, expected_rejects = [], []
    for number, (bad, _) in enumerate(BAD.values()):
        lines += GOOD[number * 10 : number * 10 + 10]
        lines.append(bad)
        expected_rejects.append((len(lines), bad))
    lines += GOOD[:50]
    (tmp_path / "day_0").write_bytes(b"\n".join(GOOD[:100]) + b"\n")
    (tmp_path / "day_1").write_bytes(b"\n".join(lines) + b"\n")
    options = ["--on-bad-row", "skip", "--max-bad", "9", "--row-group-rows", "16", "--rows-per-part", "32"]
    status, message = run(tmp_path, capsys, *options)
    assert status == 0, message
    good = GOOD[:100] + [line for line in lines if line not in {bad for bad, _ in BAD.values()}]
    output = tmp_path / "out"
    metadata = DatasetMetadata.load(output)
    assert_rows_equal(read_split(output, metadata.splits["train"].files), expected_hashed(good, [1000] * 26))
    source = metadata.source
    assert (source["rows_read"], source["rows_written"], source["rows_rejected"]) == (249, 240, 9)
    assert "249 rows read = 240 written + 9 rejected" in message
    assert "rejects.jsonl" in message
    rejects = [json.loads(line) for line in (output / "rejects.jsonl").read_text().splitlines()]
    assert [(item["file"], item["line"]) for item in rejects] == [
        ("day_1", line) for line, _ in expected_rejects
    ]
    for item, (_, bad), (_, reason) in zip(rejects, expected_rejects, BAD.values(), strict=True):
        assert re.match(reason, item["reason"])
        assert item["raw"] == bad.decode("utf-8", errors="backslashreplace")


def test_skipping_works_for_a_vocabulary_too(tmp_path, capsys):
    lines = [*GOOD[:50], BAD["label"][0], *GOOD[50:100]]
    (tmp_path / "day_0").write_bytes(b"\n".join(lines) + b"\n")
    recipe = ["--recipe", "vocabulary", "--min-count", "1", "--jobs", "1"]
    status = main(arguments(tmp_path, *recipe, "--on-bad-row", "skip", "--max-bad", "1"))
    assert status == 0, capsys.readouterr().err
    metadata = DatasetMetadata.load(tmp_path / "out")
    assert metadata.splits["train"].rows == 100
    assert metadata.source["rows_rejected"] == 1


@pytest.mark.parametrize("files", [1, 2])
def test_more_bad_rows_than_allowed_are_an_error(tmp_path, capsys, files):
    bad = [BAD["label"][0]] * (4 // files)
    for day in range(files):
        (tmp_path / f"day_{day}").write_bytes(b"\n".join([*GOOD[:50], *bad]) + b"\n")
    status, message = run(tmp_path, capsys, "--on-bad-row", "skip", "--max-bad", "3")
    assert status == 1
    assert re.search("more than --max-bad 3", message)
    # A larger allowance continues the same run.
    status, message = run(tmp_path, capsys, "--on-bad-row", "skip", "--max-bad", "4")
    assert status == 0, message
    assert DatasetMetadata.load(tmp_path / "out").source["rows_rejected"] == 4


def test_line_numbers_are_exact_far_into_a_file(tmp_path, capsys):
    short = b"\t".join([b"0", *[b""] * 39]) + b"\n"
    path = tmp_path / "day_0"
    path.write_bytes(short * 200_000 + b"oops\n" + short * 1000)
    status, message = run(tmp_path, capsys, "--row-group-rows", "10000", "--rows-per-part", "70000")
    assert status == 1
    assert "day_0: line 200001: 1 tab-separated fields" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"day_0: line 1: the file has no rows"),
        (gzip.compress(b"\n".join(GOOD))[:-100], r"day_0: line \d+: the gzip data ends too early"),
        (b"\0" * 3_000_000, r"day_0: line 1: no row ends within"),
    ],
)
def test_a_damaged_file_is_an_error_even_when_rows_may_be_skipped(tmp_path, capsys, content, message):
    (tmp_path / "day_0").write_bytes(content)
    status, error = run(tmp_path, capsys, "--on-bad-row", "skip", "--max-bad", "100000")
    assert status == 1
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on-bad-row", "skip"], "--on-bad-row skip and --max-bad N go together"),
        (["--max-bad", "3"], "--on-bad-row skip and --max-bad N go together"),
        (["--min-count", "3"], "--recipe hashed: give --num-embeddings"),
        (["--num-embeddings", "1,2"], "2 sizes for 26 features"),
        (["--num-embeddings", "0"], "C1 has 0 rows"),
        (["--num-embeddings", "many"], "must be a number, 26 of them with commas, or mlperf"),
        (["--rows-per-part", "70000"], "must be a multiple of --row-group-rows"),
        (["--recipe", "vocabulary"], "--recipe vocabulary: give --min-count"),
        (["--split", "1tb"], "needs the files day_0 to day_23"),
        (["--split", "train=1-500"], "the files have only 400 rows"),
    ],
)
def test_options_that_make_no_sense(tmp_path, capsys, options, message):
    (tmp_path / "day_0").write_bytes(b"\n".join(GOOD))
    status, error = run(tmp_path, capsys, *options)
    assert status == 1
    assert message in error


def test_a_missing_input_is_named(tmp_path, capsys):
    status, error = run(tmp_path, capsys)
    assert status == 1
    assert "day_*: no such file" in error
