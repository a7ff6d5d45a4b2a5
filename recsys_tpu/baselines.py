"""What simple predictors reach on the same split, so that a model's numbers have a scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from recsys_tpu.data.metadata import DatasetMetadata
from recsys_tpu.data.synthetic import PROBABILITY_COLUMN
from recsys_tpu.metrics import ClickMetrics, click_metrics

_STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0)  # inverse regularisation, picked on the end of the training split
_HELD_OUT = 0.15
_MOST_TREES = 400
_MAX_CATEGORIES = 255  # what HistGradientBoosting takes


def oracle_metrics(directory: Path, split: str) -> ClickMetrics | None:
    """Metrics of the true click probabilities of a synthetic split: no model can expect better.

    None where the log has no planted truth.
    """
    table = _read(directory, split, ["label", PROBABILITY_COLUMN])
    if table is None:
        return None
    probability = table[PROBABILITY_COLUMN].to_numpy()
    return click_metrics(table["label"].to_numpy(), np.log(probability) - np.log1p(-probability))


def constant_metrics(directory: Path, *, train: str, test: str) -> ClickMetrics:
    """The training split's click rate as the prediction for every test row."""
    metadata = DatasetMetadata.load(directory)
    positives = metadata.split(train).positives
    if positives is None:
        raise ValueError(f"{directory}: split {train!r} has no labels")
    rate = positives / metadata.split(train).rows
    labels = _labels(directory, test)
    return click_metrics(labels, np.full(len(labels), np.log(rate) - np.log1p(-rate)))


def logistic_regression_metrics(directory: Path, *, train: str, test: str, seed: int) -> ClickMetrics:
    """L2-regularised logistic regression on one-hot ids and the dense features.

    The regularisation is chosen by log loss on the last 15 % of the training split, then the model is
    fitted on all of it; the test split is read once.
    """
    x, y = _design(directory, train)
    cut = int(len(y) * (1 - _HELD_OUT))
    losses = {
        strength: click_metrics(
            y[cut:], _fit(x[:cut], y[:cut], strength, seed).decision_function(x[cut:])
        ).log_loss
        for strength in _STRENGTHS
    }
    best = min(losses, key=lambda strength: losses[strength])
    test_x, test_y = _design(directory, test)
    return click_metrics(test_y, _fit(x, y, best, seed).decision_function(test_x))


def gradient_boosting_metrics(directory: Path, *, train: str, test: str, seed: int) -> ClickMetrics:
    """Gradient-boosted trees on the dense features, how often each id occurs in training, and small tables.

    Tables of up to 255 rows are given as categories. The number of trees is chosen by log loss on the last
    15 % of the training split, then the model is fitted on all of it; the test split is read once.
    """
    metadata = DatasetMetadata.load(directory)
    ids, dense, y = _columns(directory, train)
    test_ids, test_dense, test_y = _columns(directory, test)
    counts = [
        np.bincount(ids[:, column], minlength=metadata.num_embeddings[name])
        for column, name in enumerate(metadata.sparse_features)
    ]
    small = [column for column, count in enumerate(counts) if len(count) <= _MAX_CATEGORIES]

    def features(ids: npt.NDArray[np.int32], dense: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        often = np.column_stack([count[ids[:, column]] for column, count in enumerate(counts)])
        return np.column_stack([ids[:, small], dense, often]).astype(np.float32)

    def fit(rows: slice, trees: int) -> HistGradientBoostingClassifier:
        model = HistGradientBoostingClassifier(
            max_iter=trees,
            learning_rate=0.05,
            l2_regularization=5.0,
            categorical_features=list(range(len(small))),
            early_stopping=False,
            random_state=seed,
        )
        return model.fit(x[rows], y[rows])

    x = features(ids, dense)
    cut = int(len(y) * (1 - _HELD_OUT))
    staged = fit(slice(cut), _MOST_TREES).staged_predict_proba(x[cut:])
    losses = [float(np.mean(-np.log(p[np.arange(len(p)), y[cut:]]))) for p in staged]
    final = fit(slice(len(y)), int(np.argmin(losses)) + 1)
    return click_metrics(test_y, final.decision_function(features(test_ids, test_dense)))


def _fit(x: sp.csr_matrix, y: npt.NDArray[np.int8], strength: float, seed: int) -> LogisticRegression:
    return LogisticRegression(C=strength, solver="liblinear", random_state=seed).fit(x, y)


def _design(directory: Path, split: str) -> tuple[sp.csr_matrix, npt.NDArray[np.int8]]:
    """One-hot ids of every feature beside the dense values: ``[rows, sum of tables + dense]``."""
    metadata = DatasetMetadata.load(directory)
    ids, dense, labels = _columns(directory, split)
    offsets = np.cumsum([0, *(metadata.num_embeddings[name] for name in metadata.sparse_features)])
    ids = ids + offsets[:-1]
    rows, width = ids.shape
    one_hot = sp.csr_matrix(
        (np.ones(rows * width, np.float32), ids.ravel(), np.arange(rows + 1) * width),
        shape=(rows, int(offsets[-1])),
    )
    return sp.hstack([one_hot, sp.csr_matrix(dense)], format="csr"), labels


def _columns(
    directory: Path, split: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int8]]:
    """(ids ``[rows, sparse features]``, dense ``[rows, dense features]``, labels ``[rows]``)."""
    metadata = DatasetMetadata.load(directory)
    table = _read(directory, split, ["label", *metadata.dense_features, *metadata.sparse_features])
    assert table is not None
    ids = np.column_stack([table[name].to_numpy() for name in metadata.sparse_features])
    dense = np.column_stack([table[name].to_numpy() for name in metadata.dense_features])
    return ids, dense, table["label"].to_numpy()


def _labels(directory: Path, split: str) -> npt.NDArray[np.int8]:
    table = _read(directory, split, ["label"])
    assert table is not None
    return np.asarray(table["label"].to_numpy())


def _read(directory: Path, split: str, columns: list[str]) -> pa.Table | None:
    """The split's columns, or None if a file lacks one of them."""
    files = [directory / name for name in DatasetMetadata.load(directory).split(split).files]
    if any(set(columns) - set(pq.read_schema(file).names) for file in files):
        return None
    return pa.concat_tables([pq.read_table(file, columns=columns) for file in files])
