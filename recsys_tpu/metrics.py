"""Click-prediction metrics over a whole evaluation set, exact in float64.

AUC is the Mann-Whitney statistic with ties counted half (scikit-learn); normalized entropy is log loss
over the entropy of the constant predictor (He et al., 2014, "Practical Lessons from Predicting Clicks on
Ads at Facebook"); calibration is the sum of predictions over the sum of labels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from sklearn.metrics import roc_auc_score

from recsys_tpu.data.metadata import DatasetError


@dataclass(frozen=True)
class ClickMetrics:
    """What one evaluation found."""

    auc: float
    log_loss: float
    normalized_entropy: float
    calibration: float
    rows: int
    positives: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"AUC {self.auc:.5f}  log loss {self.log_loss:.5f}  NE {self.normalized_entropy:.5f}  "
            f"calibration {self.calibration:.4f}"
        )


def click_metrics(labels: npt.ArrayLike, logits: npt.ArrayLike) -> ClickMetrics:
    """Metrics of predicted `logits` ``[N]`` for 0/1 `labels` ``[N]``.

    Raises:
        DatasetError: the labels are all the same, so that AUC and normalized entropy do not exist.
    """
    y = np.asarray(labels, np.float64)
    x = np.asarray(logits, np.float64)
    rows, positives = len(y), int(y.sum())
    return metrics_from_sums(
        auc=float(roc_auc_score(y, x)) if 0 < positives < rows else None,
        # log(1 + exp(x)) - y x, stable for either sign of x
        loss=float(np.sum(np.logaddexp(0.0, x) - y * x)),
        predictions=float(np.sum(0.5 * (1 + np.tanh(0.5 * x)))),
        rows=rows,
        positives=positives,
    )


def metrics_from_sums(
    *, auc: float | None, loss: float, predictions: float, rows: int, positives: int
) -> ClickMetrics:
    """Metrics from sums over rows: of the log loss and of the predicted probabilities.

    Raises:
        DatasetError: the labels are all the same, so that AUC and normalized entropy do not exist.
    """
    if positives in (0, rows) or auc is None:
        kind = "no positives" if positives == 0 else "no negatives"
        raise DatasetError(
            f"the evaluation set of {rows:,} rows has {kind}: AUC does not exist; take more rows"
        )
    rate = positives / rows
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return ClickMetrics(
        auc=auc,
        log_loss=loss / rows,
        normalized_entropy=float(loss / rows / entropy),
        calibration=predictions / positives,
        rows=rows,
        positives=positives,
    )
