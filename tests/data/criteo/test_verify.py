"""Expected beside found, on small logs whose published sizes are replaced."""

import gzip
from pathlib import Path

import pytest

from recsys_tpu.data.criteo import verify
from recsys_tpu.data.criteo.__main__ import main
from recsys_tpu.data.criteo.published import PUBLISHED_LOGS, PublishedLog, mlperf_checksums
from tests.data.criteo.reference import random_lines


def test_published_rows_add_up_to_the_protocol() -> None:
    terabyte, kaggle = PUBLISHED_LOGS["1tb"], PUBLISHED_LOGS["kaggle"]
    assert list(terabyte.rows) == [f"day_{day}" for day in range(24)]
    assert terabyte.splits == {"train": 4_195_197_692, "first half": 89_137_319, "second half": 89_137_318}
    assert sum(kaggle.splits.values()) == sum(kaggle.rows.values()) == 45_840_617
    checksums = mlperf_checksums()
    assert len(checksums) == 96
    assert all(len(digest) == 32 for digest in checksums.values())


@pytest.fixture
def small_1tb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """24 days of 3 to 26 rows, gzipped and preprocessed with --split 1tb."""
    rows = {f"day_{day}": 3 + day for day in range(24)}
    for name, count in rows.items():
        lines = random_lines(count, seed=count)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"".join(line + b"\n" for line in lines)))
    published = PublishedLog(
        rows, {"train": sum(rows.values()) - 26, "first half": 13, "second half": 13}, (0, 1)
    )
    monkeypatch.setitem(verify.PUBLISHED_LOGS, "1tb", published)
    return tmp_path


def preprocess(folder: Path, *options: str) -> Path:
    output = folder / "out"
    command = ["preprocess", "--input", str(folder / "day_*.gz"), "--output", str(output), "--jobs", "1"]
    command += ["--recipe", "vocabulary", "--min-count", "1", "--fit-on", "all", "--num-embeddings", "mlperf"]
    assert main([*command, "--split", "1tb", *options]) == 0
    return output


@pytest.mark.parametrize("half", ["val-first", "test-first"])
def test_a_whole_log_agrees_with_what_is_published(
    half: str, small_1tb: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = preprocess(small_1tb, "--last-day", half)
    assert main(["verify", str(output), "--protocol", "1tb"]) == 0
    found = capsys.readouterr().err
    assert "everything agrees" in found
    assert ("val" if half == "val-first" else "test") + " (first half of the last day)" in found


def test_a_truncated_day_and_a_missing_one_do_not(
    small_1tb: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = preprocess(small_1tb)
    monkeypatch.setitem(verify.PUBLISHED_LOGS["1tb"].rows, "day_4", 8)
    monkeypatch.setitem(verify.PUBLISHED_LOGS["1tb"].rows, "day_24", 1)
    assert main(["verify", str(output), "--protocol", "1tb"]) == 1
    lines = capsys.readouterr().err.splitlines()
    wrong = [line for line in lines if "NO" in line]
    assert [[cell.strip() for cell in line.split("│")[1:4]] for line in wrong] == [
        ["rows of day_4", "8", "7"],
        ["rows of day_24", "1", "missing"],
    ]


def test_mlperf_files_are_checked_by_md5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path), "--protocol", "mlperf-files"]) == 1
    assert "has none of the files" in capsys.readouterr().err
    (tmp_path / "day_3_labels.npy").write_bytes(b"other")
    (check,) = verify.check_mlperf_files(tmp_path)
    assert check.found == "795f3202b17cb6bc3d4b771d8c6c9eaf"  # md5sum of "other"
    assert (check.expected, check.ok) == ("69caadf4d219f18b83f3591fe76f17c7", False)
    assert main(["verify", str(tmp_path), "--protocol", "mlperf-files"]) == 1


def test_an_estimate_writes_nothing_and_is_near_what_the_run_takes(
    small_1tb: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recsys_tpu.data.criteo.estimate import estimate
    from recsys_tpu.data.criteo.recipe import Recipe, Vocabulary

    for day in range(24):  # longer days: the output has a fixed part for each file
        lines = random_lines(400, seed=day)
        (small_1tb / f"day_{day}.gz").write_bytes(gzip.compress(b"".join(line + b"\n" for line in lines)))
    found = estimate([str(small_1tb / "day_*.gz")], Recipe(Vocabulary(1)), jobs=30)
    assert found.rows == pytest.approx(24 * 400, rel=0.05)
    assert found.workers == 24  # gzip files are read from their start by one process each
    preprocess(small_1tb, "--estimate")
    assert "Nothing was written" in capsys.readouterr().err
    assert not (small_1tb / "out").exists()
    output = preprocess(small_1tb)
    size = sum(path.stat().st_size for path in output.glob("*/part-*.parquet"))
    assert found.output_bytes == pytest.approx(size, rel=0.5)
