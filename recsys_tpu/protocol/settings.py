"""The `protocol` section of a config. No torch is imported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from recsys_tpu.config_section import PositiveInt, Section

Comparison = Literal["mlperf_v2", "mlperf_v1", "criteo_x1", "criteo_x4", "criteo_kaggle"]


class SubmissionConfig(Section):
    """What an mlperf-logging file says of the submission."""

    benchmark: str = "dlrm_dcnv2"
    org: str = Field("recsys_tpu", min_length=1)
    platform: str = Field("unnamed platform", min_length=1)
    division: Literal["closed", "open"] = "open"
    status: Literal["onprem", "cloud", "research", "preview"] = "research"


class ProtocolConfig(Section):
    """Evaluation points, target and logs of a benchmark."""

    evaluations_per_epoch: PositiveInt | None = Field(
        None,
        description="evaluate every floor(training rows / (batch * this)) steps, as MLPerf does; in place of "
        "train.eval_every",
    )
    target_auc: float | None = Field(
        None, gt=0.5, lt=1.0, description="stop at the first evaluation that reaches it"
    )
    mllog: SubmissionConfig | None = Field(
        None, description="write mllog.txt in mlperf-logging's format (pip install 'recsys-tpu[mlperf]')"
    )
    compare_with: Comparison | None = Field(
        None, description="published results that the report puts beside the run's"
    )
