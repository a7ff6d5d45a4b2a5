"""Every click model against TorchRec's modules and against its formula in numpy, in float64."""

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.crossnet import CrossNet
from torchrec.modules.deepfm import FactorizationMachine
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.models.build import build_click_model
from recsys_tpu.models.dcnv2 import DCNv2, FullRankCrossNet
from recsys_tpu.models.deepfm import DeepFM, second_order
from recsys_tpu.models.dlrm import DLRM, DLRMDCNv2
from recsys_tpu.models.settings import DCNv2Config, DeepFMConfig, DLRMConfig, DLRMDCNv2Config

DIM, DENSE, BATCH, ROWS = 8, 5, 6, 20
KEYS = ["a", "b", "c"]


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
            for name in KEYS
        ]
    )


def batch() -> tuple[torch.Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (len(KEYS) * BATCH,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(BATCH, DENSE, generator=generator, dtype=torch.float64)
    return dense, KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths)


MODELS = {
    "dlrm": lambda: DLRM(tables(), dense_in_features=DENSE, bottom_mlp=[16], over_mlp=[12, 7]),
    "dlrm_dcnv2": lambda: DLRMDCNv2(
        tables(), dense_in_features=DENSE, bottom_mlp=[16], over_mlp=[12, 7], cross_layers=3, cross_rank=4
    ),
    "deepfm": lambda: DeepFM(tables(), dense_in_features=DENSE, mlp=[12, 7]),
    "dcnv2 parallel": lambda: DCNv2(
        tables(), dense_in_features=DENSE, mlp=[12, 7], cross_layers=2, cross_rank=None, structure="parallel"
    ),
    "dcnv2 stacked, low rank": lambda: DCNv2(
        tables(), dense_in_features=DENSE, mlp=[12], cross_layers=3, cross_rank=4, structure="stacked"
    ),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]().double()
    for parameter in model.parameters():  # biases that start at zero would hide that they are left out
        if parameter.dim() < 2 or parameter.shape[-1] == 1:
            nn.init.normal_(parameter)
    return model


class Formula:
    """The models written out in numpy on a state dict, one sample at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}

    def pooled(self, sparse: KeyedJaggedTensor) -> np.ndarray:
        """``[B, F, D]``: the sum of the rows of each bag."""
        ids, offsets = sparse.values().numpy(), sparse.offsets().numpy()
        result = np.zeros((BATCH, len(KEYS), DIM))
        for feature, name in enumerate(KEYS):
            table = self.weights[f"sparse_arch.embedding_bag_collection.embedding_bags.t_{name}.weight"]
            for sample in range(BATCH):
                bag = feature * BATCH + sample
                for row in ids[offsets[bag] : offsets[bag + 1]]:
                    result[sample, feature] += table[row]
        return result

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"]

    def mlp(self, name: str, layers: int, x: np.ndarray) -> np.ndarray:
        for layer in range(layers):
            x = np.maximum(self.linear(f"{name}._mlp.{layer}._linear", x), 0)
        return x

    def cross(self, name: str, layers: int, x0: np.ndarray) -> np.ndarray:
        x = x0
        for layer in range(layers):
            if f"{name}.kernels.{layer}" in self.weights:
                weight = self.weights[f"{name}.kernels.{layer}"]
            else:
                weight = self.weights[f"{name}.W_kernels.{layer}"] @ self.weights[f"{name}.V_kernels.{layer}"]
            x = x0 * (weight @ x + self.weights[f"{name}.bias.{layer}"].reshape(-1)) + x
        return x

    def logit(self, kind: str, x: np.ndarray, vectors: np.ndarray) -> float:
        if kind.startswith("dlrm"):
            vectors = np.concatenate([self.mlp("dense_arch.model", 2, x)[None], vectors])
            if kind == "dlrm":
                pairs = [
                    a @ b for i, a in enumerate(vectors) for j, b in enumerate(vectors) if j > i
                ]  # fmt: skip
                features = np.array([*vectors[0], *pairs])
            else:
                features = self.cross("inter_arch.crossnet", 3, vectors.reshape(-1))
            return self.linear("over_arch.model.1", self.mlp("over_arch.model.0", 2, features)).item()
        if kind == "deepfm":
            fields = np.concatenate([x[:, None] * self.weights["numeric_fields.weight"], vectors])
            pairs = sum(fields[i] @ fields[j] for i in range(len(fields)) for j in range(i))
            deep = self.mlp("deep.dense_module.0", 2, fields.reshape(-1))
            first, last = (
                self.linear("first_order", fields.reshape(-1)),
                self.linear("deep.dense_module.1", deep),
            )
            return (first + last).item() + pairs
        start = np.concatenate([x, vectors.reshape(-1)])
        if kind == "dcnv2 parallel":
            last = np.concatenate([self.cross("crossnet", 2, start), self.mlp("mlp", 2, start)])
        else:
            last = self.mlp("mlp", 1, self.cross("crossnet", 3, start))
        return self.linear("output", last).item()


@pytest.mark.parametrize("kind", MODELS)
def test_equal_to_its_formula(kind: str) -> None:
    model = build(kind)
    dense, sparse = batch()
    found = model(dense, sparse).detach().numpy()
    formula = Formula(model)
    expected = [formula.logit(kind, x, v) for x, v in zip(dense.numpy(), formula.pooled(sparse), strict=True)]
    # EmbeddingBagCollection pools in float32 whatever its weights are; all that follows is float64
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["dlrm", "dlrm_dcnv2"])
def test_equal_to_torchrec_in_values_gradients_and_state_dict(kind: str) -> None:
    ours = build(kind)
    if kind == "dlrm":
        theirs = torchrec_dlrm.DLRM(tables(), DENSE, [16, DIM], [12, 7, 1])
    else:
        theirs = torchrec_dlrm.DLRM_DCN(tables(), DENSE, [16, DIM], [12, 7, 1], 3, 4)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.double().load_state_dict(ours.state_dict())
    dense, sparse = batch()
    a, b = ours(dense, sparse), theirs(dense, sparse).squeeze(-1)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    a.square().sum().backward()
    b.square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-10, atol=1e-12)


def test_cross_layers_are_torchrecs() -> None:
    torch.manual_seed(2)
    ours, theirs = FullRankCrossNet(10, 3).double(), CrossNet(10, 3).double()
    for bias in ours.bias:
        nn.init.normal_(bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(BATCH, 10, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_second_order_is_torchrecs_machine_on_each_dim() -> None:
    fields = torch.randn(BATCH, 7, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    machine = FactorizationMachine()
    expected = sum(machine([fields[:, :, dim]]).squeeze(-1) for dim in range(DIM))
    torch.testing.assert_close(second_order(fields), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_towers_compile_to_the_same_values_in_one_graph(kind: str) -> None:
    model = build(kind)
    dense, sparse = batch()
    eager = model(dense, sparse)
    graphs = []

    def compiler(function):  # type: ignore[no-untyped-def]
        def backend(graph, _):  # type: ignore[no-untyped-def]
            graphs.append(graph)
            return graph.forward

        return torch.compile(function, backend=backend, fullgraph=True)

    model.compile_towers(compiler)
    torch.testing.assert_close(model(dense, sparse), eager)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (DLRMConfig(embedding_dim=DIM), DLRM),
        (DLRMDCNv2Config(kind="dlrm_dcnv2", embedding_dim=DIM), DLRMDCNv2),
        (DeepFMConfig(kind="deepfm", embedding_dim=DIM), DeepFM),
        (DCNv2Config(kind="dcnv2", embedding_dim=DIM), DCNv2),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_tables_of_a_built_model_have_no_storage_yet(config, kind) -> None:  # type: ignore[no-untyped-def]
    model = build_click_model(config, {"x": 10**12, "y": 4}, dense_in_features=2)
    assert isinstance(model, kind)
    weights = dict(model.named_parameters())
    table = weights["sparse_arch.embedding_bag_collection.embedding_bags.t_x.weight"]
    assert table.is_meta
    assert table.shape == (10**12, DIM)
