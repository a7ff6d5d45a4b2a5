"""The content of the output, against a plain reading of the same rows."""

import gzip
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recsys_tpu.data.criteo.preprocess import preprocess
from recsys_tpu.data.criteo.recipe import Hashed, Recipe, Vocabulary
from recsys_tpu.data.metadata import DatasetError, DatasetMetadata
from tests.data.criteo.reference import (
    SPARSE,
    assert_rows_equal,
    criteo_sample,
    expected_hashed,
    expected_vocabulary,
    random_lines,
    read_split,
)

SIZES = [3, 2**31 - 1, *range(10, 34)]


def write_log(path: Path, lines: list[bytes], line_end: bytes = b"\n") -> Path:
    text = b"".join(line + line_end for line in lines)
    path.write_bytes(gzip.compress(text, compresslevel=1) if path.suffix == ".gz" else text)
    return path


def run(tmp_path, files, recipe, *, name="out", jobs=1, **options) -> tuple[Path, DatasetMetadata]:
    output = tmp_path / name
    metadata = preprocess([str(file) for file in files], output, recipe, jobs=jobs, **options)
    assert DatasetMetadata.load(output) == metadata
    return output, metadata


def all_files(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_hashed_rows_equal_the_plain_reading(tmp_path):
    lines = random_lines(1000, seed=2)
    files = [write_log(tmp_path / "a.txt", lines[:390]), write_log(tmp_path / "b.gz", lines[390:])]
    recipe = Recipe(
        Hashed(tuple(SIZES)),
        splits=("train=1-700", "val=701-800", "test=801-"),
        row_group_rows=50,
        rows_per_part=100,
    )
    output, metadata = run(tmp_path, files, recipe)
    for name, rows in (("train", lines[:700]), ("val", lines[700:800]), ("test", lines[800:])):
        split = metadata.splits[name]
        table = read_split(output, split.files)
        assert_rows_equal(table, expected_hashed(rows, SIZES))
        assert split.rows == len(rows)
        assert split.positives == sum(line.startswith(b"1") for line in rows)
    assert metadata.num_embeddings == dict(zip(SPARSE, SIZES, strict=True))
    assert metadata.source["rows_read"] == metadata.source["rows_written"] == 1000
    assert sorted(path.name for path in output.iterdir()) == ["metadata.json", "test", "train", "val"]


def test_row_groups_have_one_size_and_the_contract_types(tmp_path):
    file = write_log(tmp_path / "a.txt", random_lines(250, seed=3))
    output, metadata = run(tmp_path, [file], Recipe(Hashed((10,) * 26), row_group_rows=40, rows_per_part=120))
    assert metadata.row_group_rows == 40
    assert metadata.splits["train"].files == [f"train/part-0000{part}.parquet" for part in range(3)]
    groups = []
    for name in metadata.splits["train"].files:
        parquet = pq.ParquetFile(output / name)
        types = [str(kind) for kind in parquet.schema_arrow.types]
        assert types == ["int8", *["float"] * 13, *["int32"] * 26]
        groups.append([parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)])
    assert groups == [[40, 40, 40], [40, 40, 40], [10]]


def test_vocabulary_is_fitted_on_train_only(tmp_path):
    lines = random_lines(900, seed=4, distinct=20)
    novel = [b"\t".join([*line.split(b"\t")[:14], *[b"fffffff1"] * 26]) for line in lines[:5]]
    file = write_log(tmp_path / "a.txt", lines + novel * 10)
    recipe = Recipe(Vocabulary(30), splits=("train=1-600", "test=601-"), row_group_rows=64, rows_per_part=128)
    output, metadata = run(tmp_path, [file], recipe)
    test_rows = lines[600:] + novel * 10
    assert_rows_equal(
        read_split(output, metadata.splits["train"].files), expected_vocabulary(lines[:600], lines[:600], 30)
    )
    test_table = read_split(output, metadata.splits["test"].files)
    assert_rows_equal(test_table, expected_vocabulary(test_rows, lines[:600], 30))
    # Seen fifty times, but in the test rows only: the id of the unseen.
    assert set(test_table["C3"].to_pylist()[-50:]) == {1}
    for name in SPARSE:
        vocabulary = pq.read_table(output / "vocabulary" / f"{name}.parquet")
        assert metadata.num_embeddings[name] == 2 + vocabulary.num_rows
        assert vocabulary["id"].to_pylist() == list(range(2, 2 + vocabulary.num_rows))
        assert min(vocabulary["count"].to_pylist()) >= 30
    assert not (output / "_work").exists()


