import json

import pytest

from recsys_tpu.data.metadata import DatasetError, DatasetMetadata, Split


def make_metadata(**changes: object) -> DatasetMetadata:
    content = {
        "dense_features": ["I1"],
        "sparse_features": ["C1", "C2"],
        "num_embeddings": {"C1": 10, "C2": 20},
        "row_group_rows": 4,
        "splits": {"train": Split(rows=5, positives=2, files=["train/part-00000.parquet"])},
        "recipe": {"kind": "hashed"},
        "source": {},
    }
    return DatasetMetadata(**(content | changes))


def test_save_then_load_gives_the_same(tmp_path):
    metadata = make_metadata()
    metadata.save(tmp_path)
    assert DatasetMetadata.load(tmp_path) == metadata
    assert [path.name for path in tmp_path.iterdir()] == ["metadata.json"]


def test_unfinished_directory_says_to_run_again(tmp_path):
    with pytest.raises(DatasetError, match=r"metadata\.json: not found.*run the preprocess command again"):
        DatasetMetadata.load(tmp_path)


def test_missing_directory_is_named(tmp_path):
    with pytest.raises(DatasetError, match="nowhere: no such directory"):
        DatasetMetadata.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version"),
        ({"num_embeddings": {"C1": 10}}, r"missing \['C2'\]"),
        ({"num_embeddings": {"C1": 10, "C2": 2**31}}, r"num_embeddings\.C2"),
        ({"sparse_features": ["C1", "C1"]}, "named twice: C1"),
        ({"surprise": 1}, "surprise"),
        ({"splits": {"train": {"rows": 1, "positives": 2, "files": []}}}, "positives"),
        ({"splits": {"train": {"rows": 1, "positives": 1, "files": ["../x.parquet"]}}}, "outside"),
    ],
)
def test_invalid_content_names_the_file_and_the_field(tmp_path, change, message):
    content = make_metadata().model_dump(mode="json") | change
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=message) as caught:
        DatasetMetadata.load(tmp_path)
    assert str(tmp_path / "metadata.json") in str(caught.value)


def test_half_written_json_is_an_error(tmp_path):
    (tmp_path / "metadata.json").write_text('{"format_version": 1, "dense')
    with pytest.raises(DatasetError, match=r"metadata\.json"):
        DatasetMetadata.load(tmp_path)


def test_a_table_smaller_than_the_data_names_the_feature():
    metadata = make_metadata()
    metadata.check_table_sizes({"C1": 10, "C2": 21})
    with pytest.raises(DatasetError, match="feature C2: the table has 19 rows but the data was made for 20"):
        metadata.check_table_sizes({"C1": 10, "C2": 19})
    with pytest.raises(DatasetError, match="feature C3 is not in the data"):
        metadata.check_table_sizes({"C3": 10})


def test_unknown_split_lists_those_there():
    with pytest.raises(DatasetError, match="no split 'val'; it has train"):
        make_metadata().split("val")
