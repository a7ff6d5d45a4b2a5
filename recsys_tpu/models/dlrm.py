"""DLRM and DLRM-DCNv2 on a TorchRec EmbeddingBagCollection.

Parameter names are those of `torchrec.models.dlrm.DLRM` and `DLRM_DCN`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsys_tpu.models.click_model import ClickModel, SparseArch
from recsys_tpu.models.interaction import DotInteraction


class DLRM(ClickModel, torchrec_dlrm.DLRM):
    """Deep Learning Recommendation Model (arXiv:1906.00091).

    Args:
        embedding_bag_collection: tables, all of the same dim; may be on the meta device.
        dense_in_features: number of dense features.
        bottom_mlp: hidden layers of the bottom MLP; a last layer of the embedding dim is added.
        over_mlp: hidden layers of the over MLP; a last layer of one logit is added.
    """

    dense_arch: torchrec_dlrm.DenseArch
    over_arch: torchrec_dlrm.OverArch

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        *,
        dense_in_features: int,
        bottom_mlp: Sequence[int],
        over_mlp: Sequence[int],
    ) -> None:
        torchrec_dlrm.DLRM.__init__(
            self,
            embedding_bag_collection,
            dense_in_features,
            [*bottom_mlp, _dim(embedding_bag_collection)],
            [*over_mlp, 1],
        )
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.inter_arch = DotInteraction(self.sparse_arch.F)

    def towers(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """``[B, dense features]`` and ``[B, F, D]`` to logits ``[B]``."""
        return self.over_arch(self.inter_arch(self.dense_arch(dense), embedded)).squeeze(-1)


class DLRMDCNv2(ClickModel, torchrec_dlrm.DLRM_DCN):
    """DLRM whose interaction is a stack of low-rank cross layers, as MLPerf training v2 has it.

    ``x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l`` on the bottom MLP's output and all embeddings side by
    side, ``(F + 1) D`` numbers (arXiv:2008.13535, equation 2 with W of low rank).

    Args:
        embedding_bag_collection, dense_in_features, bottom_mlp, over_mlp: as those of `DLRM`.
        cross_layers: number of cross layers.
        cross_rank: rank of ``W_l V_l``.
    """

    dense_arch: torchrec_dlrm.DenseArch
    inter_arch: torchrec_dlrm.InteractionDCNArch
    over_arch: torchrec_dlrm.OverArch

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        *,
        dense_in_features: int,
        bottom_mlp: Sequence[int],
        over_mlp: Sequence[int],
        cross_layers: int,
        cross_rank: int,
    ) -> None:
        torchrec_dlrm.DLRM_DCN.__init__(
            self,
            embedding_bag_collection,
            dense_in_features,
            [*bottom_mlp, _dim(embedding_bag_collection)],
            [*over_mlp, 1],
            cross_layers,
            cross_rank,
        )
        self.sparse_arch = SparseArch(embedding_bag_collection)

    def towers(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """``[B, dense features]`` and ``[B, F, D]`` to logits ``[B]``."""
        return self.over_arch(self.inter_arch(self.dense_arch(dense), embedded)).squeeze(-1)


def _dim(tables: EmbeddingBagCollection) -> int:
    return tables.embedding_bag_configs()[0].embedding_dim