def test_a_vocabulary_of_all_splits_taken_modulo_the_table_sizes(tmp_path):
    lines = random_lines(300, seed=6, distinct=40)
    file = write_log(tmp_path / "a.txt", lines)
    sizes = tuple(7 if feature % 2 else 2**31 - 1 for feature in range(26))
    splits = ("train=1-100", "test=101-")
    recipe = Recipe(Vocabulary(1, fit_on="all", num_embeddings=sizes), splits=splits)
    output, metadata = run(tmp_path, [file], recipe)
    assert list(metadata.num_embeddings.values()) == list(sizes)
    expected = expected_vocabulary(lines[100:], lines, 1)
    folded = [
        [*row[:14], *(value % size for value, size in zip(row[14:], sizes, strict=True))] for row in expected
    ]
    assert_rows_equal(read_split(output, metadata.splits["test"].files), folded)
    with pytest.raises(DatasetError, match="modulo"):
        run(tmp_path, [file], Recipe(Vocabulary(1, fit_on="all"), splits=splits))


def test_a_column_missing_in_every_row_and_an_empty_c26(tmp_path):
    lines = [
        b"\t".join([*fields[:5], b"", *fields[6:20], b"", *fields[21:39], b""])
        for fields in (line.split(b"\t") for line in random_lines(100, seed=5))
    ]
    file = write_log(tmp_path / "a.txt", lines)
    output, metadata = run(tmp_path, [file], Recipe(Vocabulary(1)))
    table = read_split(output, metadata.splits["train"].files)
    assert_rows_equal(table, expected_vocabulary(lines, lines, 1))
    assert metadata.num_embeddings["C26"] == metadata.num_embeddings["C7"] == 2
    assert set(table["C26"].to_pylist()) == {0}
    assert set(table["I5"].to_pylist()) == {0.0}


@pytest.mark.parametrize("ids", [Hashed((1000,) * 26), Vocabulary(3)], ids=["hashed", "vocabulary"])
def test_output_does_not_depend_on_blocks_jobs_or_compression(tmp_path, ids):
    lines = random_lines(1500, seed=6, distinct=100)
    plain = [write_log(tmp_path / "a", lines[:800]), write_log(tmp_path / "b", lines[800:])]
    zipped = [write_log(tmp_path / "a.gz", lines[:800]), write_log(tmp_path / "b.gz", lines[800:])]
    recipe = Recipe(ids, splits=("train=1-1000", "test=1001-"), row_group_rows=100, rows_per_part=200)
    output, _ = run(tmp_path, plain, recipe, name="first")
    expected = all_files(output)
    tiny, _ = run(tmp_path, plain, recipe, name="tiny", block_bytes=500)
    assert all_files(tiny) == expected
    parallel, _ = run(tmp_path, plain, recipe, name="parallel", jobs=2, block_bytes=3000)
    assert all_files(parallel) == expected
    unzipped, _ = run(tmp_path, zipped, recipe, name="zipped", block_bytes=700)
    expected.pop("metadata.json")  # names the source files
    found = all_files(unzipped)
    found.pop("metadata.json")
    assert found == expected


