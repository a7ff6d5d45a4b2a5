"""The model that a config asks for, its tables on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from recsys_tpu.models.click_model import ClickModel, sum_pooled_tables
from recsys_tpu.models.dcnv2 import DCNv2
from recsys_tpu.models.deepfm import DeepFM
from recsys_tpu.models.dlrm import DLRM, DLRMDCNv2
from recsys_tpu.models.settings import DCNv2Config, DeepFMConfig, DLRMConfig, DLRMDCNv2Config

AnyClickModelConfig = DLRMConfig | DLRMDCNv2Config | DeepFMConfig | DCNv2Config


def build_click_model(
    config: AnyClickModelConfig, num_embeddings: Mapping[str, int], *, dense_in_features: int
) -> ClickModel:
    """A click model with one SUM-pooled table ``t_<feature>`` for each feature.

    Args:
        config: the `model` section.
        num_embeddings: rows of each table, by feature.
        dense_in_features: number of dense features.
    """
    tables = sum_pooled_tables(num_embeddings, config.embedding_dim)
    match config:
        case DLRMConfig():
            return DLRM(
                tables,
                dense_in_features=dense_in_features,
                bottom_mlp=config.bottom_mlp,
                over_mlp=config.over_mlp,
            )
        case DLRMDCNv2Config():
            return DLRMDCNv2(
                tables,
                dense_in_features=dense_in_features,
                bottom_mlp=config.bottom_mlp,
                over_mlp=config.over_mlp,
                cross_layers=config.cross_layers,
                cross_rank=config.cross_rank,
            )
        case DeepFMConfig():
            return DeepFM(tables, dense_in_features=dense_in_features, mlp=config.mlp)
        case DCNv2Config():
            return DCNv2(
                tables,
                dense_in_features=dense_in_features,
                mlp=config.mlp,
                cross_layers=config.cross_layers,
                cross_rank=config.cross_rank,
                structure=config.structure,
            )
        case _:
            assert_never(config)
