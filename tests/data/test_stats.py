"""Id statistics against plain counting, on single ids and on bags."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_tpu.data.metadata import DatasetError, DatasetMetadata, Split
from recsys_tpu.data.stats import BLOCKS, main, measure
from recsys_tpu.sharding.planner.inputs import read_statistics

ROWS = {"C1": 1000, "C2": 7, "C3": 64}


def _write(folder: Path, *, bad_id: bool = False) -> dict[str, list[list[int]]]:
    """Two files of 3,000 samples: C1 skewed single ids, C2 bags of 0 to 3 ids, C3 single ids."""
    random = np.random.default_rng(5)
    samples = 6000
    c1 = [[int(x)] for x in np.minimum(random.zipf(1.3, samples) - 1, 999)]
    c2 = [random.integers(0, 7, random.integers(0, 4)).tolist() for _ in range(samples)]
    c3 = [[int(x)] for x in random.integers(0, 64, samples)]
    if bad_id:
        c3[4000] = [64]
    (folder / "train").mkdir()
    names = []
    for part in range(2):
        rows = slice(part * 3000, (part + 1) * 3000)
        table = pa.table(
            {
                "label": pa.array(np.zeros(3000, np.int8)),
                "I1": pa.array(np.zeros(3000, np.float32)),
                "C1": pa.array([bag[0] for bag in c1[rows]], pa.int32()),
                "C2": pa.array(c2[rows], pa.list_(pa.int32())),
                "C3": pa.array([bag[0] for bag in c3[rows]], pa.int32()),
            }
        )
        names.append(f"train/part-{part}.parquet")
        pq.write_table(table, folder / names[-1], row_group_size=700)
    DatasetMetadata(
        dense_features=["I1"],
        sparse_features=list(ROWS),
        num_embeddings=ROWS,
        row_group_rows=700,
        splits={"train": Split(rows=samples, positives=0, files=names)},
        recipe={},
        source={},
    ).save(folder)
    return {"C1": c1, "C2": c2, "C3": c3}


def test_statistics_equal_plain_counting(tmp_path: Path) -> None:
    bags = _write(tmp_path)
    found = measure(tmp_path)
    for name, feature in found.items():
        ids = [one for bag in bags[name] for one in bag]
        assert feature.samples == 6000
        assert feature.ids == len(ids)
        assert feature.pooling_factor == pytest.approx(len(ids) / 6000)
        assert feature.distinct_ids == len(set(ids))
        assert feature.lookups[-1] == len(ids)
        assert feature.distinct[-1] == len(set(ids))
        assert feature.lookups[0] == 256
        assert len(set(ids[:256])) <= feature.rows
        assert sum(feature.block_shares) == pytest.approx(1)
        for block in (0, 13, BLOCKS - 1):
            low, high = block * ROWS[name] / BLOCKS, (block + 1) * ROWS[name] / BLOCKS
            inside = sum(low <= one < high for one in ids)
            assert feature.block_shares[block] == pytest.approx(inside / len(ids))
    assert found["C1"].top_1_percent > 0.2 > found["C3"].top_1_percent


def test_only_the_first_samples_are_read_when_asked(tmp_path: Path) -> None:
    bags = _write(tmp_path)
    feature = measure(tmp_path, max_samples=1000)["C2"]
    assert feature.samples == 1000
    assert feature.ids == sum(map(len, bags["C2"][:1000]))


def test_an_id_outside_its_table_is_named(tmp_path: Path) -> None:
    _write(tmp_path, bad_id=True)
    with pytest.raises(
        DatasetError, match=r"part-1\.parquet: feature C3 has id 64 outside its table of 64 rows"
    ):
        measure(tmp_path)


def test_the_planner_reads_what_the_command_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path)
    main([str(tmp_path), "--output", str(tmp_path / "stats.json")])
    assert "C2" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "stats.json").read_text())["features"]) == set(ROWS)
    pooling, statistics = read_statistics(tmp_path / "stats.json")["C2"]
    assert pooling == pytest.approx(1.5, abs=0.1)
    assert len(statistics.block_shares) == BLOCKS
