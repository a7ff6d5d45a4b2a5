"""Bad input by name: every case ends in an error that names the place, or in a documented result.

Cases of checkpoints are in test_checkpoint.py.  Public bug reports that a case stands for are in its name.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.config import load_config
from recsys_tpu.data.criteo.__main__ import main as criteo
from recsys_tpu.data.criteo.parse import parse_block
from recsys_tpu.data.metadata import DatasetError, DatasetMetadata, Split
from recsys_tpu.data.reader import ParquetReader
from recsys_tpu.embeddings.preparation import CapacityError, prepare
from recsys_tpu.errors import ConfigError
from recsys_tpu.metrics import click_metrics
from recsys_tpu.sharding.planner.errors import PlanError, PlanInputError
from recsys_tpu.sharding.planner.make import make_plan
from recsys_tpu.sharding.planner.plan import Plan
from recsys_tpu.sharding.planner.tables import TableSpec, Workload
from recsys_tpu.sharding.planner.topology import emulated, parse_topology
from recsys_tpu.sharding.validation import FeatureLimits, InvalidFeatureError, Validation, check_features
from tests.data.criteo.reference import random_lines
from tests.tiny_run import run, tiny_config

LINES = random_lines(60, seed=5)


# ---- Criteo logs


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


# ---- Parquet directories


def _dataset(folder: Path, rows: int = 32, **changes: Any) -> Path:
    columns = {
        "label": pa.array(np.arange(rows) % 2, pa.int8()),
        "I1": pa.array(np.linspace(0, 1, rows), pa.float32()),
        "C1": pa.array(np.arange(rows) % 10, pa.int32()),
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), folder / "a.parquet")
    DatasetMetadata(
        dense_features=["I1"],
        sparse_features=["C1"],
        num_embeddings={"C1": 10},
        row_group_rows=rows,
        splits={"train": Split(rows=rows, positives=None, files=["a.parquet"])},
        recipe={},
        source={},
    ).save(folder)
    return folder


def _read(folder: Path, *, batch_size: int = 8, lanes: int = 2, **changes: Any) -> int:
    reader = ParquetReader(
        folder,
        "train",
        **{"batch_size": batch_size, "rank": 0, "world_size": 1, "lanes": lanes, "shuffle": True, "seed": 1}
        | changes,
    )
    return sum(int(batch.weights.sum()) for batch in reader.epoch(0))


def _with(kind: pa.DataType, at: int, value: Any, rows: int = 32) -> pa.Array:
    values: list[Any] = [0] * rows
    values[at] = value
    return pa.array(values, kind)


BAD_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "HugeCTR 46: id of the table's size": (
        {"C1": _with(pa.int32(), 5, 10)},
        "row 5: feature C1 has id 10, but",
    ),
    "id -1": ({"C1": _with(pa.int32(), 31, -1)}, "row 31: feature C1 has id -1"),
    "id 2**31-1": ({"C1": _with(pa.int32(), 0, 2**31 - 1)}, "row 0: feature C1 has id 2147483647"),
    "id missing": ({"C1": _with(pa.int32(), 3, None)}, "column C1 has 1 missing values"),
    "count NaN": ({"I1": _with(pa.float32(), 4, float("nan"))}, "row 4: I1 = nan is not a finite number"),
    "count infinite": ({"I1": _with(pa.float32(), 4, float("inf"))}, "row 4: I1 = inf"),
    "count missing": ({"I1": _with(pa.float32(), 4, None)}, "column I1 has 1 missing values"),
    "label 2": ({"label": _with(pa.int8(), 9, 2)}, "row 9: label = 2 is neither 0 nor 1"),
    "label -1 (unlabelled)": ({"label": _with(pa.int8(), 9, -1)}, "row 9: label = -1"),
    "label missing": ({"label": _with(pa.int8(), 9, None)}, "column label has 1 missing values"),
    "no column C1": ({"C1": None}, "has no column C1"),
    "id in a list over the size": (
        {"C1": pa.array([[1], [2, 10], *[[0]] * 30], pa.list_(pa.int32()))},
        "row 1: feature C1 has id 10",
    ),
    "a list that is missing": (
        {"C1": pa.array([[1], None, *[[0]] * 30], pa.list_(pa.int32()))},
        "column C1 has 1 missing values",
    ),
    "a list with a missing id": (
        {"C1": pa.array([[1], [None], *[[0]] * 30], pa.list_(pa.int32()))},
        "column C1 has 1 missing values",
    ),
    "ids as text": ({"C1": pa.array(["7"] * 32)}, "column C1 is string, must be int32 or a list"),
    "ids as float": ({"C1": pa.array(np.full(32, 0.5), pa.float32())}, "column C1 is float, must be int32"),
    "ids as int64": ({"C1": pa.array(np.full(32, 3), pa.int64())}, "column C1 is int64, must be int32"),
    "ids in lists of lists": ({"C1": pa.array([[[1]]] * 32)}, "column C1 is list<.*must be int32"),
    "counts as text": ({"I1": pa.array(["1"] * 32)}, "column I1 is string, must be float32"),
    "counts as double": ({"I1": pa.array(np.full(32, 1e300))}, "column I1 is double, must be float32"),
    "label as float": (
        {"label": pa.array(np.full(32, 0.5), pa.float32())},
        "column label is float, must be int8",
    ),
}


@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_bad_column(tmp_path, case):
    changes, message = BAD_COLUMNS[case]
    with pytest.raises(DatasetError, match=rf"a\.parquet.*{message}"):
        _read(_dataset(tmp_path, **changes))


def _rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut_file(folder: Path) -> None:
    path = folder / "a.parquet"
    path.write_bytes(path.read_bytes()[:-30])


def _spoil_page(folder: Path) -> None:
    path = folder / "a.parquet"
    content = bytearray(path.read_bytes())
    content[8:60] = b"\xff" * 52
    path.write_bytes(bytes(content))


BAD_DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "file gone": (lambda d: (d / "a.parquet").unlink(), r"a\.parquet.*missing; preprocess"),
    "file truncated": (_cut_file, r"a\.parquet: not a readable Parquet file"),
    "file empty": (lambda d: (d / "a.parquet").write_bytes(b""), r"a\.parquet: not a readable Parquet file"),
    "page overwritten": (_spoil_page, r"a\.parquet, row group 0: cannot be read"),
    "inference 1344: no metadata": (
        lambda d: (d / "metadata.json").unlink(),
        "unfinished.*run the preprocess",
    ),
    "metadata cut": (lambda d: (d / "metadata.json").write_text('{"rows"'), r"metadata\.json"),
    "metadata a list": (lambda d: (d / "metadata.json").write_text("[]"), r"metadata\.json"),
    "metadata not UTF-8": (lambda d: (d / "metadata.json").write_bytes(b"\xff\xfe{}"), "not UTF-8"),
    "other version": (lambda d: _rewrite(d, format_version=2), "format_version"),
    "unknown key": (lambda d: _rewrite(d, rows=3), "rows: Extra inputs"),
    "table of 0 rows": (lambda d: _rewrite(d, num_embeddings={"C1": 0}), "num_embeddings.C1"),
    "table of 2**31 rows": (lambda d: _rewrite(d, num_embeddings={"C1": 2**31}), "num_embeddings.C1"),
    "table of no feature": (lambda d: _rewrite(d, num_embeddings={"C1": 10, "C2": 3}), "unknown .'C2'"),
    "file outside": (
        lambda d: _rewrite(d, splits={"train": {"rows": 32, "positives": 1, "files": ["../a.parquet"]}}),
        "lies outside the directory",
    ),
    "other number of rows": (
        lambda d: _rewrite(d, splits={"train": {"rows": 33, "positives": 1, "files": ["a.parquet"]}}),
        "holds 32 rows but metadata.json says 33",
    ),
    "no rows": (
        lambda d: _rewrite(d, splits={"train": {"rows": 0, "positives": 0, "files": []}}),
        "selects no rows",
    ),
    "no such split": (lambda d: _rewrite(d, splits={}), "the data has no split 'train'"),
}


@pytest.mark.parametrize("case", BAD_DIRECTORIES)
def test_bad_directory(tmp_path, case):
    spoil, message = BAD_DIRECTORIES[case]
    spoil(_dataset(tmp_path))
    with pytest.raises(DatasetError, match=message):
        _read(tmp_path)


BAD_READERS = {
    "dlrm 53: a table smaller than its data": (
        {"num_embeddings": {"C1": 9}},
        "feature C1: the table has 9 rows",
    ),
    "a table of an unknown feature": ({"num_embeddings": {"C1": 10, "X": 4}}, "feature X is not in the data"),
    "lanes do not divide the batch": ({"batch_size": 9}, "must be a multiple of data.lanes"),
    "ranks do not divide the lanes": ({"world_size": 3, "batch_size": 6}, "multiple of the number of ranks"),
}


@pytest.mark.parametrize("case", BAD_READERS)
def test_bad_reader(tmp_path, case):
    changes, message = BAD_READERS[case]
    with pytest.raises(DatasetError, match=message):
        _read(_dataset(tmp_path), **changes)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 33])
def test_torchrec_747_one_row_more_than_full_batches_is_not_lost(tmp_path, rows):
    folder = _dataset(tmp_path, rows=rows)
    counts = [_read(folder, batch_size=8, lanes=4, rank=rank, world_size=2) for rank in (0, 1)]
    assert sum(counts) == rows


@pytest.mark.parametrize("label", [0, 1])
def test_xlearn_217_an_evaluation_of_one_class(label):
    with pytest.raises(
        DatasetError, match=f"has no {'positives' if label == 0 else 'negatives'}: AUC does not"
    ):
        click_metrics([label] * 5, [0.0] * 5)


# ---- configs

BAD_CONFIGS = {
    "unknown section": ("trian: {}", "trian: no such key; did you mean 'train'"),
    "unknown key": ("train: {batchsize: 8}", "train.batchsize: no such key; did you mean 'batch_size'"),
    "key of another section": ("train: {seed: 1}", "train.seed: no such key; did you mean 'run.seed'"),
    "key twice": ("train: {epochs: 1, epochs: 2}", "epochs.*twice"),
    "section twice": ("run: {seed: 1}\nrun: {seed: 2}", "run.*twice"),
    "batch of 0": ("train: {batch_size: 0}", "train.batch_size"),
    "batch negative": ("train: {batch_size: -8}", "train.batch_size"),
    "batch true": ("train: {batch_size: true}", "batch_size"),
    "batch a list": ("train: {batch_size: [8]}", "train.batch_size"),
    "batch 8.5": ("train: {batch_size: 8.5}", "train.batch_size"),
    "epochs null": ("train: {epochs: null}", "train.epochs"),
    "learning rate nan": ("optimizer: {dense: {learning_rate: .nan}}", "optimizer.dense.learning_rate"),
    "learning rate infinite": ("optimizer: {dense: {learning_rate: .inf}}", "optimizer.dense.learning_rate"),
    "learning rate 0": ("optimizer: {sparse: {learning_rate: 0}}", "optimizer.sparse.learning_rate"),
    "learning rate text": ("optimizer: {sparse: {learning_rate: high}}", "optimizer.sparse.learning_rate"),
    "learning rate true": ("optimizer: {sparse: {learning_rate: true}}", "learning_rate"),
    "momentum for adamw": ("optimizer: {dense: {momentum: 0.9}}", "momentum is used by kind=sgd only"),
    "unknown optimizer": ("optimizer: {dense: {kind: adma}}", "optimizer.dense.kind"),
    "unknown model": ("model: {kind: dlmr}", "model.kind"),
    "unknown data": ("data: {kind: avazu}", "data.kind"),
    "unknown device": ("runtime: {device: gpu}", "runtime.device"),
    "parquet without path": ("data: {kind: parquet}", "needs data.path"),
    "lanes do not divide": ("train: {batch_size: 100}\ndata: {lanes: 8}", "multiple of data.lanes=8"),
    "name with a slash": ("run: {name: a/b}", "run.name"),
    "name of dots": ("run: {name: ..}", "run.name"),
    "seed negative": ("run: {seed: -1}", "run.seed"),
    "seed over 64 bits": ("run: {seed: 99999999999999999999999}", "run.seed"),
    "table of 0 rows": ("model: {num_embeddings: {C1: 0}}", "model.num_embeddings.C1"),
    "layer of 0": ("model: {over_mlp: [0]}", r"model.over_mlp.0"),
    "section a list": ("train: [1]", "train"),
    "section null": ("data: null", "data.kind is none of synthetic"),
    "a list": ("- 1", "a config is a mapping of sections, found list"),
    "text": ("hello", "found str"),
    "tabs": ("train:\n\tepochs: 1", "not valid YAML"),
    "unclosed": ("train: {", "not valid YAML"),
    "python object": ("run: !!python/object/apply:os.system ['true']", "not valid YAML"),
    "control characters": ("run: \x00", "not valid YAML"),
    "alias bomb": (
        "a: &a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nrun: {name: *b}",
        "run.name|no such key",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config(tmp_path, case):
    text, message = BAD_CONFIGS[case]
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)c\.yaml: .*{message}"):
        load_config(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"run: {name: \xe9}"], ids=["binary", "Latin-1"])
def test_config_that_is_no_utf8(tmp_path, content):
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.yaml: cannot be read"):
        load_config(tmp_path / "c.yaml")


# ---- plans


def _plan() -> dict[str, Any]:
    tables = tuple(
        TableSpec(name=f"t{i}", rows=1000 * (i + 1), dim=16, pooling_factors=(1.0,)) for i in range(4)
    )
    return make_plan(Workload(tables=tables, batch_per_rank=64), emulated(4)).to_dict()


def _table(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda plan: plan["tables"][0].__setitem__(key, value)


BAD_PLANS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other version": (lambda p: p.update(format_version=99), "format_version 99"),
    "no version": (lambda p: p.pop("format_version"), "format_version None"),
    "no tables": (lambda p: p.pop("tables"), "tables"),
    "tables empty": (lambda p: p.update(tables=[]), "the plan has no tables"),
    "no topology": (lambda p: p.pop("topology"), "topology"),
    "topology a list": (lambda p: p.update(topology=[1]), "not a plan"),
    "topology of an unknown chip": (lambda p: p["topology"].update(chip="v99"), "chip"),
    "tables a mapping": (lambda p: p.update(tables={"t0": 1}), "not a plan"),
    "table without name": (lambda p: p["tables"][0].pop("name"), "name"),
    "table name null": (_table("name", None), "table name None is no text"),
    "unknown sharding type": (_table("sharding_type", "diagonal"), "diagonal"),
    "rows a text": (_table("rows", "many"), "not a plan"),
    "rows negative": (_table("rows", -5), "table t0: -5 rows"),
    "dim 0": (_table("dim", 0), "table t0: .*dim 0"),
    "rank that is not there": (_table("column_shards", [[77, 16]]), r"places \[77\]"),
    "rank negative": (_table("column_shards", [[-1, 16]]), r"places \[-1\]"),
    "columns not covered": (_table("column_shards", [[0, 8]]), "cover 8 of 16"),
    "columns covered twice": (_table("column_shards", [[0, 16], [1, 16]]), "cover 32 of 16"),
    "columns negative": (_table("column_shards", [[0, 24], [1, -8]]), "table t0"),
    "no shards": (_table("column_shards", []), "table t0"),
    "table twice": (lambda p: p["tables"].append(p["tables"][0]), "table t0 is there twice"),
    "row group 0": (lambda p: p.update(row_group=0), "row_group"),
    "summary a number": (lambda p: p.update(summary=3), "not a plan"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_bad_plan(tmp_path, case, suffix):
    change, message = BAD_PLANS[case]
    tree = _plan()
    change(tree)
    path = tmp_path / f"plan{suffix}"
    path.write_text(json.dumps(tree) if suffix == ".json" else yaml.safe_dump(tree))
    with pytest.raises(PlanInputError, match=rf"plan\{suffix}: .*(?:{message})"):
        Plan.load(path)


BAD_PLAN_FILES = {
    "empty": b"",
    "cut": b'{"format_version": 1, "tab',
    "a list": b"[1]",
    "binary": bytes(range(256)),
    "python object": b"!!python/object/apply:os.system ['true']",
}


@pytest.mark.parametrize("case", BAD_PLAN_FILES)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_bad_plan_file(tmp_path, case, suffix):
    path = tmp_path / f"plan{suffix}"
    path.write_bytes(BAD_PLAN_FILES[case])
    with pytest.raises(PlanInputError, match=rf"plan\{suffix}"):
        Plan.load(path)


def test_torchrec_3652_a_table_that_the_plan_lacks_is_named():
    plan = Plan.from_dict(_plan())
    tables = tuple(
        TableSpec(name=f"t{i}", rows=1000 * (i + 1), dim=16, pooling_factors=(1.0,)) for i in range(5)
    )
    with pytest.raises(PlanError, match="table t4 is not in the plan"):
        plan.check_fits(Workload(tables=tables, batch_per_rank=64), emulated(4))


@pytest.mark.parametrize(
    "text", ["", "v5p", "v5p:", "v5p:0x1", "v5p:4x", "v5p:3x3x3x3", "v9:2x2", "5*", "../x.yaml"]
)
def test_bad_topology(text):
    with pytest.raises(PlanError):
        parse_topology(text)


# ---- batches of ids


def _features(ids: list[int], weights: list[float] | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["C1"],
        values=torch.tensor(ids),
        lengths=torch.tensor([1] * len(ids)),
        weights=None if weights is None else torch.tensor(weights),
    )


LIMITS = [EmbeddingBagConfig(name="t_C1", num_embeddings=10, embedding_dim=4, feature_names=["C1"])]
BAD_FEATURES = {
    "torchrec 2957: id of the table's size": (
        [0, 10],
        None,
        "feature C1: id 10 at position 1 .*t_C1, which has 10",
    ),
    "torchrec 575: id negative": ([-1], None, "feature C1: id -1 at position 0"),
    "id over 32 bits": ([1, 2**40], None, "id 1099511627776 at position 1"),
    "weight NaN": ([1, 2], [1.0, float("nan")], "weight nan at position 1"),
    "weight infinite": ([1, 2], [float("-inf"), 1.0], "weight -inf at position 0"),
}


@pytest.mark.parametrize("case", BAD_FEATURES)
def test_bad_features(case):
    ids, weights, message = BAD_FEATURES[case]
    with pytest.raises(InvalidFeatureError, match=message):
        check_features(_features(ids, weights), FeatureLimits.of_tables(LIMITS), Validation.FULL)


ROWS = np.array([1, 2, 3])
BAD_PREPARATIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "row of the table's size": ({"rows": np.array([1, 8, 3])}, ValueError, "row 8 at position 1 is not in"),
    "row negative": ({"rows": np.array([1, -8, 3])}, ValueError, "row -8 at position 1"),
    "lengths too short": (
        {"lengths": np.array([1, 1])},
        ValueError,
        "lengths sum to 2, but there are 3 rows",
    ),
    "length negative": ({"lengths": np.array([4, -1])}, ValueError, "length -1 is negative"),
    "too few lengths": ({"lengths": np.array([3])}, ValueError, "1 lengths for 2 bags"),
    "too many ids": ({"id_capacity": 2}, CapacityError, "ids: 3 needed, but id_capacity is 2"),
    "too many rows": ({"unique_capacity": 2}, CapacityError, "3 needed, but unique_capacity is 2"),
    "weights too few": ({"weights": np.array([1.0])}, ValueError, "3 rows but 1 weights"),
    "no bags": ({"lengths": None}, ValueError, "either lengths or bags"),
}


@pytest.mark.parametrize("case", BAD_PREPARATIONS)
def test_bad_preparation(case):
    changes, kind, message = BAD_PREPARATIONS[case]
    arguments: dict[str, Any] = {
        "num_bags": 2,
        "num_rows": 8,
        "id_capacity": 8,
        "unique_capacity": 8,
        "lengths": np.array([1, 2]),
        "rows": ROWS,
    }
    arguments |= changes
    with pytest.raises(kind, match=message):
        prepare(arguments.pop("rows"), **arguments)


# ---- whole runs


def test_dlrm_pr_8_a_run_without_evaluation_steps_still_saves(tmp_path):
    config = tiny_config(tmp_path, train__max_steps=3, train__eval_every=0)
    run(config)
    assert [path.name for path in (config.run.directory / "checkpoints").iterdir()] == ["step_00000003"]
