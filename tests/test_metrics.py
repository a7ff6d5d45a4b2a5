import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss

from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.metrics import click_metrics


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 200), st.floats(0.1, 5))
def test_equal_to_definitions(seed: int, rows: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    labels[:2] = 0, 1
    logits = np.round(rng.normal(0, spread, rows), 1)  # rounded, so that there are ties
    found = click_metrics(labels, logits)
    positive, negative = logits[labels == 1], logits[labels == 0]
    wins = (positive[:, None] > negative).mean() + 0.5 * (positive[:, None] == negative).mean()
    assert found.auc == pytest.approx(wins, abs=1e-12)
    p = 1 / (1 + np.exp(-logits))
    assert found.log_loss == pytest.approx(log_loss(labels, p), rel=1e-6)
    rate = labels.mean()
    constant = log_loss(labels, np.full(rows, rate))
    assert found.normalized_entropy == pytest.approx(found.log_loss / constant, rel=1e-9)
    assert found.calibration == pytest.approx(p.sum() / labels.sum())
    assert (found.rows, found.positives) == (rows, labels.sum())


def test_extreme_logits_stay_finite() -> None:
    found = click_metrics([0, 1, 1, 0], [1e4, -1e4, 1e4, -1e4])
    assert found.auc == 0.5
    assert found.log_loss == pytest.approx(5e3)


@pytest.mark.parametrize(("labels", "kind"), [([0, 0], "no positives"), ([1, 1], "no negatives")])
def test_one_class_is_an_error(labels: list[int], kind: str) -> None:
    with pytest.raises(DatasetError, match=kind):
        click_metrics(labels, [0.1, 0.2])


@pytest.mark.parametrize("label", [0, 1])
def test_xlearn_217_an_evaluation_of_one_class(label):
    with pytest.raises(
        DatasetError, match=f"has no {'positives' if label == 0 else 'negatives'}: AUC does not"
    ):
        click_metrics([label] * 5, [0.0] * 5)
