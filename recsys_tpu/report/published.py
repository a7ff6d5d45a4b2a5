"""Published results on Criteo's data, with their sources and the rows that they are about."""

from __future__ import annotations

from dataclasses import dataclass

from recsys_tpu.protocol.settings import Comparison


@dataclass(frozen=True)
class Result:
    """One published row; None where the source gives no such figure."""

    name: str
    auc: float | None
    log_loss: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Published:
    """Results that are comparable with each other.

    Attributes:
        train_rows, eval_rows: rows of the splits; a run on other rows is not comparable.
        source: where the figures are from.
    """

    title: str
    train_rows: int
    eval_rows: int
    source: str
    results: tuple[Result, ...]


_BARS = "reczoo/BARS 5b5e61f, ranking/ctr"
_MLPERF = "mlcommons/training aa344c7, recommendation_v2/torchrec_dlrm"
_TERABYTE_TRAIN, _TERABYTE_EVAL = 4_195_197_692, 89_137_319

PUBLISHED: dict[Comparison, Published] = {
    "mlperf_v2": Published(
        "MLPerf training v2, DLRM-DCNv2, Criteo 1TB multi-hot, first half of day 23",
        _TERABYTE_TRAIN,
        _TERABYTE_EVAL,
        f"{_MLPERF}/README.MD; convergence points of the reference at batch 65,536, rate 0.004",
        (Result("target", 0.80275, note="reached after 0.793 epochs on average by the reference"),),
    ),
    "mlperf_v1": Published(
        "MLPerf training v0.7 to v2.1, DLRM, Criteo 1TB, first half of day 23",
        _TERABYTE_TRAIN,
        _TERABYTE_EVAL,
        f"facebookresearch/dlrm 090956e, bench/run_and_time.sh; {_MLPERF}/README.MD",
        (
            Result("target", 0.8025),
            Result("TorchRec, batch 2,048, rate 1.0, one epoch", 0.80325, note="other table sizes"),
        ),
    ),
    "criteo_x1": Published(
        "BARS Criteo_x1, embedding dim 10",
        33_003_326,
        4_587_167,
        _BARS,
        (
            Result("LR", 0.7886, 0.4609),
            Result("FM", 0.8022, 0.4491),
            Result("DNN", 0.8137, 0.4382),
            Result("DeepFM", 0.8137, 0.4381),
            Result("DCNv2", 0.8142, 0.4378),
            Result("DLRM", 0.8138, 0.4382),
            Result("FinalNet", 0.8154, 0.4365),
        ),
    ),
    "criteo_x4": Published(
        "BARS Criteo_x4_001, embedding dim 16",
        36_672_493,
        4_584_062,
        _BARS,
        (
            Result("LR", 0.7934, 0.4568),
            Result("FM", 0.8086, 0.4431),
            Result("DNN", 0.8140, 0.4380),
            Result("DeepFM", 0.8143, 0.4376),
            Result("DCNv2", 0.8145, 0.4376),
            Result("FinalNet", 0.8150, 0.4371),
        ),
    ),
    "criteo_kaggle": Published(
        "facebookresearch/dlrm on Kaggle's data, first half of the seventh day",
        39_291_958,
        3_274_330,
        "facebookresearch/dlrm 090956e, README.md",
        (Result("DLRM", None, note="accuracy of about 79 % in a plot; no AUC is published"),),
    ),
}
