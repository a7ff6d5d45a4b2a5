"""Two towers on one TorchRec EmbeddingBagCollection: a query and an item become vectors of one space.

Tensor suffixes: R rows, Q query features, I item features, D embedding dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Tower(nn.Module):
    """Sum of the embedded features plus an MLP of them.

    The sum keeps the geometry of shared tables (a query near the items of its history) from the first
    step on; the last layer of the MLP starts at zero and learns what the sum lacks.

    Args:
        features: how many embedded features it takes.
        dim: their dim, and that of the output.
        hidden: layers of the MLP between input and output.
        dropout: probability that an element of the embedded features is zeroed in training.
    """

    def __init__(self, features: int, dim: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        sizes = [features * dim, *hidden]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        last = nn.Linear(sizes[-1], dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.mlp = nn.Sequential(*layers, last)

    def forward(self, embedded_RFD: Tensor) -> Tensor:
        """``[R, features, D]`` to ``[R, D]``."""
        embedded_RFD = self.dropout(embedded_RFD)
        return embedded_RFD.sum(1) + self.mlp(embedded_RFD.flatten(1))


class TwoTowerSparseArch(nn.Module):
    """Looks up and pools every feature."""

    def __init__(self, tables: EmbeddingBagCollection, features: Sequence[str]) -> None:
        super().__init__()
        self.embedding_bag_collection = tables
        self._features = list(features)

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        """``[R, features, D]`` in the order of the features."""
        pooled = self.embedding_bag_collection(sparse).to_dict()
        return torch.stack([pooled[name] for name in self._features], dim=1)


class TwoTower(nn.Module):
    """Query and item vectors whose inner product is the score.

    Args:
        tables: of one dim, mean-pooled.
        query_features, item_features: the features of each tower.
        query_mlp, item_mlp: hidden layers of the towers.
        dropout: see `Tower`.
        normalize: scale vectors to length 1, so that the product is the cosine.
    """

    def __init__(
        self,
        tables: EmbeddingBagCollection,
        *,
        query_features: Sequence[str],
        item_features: Sequence[str],
        query_mlp: Sequence[int],
        item_mlp: Sequence[int],
        dropout: float,
        normalize: bool,
    ) -> None:
        super().__init__()
        dim = tables.embedding_bag_configs()[0].embedding_dim
        self.sparse_arch = TwoTowerSparseArch(tables, [*query_features, *item_features])
        self.query_tower = Tower(len(query_features), dim, query_mlp, dropout)
        self.item_tower = Tower(len(item_features), dim, item_mlp, dropout)
        self._query_features = len(query_features)
        self._normalize = normalize
        self._compiled_towers: Callable[[Tensor], tuple[Tensor, Tensor]] = self.towers

    def compile_towers(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Run the dense part through `compiler` (such as torch.compile) from now on."""
        self._compiled_towers = compiler(self.towers)

    def towers(self, embedded_RFD: Tensor) -> tuple[Tensor, Tensor]:
        """``[R, Q + I, D]`` to query and item vectors ``[R, D]``."""
        query_RD = self.query_tower(embedded_RFD[:, : self._query_features])
        item_RD = self.item_tower(embedded_RFD[:, self._query_features :])
        if self._normalize:
            query_RD = nn.functional.normalize(query_RD, dim=-1)
            item_RD = nn.functional.normalize(item_RD, dim=-1)
        return query_RD, item_RD

    def forward(self, sparse: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Query and item vectors ``[R, D]`` of the rows; a row may have features of one side only."""
        return self._compiled_towers(self.sparse_arch(sparse))


def build_two_tower(
    tables: Mapping[str, tuple[int, Sequence[str]]],
    *,
    embedding_dim: int,
    query_features: Sequence[str],
    item_features: Sequence[str],
    query_mlp: Sequence[int],
    item_mlp: Sequence[int],
    dropout: float,
    normalize: bool,
) -> TwoTower:
    """A `TwoTower` with tables on the meta device, given as name: (rows, features that read it).

    Tables get their storage, and their first values, where they are placed.
    """
    collection = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=embedding_dim,
                num_embeddings=rows,
                feature_names=list(features),
                pooling=PoolingType.MEAN,
            )
            for name, (rows, features) in tables.items()
        ],
    )
    return TwoTower(
        collection,
        query_features=query_features,
        item_features=item_features,
        query_mlp=query_mlp,
        item_mlp=item_mlp,
        dropout=dropout,
        normalize=normalize,
    )
