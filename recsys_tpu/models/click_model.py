"""What the click models share: tables, a lookup, and towers of static shapes that are compiled apart.

Lookups depend on how many ids a batch holds, the towers do not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Towers = Callable[[Tensor, Tensor], Tensor]


class SparseArch(torchrec_dlrm.SparseArch):
    """TorchRec's lookups of a model, but no copy where the columns come in the order of the features."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """``[B, F, D]``."""
        pooled = self.embedding_bag_collection(features)
        if list(pooled.keys()) == self.sparse_feature_names:
            columns = pooled.values()
        else:
            columns = torch.cat([pooled[name] for name in self.sparse_feature_names], dim=1)
        embedded: Tensor = columns.reshape(-1, self.F, self.D)
        return embedded


class ClickModel(nn.Module):
    """A model of dense features and one embedding of each sparse feature, giving one logit.

    Attributes:
        sparse_arch: the lookups, ``[B, F, D]``; it has `embedding_bag_collection`, with every table.
    """

    sparse_arch: SparseArch
    _compiled_towers: Towers | None = None

    @abstractmethod
    def towers(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """``[B, dense features]`` and ``[B, F, D]`` to logits ``[B]``."""

    def compile_towers(self, compiler: Callable[[Towers], Towers]) -> None:
        """Run the dense part through `compiler` (such as torch.compile) from now on."""
        self._compiled_towers = compiler(self.towers)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits ``[B]`` of a batch."""
        towers = self._compiled_towers or self.towers
        return towers(dense_features, self.sparse_arch(sparse_features))


def sum_pooled_tables(num_embeddings: Mapping[str, int], embedding_dim: int) -> EmbeddingBagCollection:
    """One SUM-pooled table ``t_<feature>`` for each feature, on the meta device.

    Tables get their storage, and their first values, where they are placed.
    """
    return EmbeddingBagCollection(
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
