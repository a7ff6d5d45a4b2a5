from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys_tpu.baselines import oracle_metrics
from recsys_tpu.data import synthetic
from recsys_tpu.data.metadata import DatasetMetadata
from recsys_tpu.data.synthetic import SyntheticLog, ensure_synthetic_log, generate_chunk

LOG = SyntheticLog(train_rows=20_000, test_rows=20_000, num_embeddings=(50, 7, 3, 90))


def test_the_log_is_decided_by_its_parameters(tmp_path: Path) -> None:
    first = ensure_synthetic_log(LOG, tmp_path / "a")
    second = ensure_synthetic_log(LOG, tmp_path / "b")
    for name in ("train/part-00000.parquet", "test/part-00000.parquet"):
        assert pq.read_table(first / name).equals(pq.read_table(second / name))
    other = LOG.model_copy(update={"seed": 8})
    assert other.fingerprint() != LOG.fingerprint()
    assert not generate_chunk(other, "test", 0, 100).equals(generate_chunk(LOG, "test", 0, 100))
    assert not generate_chunk(LOG, "test", 0, 100).equals(generate_chunk(LOG, "test", 1, 100))
    assert not generate_chunk(LOG, "test", 0, 100).equals(generate_chunk(LOG, "train", 0, 100))


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ensure_synthetic_log(LOG, tmp_path)
    monkeypatch.setattr(synthetic, "generate_chunk", lambda *_: pytest.fail("generated again"))
    assert ensure_synthetic_log(LOG, tmp_path) == directory


def test_an_interrupted_generation_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "generate_chunk", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ensure_synthetic_log(LOG, tmp_path)
    assert not list(tmp_path.glob("synthetic-*"))
    DatasetMetadata.load(ensure_synthetic_log(LOG, tmp_path))


def test_labels_follow_the_planted_probabilities(tmp_path: Path) -> None:
    directory = ensure_synthetic_log(LOG, tmp_path)
    table = pq.read_table(directory / "train/part-00000.parquet")
    label = table["label"].to_numpy()
    p = table[synthetic.PROBABILITY_COLUMN].to_numpy()
    # in each decile of the probability the click rate is within 4 standard errors of it
    for part in np.array_split(np.argsort(p), 10):
        error = np.sqrt((p[part] * (1 - p[part])).mean() / len(part))
        assert abs(label[part].mean() - p[part].mean()) < 4 * error
    metadata = DatasetMetadata.load(directory)
    assert metadata.split("train").positives == label.sum()
    for name, rows in zip(LOG.sparse_features, LOG.num_embeddings, strict=True):
        ids = table[name].to_numpy()
        assert ids.min() >= 0
        assert ids.max() < rows
        counts = np.sort(np.bincount(ids, minlength=rows))[::-1] / len(ids)
        expected = np.arange(1, rows + 1) ** -LOG.zipf_exponent
        np.testing.assert_allclose(counts, expected / expected.sum(), atol=0.02)


def test_the_oracle_is_calibrated_and_informative(tmp_path: Path) -> None:
    oracle = oracle_metrics(ensure_synthetic_log(LOG, tmp_path), "test")
    assert oracle is not None
    assert 0.6 < oracle.auc < 0.95
    assert oracle.calibration == pytest.approx(1.0, abs=0.05)
