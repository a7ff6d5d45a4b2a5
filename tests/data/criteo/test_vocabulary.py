from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.data.criteo.encode import HashedEncoder, VocabularyEncoder, transform_dense
from recsys_tpu.data.criteo.vocabulary import HashCounter, write_vocabulary

hash_values = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1), st.sampled_from([2**32 - 1, 2**31]))


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.lists(hash_values, min_size=1, max_size=40), min_size=1, max_size=6),
    min_count=st.integers(1, 3),
    memory_entries=st.integers(1, 500),
)
def test_counts_are_exact_whatever_is_spilled(tmp_path_factory, values, min_count, memory_entries):
    directory = tmp_path_factory.mktemp("vocabulary")
    counter = HashCounter(directory / "part", memory_entries=memory_entries)
    for block in values:
        hashes = np.tile(np.array(block, np.uint32), (26, 1))
        counter.add(hashes, np.zeros(hashes.shape, bool))
    kept = write_vocabulary(
        25,
        counter.finish(),
        min_count=min_count,
        table_file=directory / "C26.parquet",
        hash_file=directory / "C26.hashes",
        memory_entries=memory_entries,
    )
    counts = Counter(value for block in values for value in block)
    expected = sorted((value, count) for value, count in counts.items() if count >= min_count)
    table = pq.read_table(directory / "C26.parquet")
    assert kept == len(expected)
    assert table["hash"].to_pylist() == [value for value, _ in expected]
    assert table["count"].to_pylist() == [count for _, count in expected]
    assert table["id"].to_pylist() == list(range(2, 2 + kept))
    assert np.fromfile(directory / "C26.hashes", "<u4").tolist() == [value for value, _ in expected]


def test_missing_rare_and_known_hashes_have_their_own_ids(tmp_path):
    files = [tmp_path / f"{feature}" for feature in range(26)]
    for path in files:
        np.array([0, 7, 0x97279DD8], "<u4").tofile(path)
    files[1].write_bytes(b"")  # a feature that is missing in every row
    encoder = VocabularyEncoder(files)
    hashes = np.tile(np.array([0, 0, 7, 8, 0x97279DD8, 0xFFFFFFFF], np.uint32), (26, 1))
    missing = np.zeros(hashes.shape, bool)
    missing[:, 0] = True
    ids = encoder.encode(hashes, missing)
    assert ids.dtype == np.int32
    assert ids[0].tolist() == [0, 2, 3, 1, 4, 1]
    assert ids[1].tolist() == [0, 1, 1, 1, 1, 1]


def test_hashes_over_two_to_the_31_never_give_negative_ids():
    encoder = HashedEncoder((2**31 - 1, *[100_000] * 25))
    ids = encoder.encode(np.full((26, 1), 0x97279DD8, np.uint32), np.zeros((26, 1), bool))
    assert ids[0, 0] == 0x97279DD8 % (2**31 - 1)
    assert ids[1, 0] == 0x97279DD8 % 100_000


@pytest.mark.parametrize(
    ("count", "expected"), [(-3, 0), (-2, 0), (-1, 0), (0, 0), (1, np.log(2)), (10**15, None)]
)
def test_the_dense_transform_is_finite_and_depends_on_the_value_alone(count, expected):
    alone = transform_dense(np.array([[count]], np.int64))
    beside = transform_dense(np.array([[count], [-1_000_000]], np.int64))
    assert alone.dtype == np.float32
    assert np.isfinite(alone).all()
    assert alone[0, 0] == beside[0, 0]
    if expected is not None:
        assert alone[0, 0] == np.float32(expected)
