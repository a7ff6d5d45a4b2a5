"""On a rank: a TorchRec program as its user wrote it for GPUs; only the sharders differ."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.embedding_bag_collection import TpuEmbeddingBagCollectionSharder
from recsys_tpu.sharding.embedding_collection import TpuEmbeddingCollectionSharder
from tests.sharding.sharded import pieces

DENSE, DIM, ROWS = 5, 8, {"user": 50, "item": 300, "shop": 3}


class UsersOwn(nn.Module):
    """Pooled embeddings and a sequence of unpooled ones, deep inside a module."""

    def __init__(self) -> None:
        super().__init__()
        sequence = EmbeddingConfig(
            name="history", num_embeddings=300, embedding_dim=DIM, feature_names=["item"]
        )
        self.parts = nn.ModuleDict(
            {
                "bags": _bags(),
                "history": EmbeddingCollection(tables=[sequence]),
                "dense": nn.Linear(DENSE, DIM),
            }
        )
        self.head = nn.Linear(DIM * 5, 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        bags = self.parts["bags"](sparse).values()
        history = self.parts["history"](sparse)["item"]
        count = int(history.offsets()[-1])
        sample = torch.repeat_interleave(history.lengths())
        summed = torch.zeros(len(dense), DIM).index_add(0, sample, history.values()[:count])
        return self.head(torch.cat([bags, summed, self.parts["dense"](dense)], dim=1))


def _bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ]
    )


MODELS = {
    "torchrec.models.dlrm": lambda: DLRM(
        _bags(), dense_in_features=DENSE, dense_arch_layer_sizes=[16, DIM], over_arch_layer_sizes=[16, 1]
    ),
    "torchrec.models.deepfm": lambda: SimpleDeepFMNN(
        DENSE, _bags(), hidden_layer_size=16, deep_fm_dimension=4
    ),
    "a user's own": UsersOwn,
}


def train(runtime: Runtime) -> dict[str, dict[bool, Any]]:
    """Losses and state_dict of each model, by whether the sharders are ours."""
    return {name: {ours: _train(runtime, name, ours=ours) for ours in (False, True)} for name in MODELS}


def _train(runtime: Runtime, name: str, *, ours: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    model = MODELS[name]()
    with torch.no_grad():  # the same, whatever plans TorchRec's planner gives the two runs
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    collections = [m for m in model.modules() if isinstance(m, EmbeddingBagCollection | EmbeddingCollection)]
    for collection in collections:
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    if ours:
        sharders = [TpuEmbeddingBagCollectionSharder(), TpuEmbeddingCollectionSharder()]
    else:
        sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    # Column shards have sums of squares of their own: only for the same plan are two runs the same.
    allowed = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        Topology(runtime.world_size, compute_device="cpu"),
        constraints=dict.fromkeys([*ROWS, "history"], allowed),
    )
    plan = planner.collective_plan(model, sharders, runtime.process_group)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dmp.load_state_dict(weights)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.SGD(p, lr=0.05)
    )
    optimizer = CombinedOptimizer([dmp.fused_optimizer, dense])
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * runtime.rank + step)
        lengths = torch.randint(0, 4, (len(ROWS) * 8,), generator=generator)
        values = [
            torch.randint(0, rows, (int(lengths[8 * index : 8 * index + 8].sum()),), generator=generator)
            for index, rows in enumerate(ROWS.values())
        ]
        sparse = KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(values), lengths=lengths)
        features = torch.randn(8, DENSE, generator=generator)
        logits = dmp(features, sparse).reshape(-1)
        loss = F.binary_cross_entropy_with_logits(logits, (features[:, 0] > 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "state": {key: pieces(value) for key, value in dmp.state_dict().items()}}
