"""The `model` section of a config for the click models: kinds, sizes, defaults. No torch is imported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from recsys_tpu.config_section import PositiveInt, Section


class ClickModelConfig(Section):
    """What every click model has: one table of `embedding_dim` for each feature."""

    embedding_dim: PositiveInt = 16
    num_embeddings: dict[str, PositiveInt] | None = Field(
        None, description="rows of each table, by feature; default: as many as the data needs"
    )


class DLRMConfig(ClickModelConfig):
    """DLRM (arXiv:1906.00091): bottom MLP, pairwise dot interaction, over MLP."""

    kind: Literal["dlrm"] = "dlrm"
    bottom_mlp: list[PositiveInt] = Field(
        default_factory=lambda: [128, 64], description="hidden layers; embedding_dim follows"
    )
    over_mlp: list[PositiveInt] = Field(
        default_factory=lambda: [256, 128], description="hidden layers; the single logit follows"
    )


class DLRMDCNv2Config(ClickModelConfig):
    """DLRM-DCNv2 (MLPerf training v2): DLRM with low-rank cross layers for its interaction."""

    kind: Literal["dlrm_dcnv2"]
    bottom_mlp: list[PositiveInt] = Field(
        default_factory=lambda: [128, 64], description="hidden layers; embedding_dim follows"
    )
    over_mlp: list[PositiveInt] = Field(
        default_factory=lambda: [256, 128], description="hidden layers; the single logit follows"
    )
    cross_layers: PositiveInt = 3
    cross_rank: PositiveInt = Field(64, description="rank of each cross layer's matrix")


class DeepFMConfig(ClickModelConfig):
    """DeepFM (arXiv:1703.04247): factorization machine and an MLP on the same embeddings."""

    kind: Literal["deepfm"]
    mlp: list[PositiveInt] = Field(
        default_factory=lambda: [256, 128], min_length=1, description="hidden layers of the deep part"
    )


class DCNv2Config(ClickModelConfig):
    """DCN-V2 (arXiv:2008.13535): cross layers and an MLP on dense features and embeddings."""

    kind: Literal["dcnv2"]
    mlp: list[PositiveInt] = Field(
        default_factory=lambda: [256, 128], min_length=1, description="hidden layers of the deep part"
    )
    cross_layers: PositiveInt = 3
    cross_rank: PositiveInt | None = Field(None, description="rank of each cross matrix; null: full matrices")
    structure: Literal["parallel", "stacked"] = Field(
        "parallel", description="the MLP reads the input beside the cross layers, or their output"
    )