def test_crlf_and_blank_last_lines_are_accepted_and_counted(tmp_path):
    lines = random_lines(30, seed=8)
    file = tmp_path / "a.txt"
    file.write_bytes(b"\r\n".join(lines) + b"\r\n\r\n\n")
    output, metadata = run(tmp_path, [file], Recipe(Hashed(tuple(SIZES))))
    assert_rows_equal(read_split(output, metadata.splits["train"].files), expected_hashed(lines, SIZES))
    assert metadata.source["crlf_lines"] == 30
    assert metadata.source["blank_lines_at_end"] == 2
    assert metadata.source["rows_rejected"] == 0


def test_a_last_line_without_its_end_is_a_row(tmp_path):
    lines = random_lines(3, seed=9)
    file = tmp_path / "a.txt"
    file.write_bytes(b"\n".join(lines))
    output, metadata = run(tmp_path, [file], Recipe(Hashed(tuple(SIZES))))
    assert_rows_equal(read_split(output, metadata.splits["train"].files), expected_hashed(lines, SIZES))


def test_an_unlabelled_log_has_label_minus_one_and_no_positives(tmp_path):
    lines = random_lines(20, seed=10, labelled=False)
    file = write_log(tmp_path / "test.txt", lines)
    output, metadata = run(
        tmp_path, [file], Recipe(Hashed(tuple(SIZES)), splits=("test=1-",), labelled=False)
    )
    assert metadata.splits["test"].positives is None
    assert_rows_equal(
        read_split(output, metadata.splits["test"].files), expected_hashed(lines, SIZES, labelled=False)
    )


def test_rows_outside_the_splits_are_counted(tmp_path):
    file = write_log(tmp_path / "a.txt", random_lines(20, seed=11))
    _, metadata = run(tmp_path, [file], Recipe(Hashed((5,) * 26), splits=("train=3-10",)))
    assert metadata.source["rows_outside_splits"] == 12
    assert metadata.source["rows_read"] == metadata.splits["train"].rows == 8
    assert metadata.recipe["split_rows"] == {"train": [3, 10]}


def test_a_vocabulary_needs_training_rows(tmp_path):
    file = write_log(tmp_path / "a.txt", random_lines(20, seed=12))
    with pytest.raises(ValueError, match="fitted on the train split"):
        run(tmp_path, [file], Recipe(Vocabulary(2), splits=("test=1-",)))


def test_a_split_of_rejects_only_is_an_error(tmp_path):
    lines = random_lines(10, seed=13)
    file = write_log(tmp_path / "a.txt", [*lines, b"bad", b"bad"])
    recipe = Recipe(Hashed((5,) * 26), splits=("train=1-10", "test=11-12"))
    with pytest.raises(DatasetError, match="split test has no valid row"):
        run(tmp_path, [file], recipe, max_bad=2)


@pytest.mark.parametrize("kind", ["hashed", "vocabulary"])
def test_real_rows_equal_the_plain_reading(tmp_path, kind):
    sample = criteo_sample("head10k_exact.txt.gz")
    lines = gzip.decompress(sample.read_bytes()).splitlines()
    sizes = [100_000] * 26
    ids = Hashed(tuple(sizes)) if kind == "hashed" else Vocabulary(10)
    output, metadata = run(
        tmp_path, [sample], Recipe(ids, splits=("kaggle",), row_group_rows=1000, rows_per_part=4000)
    )
    cuts = {"train": lines[:8572], "val": lines[8572:9286], "test": lines[9286:]}
    assert {name: split.rows for name, split in metadata.splits.items()} == {
        name: len(rows) for name, rows in cuts.items()
    }
    for name, rows in cuts.items():
        expected = (
            expected_hashed(rows, sizes) if kind == "hashed" else expected_vocabulary(rows, cuts["train"], 10)
        )
        assert_rows_equal(read_split(output, metadata.splits[name].files), expected)
    rate = sum(split.positives or 0 for split in metadata.splits.values()) / 10_000
    assert rate == pytest.approx(0.2182)
