"""The same training twice: sharded on ranks, and unsharded in one process with optimizers written here.

The unsharded run is plain `EmbeddingBagCollection` with dense gradients, and formulas of its own for the
optimizers, applied to the rows that the batch touched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SHARDED = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard")


@dataclass(frozen=True)
class Table:
    rows: int
    dim: int
    features: tuple[str, ...]
    sharding: str
    ranks: tuple[int, ...] = (0,)
    mean: bool = False


@dataclass(frozen=True)
class Case:
    tables: tuple[Table, ...]
    optimizer: str = "rowwise_adagrad"
    rate: float = 0.05
    steps: int = 20
    batch: int = 12  # over all ranks
    longest_bag: int = 3
    weighted: bool = False
    same_id: bool = False
    seed: int = 0
    split_columns: tuple[str, ...] = (
        "column_wise",
    )  # types that make a column shard of each of a table's ranks
    ahead: int = 0  # batches that the host prepares ahead
    deduplicate: bool = False  # before the exchange
    max_norm: float | None = None  # of all gradients together
    decaying: bool = False  # learning rate
    bf16: bool = False

    def rate_of(self, step: int) -> float:
        return self.rate / (1 + step) if self.decaying else self.rate

    @property
    def features(self) -> list[str]:
        return sorted({name for table in self.tables for name in table.features})


def configs(case: Case) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            name=f"t{index}",
            feature_names=list(table.features),
            pooling=PoolingType.MEAN if table.mean else PoolingType.SUM,
            data_type=DataType.BF16 if case.bf16 else DataType.FP32,
        )
        for index, table in enumerate(case.tables)
    ]


def initial_tables(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    return {
        f"embedding_bags.t{index}.weight": stored(
            case, torch.randn(table.rows, table.dim, generator=generator) * 0.3
        )
        for index, table in enumerate(case.tables)
    }


def stored(case: Case, values: Tensor) -> Tensor:
    """Float32 values as the case's tables hold them."""
    return values.bfloat16().float() if case.bf16 else values


