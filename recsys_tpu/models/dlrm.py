"""DLRM on a TorchRec EmbeddingBagCollection, split so that the dense part is one function.

Lookups depend on how many ids a batch holds, the towers do not: `DLRM.towers` has static shapes and is
what gets compiled.  Parameter names are those of `torchrec.models.dlrm.DLRM`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.models.interaction import DotInteraction


class DLRM(torchrec_dlrm.DLRM):
    """Deep Learning Recommendation Model (arXiv:1906.00091).

    Args:
        embedding_bag_collection: tables, all of the same dim; may be on the meta device.
        dense_in_features: number of dense features.
        bottom_mlp: hidden layers of the bottom MLP; a last layer of the embedding dim is added.
        over_mlp: hidden layers of the over MLP; a last layer of one logit is added.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        *,
        dense_in_features: int,
        bottom_mlp: Sequence[int],
        over_mlp: Sequence[int],
    ) -> None:
        dim = embedding_bag_collection.embedding_bag_configs()[0].embedding_dim
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            [*bottom_mlp, dim],
            [*over_mlp, 1],
        )
        self.inter_arch = DotInteraction(len(self.sparse_arch.sparse_feature_names))
        self._compiled_towers: Callable[[Tensor, Tensor], Tensor] = self.towers

    def compile_towers(self, compiler: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Run the dense part through `compiler` (such as torch.compile) from now on."""
        self._compiled_towers = compiler(self.towers)

    def towers(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """``[B, dense features]`` and ``[B, F, D]`` to logits ``[B]``."""
        bottom = self.dense_arch(dense)
        return self.over_arch(self.inter_arch(bottom, embedded)).squeeze(-1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits ``[B]`` of a batch."""
        return self._compiled_towers(dense_features, self.sparse_arch(sparse_features))


def build_dlrm(
    num_embeddings: Mapping[str, int],
    *,
    embedding_dim: int,
    dense_in_features: int,
    bottom_mlp: Sequence[int],
    over_mlp: Sequence[int],
) -> DLRM:
    """A DLRM with one SUM-pooled table ``t_<feature>`` for each feature; tables on the meta device.

    Tables get their storage, and their first values, where they are placed.
    """
    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t_{feature}",
                embedding_dim=embedding_dim,
                num_embeddings=rows,
                feature_names=[feature],
            )
            for feature, rows in num_embeddings.items()
        ],
    )
    return DLRM(tables, dense_in_features=dense_in_features, bottom_mlp=bottom_mlp, over_mlp=over_mlp)