class Model(nn.Module):
    """Embeddings and one fixed projection: the loss of a sample is the square of its projected embeddings."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device(device), tables=configs(case), is_weighted=case.weighted
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.ebc(features).values()


def loss_of(values: Tensor, names: list[str], columns: dict[str, int]) -> Tensor:
    """Mean over samples of a quadratic form; columns of each embedding are found by name.

    Taken in float64 on the host, of float32 values: a sample's terms cancel, so that float32 sums of them say
    no more than four or five digits of a loss that has come down from 400 to 1, in whatever order they are
    taken.
    """
    pieces = torch.split(values.cpu().double(), [columns[name] for name in names], dim=1)
    total = torch.zeros(values.shape[0], dtype=torch.float64)
    for name, piece in zip(names, pieces, strict=True):
        seed = sum(map(ord, name))
        direction = torch.tensor(np.random.default_rng(seed).normal(size=piece.shape[1]), dtype=torch.float32)
        total = total + piece @ direction.double()
    return (total - 1).square().mean()


def batch_of(case: Case, step: int, rank: int = 0, world: int = 1) -> KeyedJaggedTensor:
    """A rank's part of a step's batch (the same for every world size): bags of 0 to `longest_bag` ids."""
    rng = np.random.default_rng([case.seed, step])
    samples = case.batch // world
    mine = slice(rank * samples, (rank + 1) * samples)
    values, lengths, weights = [], [], []
    for feature in case.features:
        rows = min(table.rows for table in case.tables if feature in table.features)
        bags = rng.integers(0, case.longest_bag + 1, case.batch)
        ids = rng.integers(0, rows, bags.sum())
        ids = np.full_like(ids, rows - 1) if case.same_id else ids
        scale = rng.uniform(0.5, 2.0, len(ids)).astype(np.float32)
        ends = np.cumsum(bags)
        chosen = slice(int((ends - bags)[mine][0]), int(ends[mine][-1]))
        values.append(ids[chosen])
        weights.append(scale[chosen])
        lengths.append(bags[mine])
    return KeyedJaggedTensor(
        keys=case.features,
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
        weights=torch.from_numpy(np.concatenate(weights)) if case.weighted else None,
    )


def train_unsharded(case: Case) -> dict[str, Any]:
    """Losses, first outputs, tables and optimizer states after `case.steps` steps in one process."""
    model = Model(replace(case, bf16=False))
    model.ebc.load_state_dict(initial_tables(case))
    states: dict[str, dict[str, Tensor]] = {name: {} for name in model.ebc.state_dict()}
    losses = []
    first = None
    for step in range(case.steps):
        features = batch_of(case, step)
        output = model.ebc(features)
        names = output.keys()
        first = {key: output[key].detach().clone() for key in names} if first is None else first
        columns = dict(zip(names, output.length_per_key(), strict=True))
        loss = loss_of(output.values(), names, columns)
        model.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        for index, table in enumerate(case.tables):
            name = f"embedding_bags.t{index}.weight"
            parameter = dict(model.ebc.named_parameters())[name]
            ids = torch.cat([features[feature].values() for feature in table.features]).unique()
            with torch.no_grad():
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                shards = len(table.ranks) if table.sharding in case.split_columns else 1
                update(case, parameter, gradient, ids, states[name], step=step + 1, shards=shards)
    return {
        "losses": losses,
        "first": first,
        "tables": {name: value.detach().clone() for name, value in model.ebc.state_dict().items()},
        "states": states,
    }


def update(
    case: Case,
    table: Tensor,
    gradient: Tensor,
    rows: Tensor,
    state: dict[str, Tensor],
    *,
    step: int,
    shards: int,
) -> None:
    """One step of the case's optimizer on `rows`, from the formulas of the papers.  shards: column shards."""
    g, rate = gradient[rows].double(), case.rate_of(step - 1)
    if case.optimizer == "sgd":
        change = g
    elif case.optimizer == "rowwise_adagrad":
        # As FBGEMM's, a column shard is a row of its own: its mean square is that of its columns.
        blocks = g.view(len(rows), shards, g.shape[1] // shards)
        total = state.setdefault("momentum1", torch.zeros(shards, table.shape[0], dtype=torch.float64))
        total[:, rows] += blocks.square().mean(2).T
        change = (blocks / (total[:, rows].sqrt() + 1e-8).T[:, :, None]).view(g.shape)
    elif case.optimizer == "adagrad":
        total = state.setdefault("momentum1", torch.zeros(table.shape, dtype=torch.float64))
        total[rows] += g.square()
        change = g / (total[rows].sqrt() + 1e-8)
    elif case.optimizer == "ftrl":
        z = state.setdefault("momentum1", torch.zeros(table.shape, dtype=torch.float64))
        n = state.setdefault("n", torch.zeros(table.shape, dtype=torch.float64))
        sigma = ((n[rows] + g.square()).sqrt() - n[rows].sqrt()) / rate
        z[rows] += g - sigma * table[rows].double()
        n[rows] += g.square()
        table[rows] = stored(case, (-z[rows] * rate / (1 + n[rows].sqrt())).float())
        return
    else:
        assert case.optimizer == "adam"
        m = state.setdefault("momentum1", torch.zeros(table.shape, dtype=torch.float64))
        v = state.setdefault("exp_avg_sq", torch.zeros(table.shape, dtype=torch.float64))
        m[rows] = 0.9 * m[rows] + 0.1 * g
        v[rows] = 0.999 * v[rows] + 0.001 * g.square()
        change = (m[rows] / (1 - 0.9**step)) / ((v[rows] / (1 - 0.999**step)).sqrt() + 1e-8)
    table[rows] = stored(case, (table[rows].double() - rate * change).float())


def assembled(ranks: list[list[tuple[list[int], Tensor]]], shape: torch.Size) -> Tensor:
    """A whole tensor from the pieces of all ranks.  Every element must be in exactly one piece."""
    whole = torch.full(shape, float("nan"))
    covered = torch.zeros(shape)
    for offsets, piece in (piece for pieces in ranks for piece in pieces):
        where = tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))
        whole[where] = piece.float()
        covered[where] += 1
    assert (covered == 1).all(), "pieces overlap or leave holes"
    return whole
