import numpy as np
import pytest
import torch
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.models.dlrm import DLRM, build_dlrm
from recsys_tpu.models.interaction import DotInteraction

DIM, DENSE, BATCH = 8, 5, 6


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=20, feature_names=[name])
            for name in ("a", "b", "c")
        ]
    )


def batch() -> tuple[torch.Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (3 * BATCH,), generator=generator)
    ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(BATCH, DENSE, generator=generator)
    return dense, KeyedJaggedTensor(keys=["a", "b", "c"], values=ids, lengths=lengths)


def test_equal_to_torchrec_in_values_gradients_and_state_dict() -> None:
    torch.manual_seed(1)
    ours = DLRM(tables(), dense_in_features=DENSE, bottom_mlp=[16], over_mlp=[12, 7])
    theirs = torchrec_dlrm.DLRM(tables(), DENSE, [16, DIM], [12, 7, 1])
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    dense, sparse = batch()
    a, b = ours(dense, sparse), theirs(dense, sparse).squeeze(-1)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    a.square().sum().backward()
    b.square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-5, atol=1e-7)


def test_interaction_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn(BATCH, DIM, generator=generator, dtype=torch.float64)
    sparse = torch.randn(BATCH, 3, DIM, generator=generator, dtype=torch.float64)
    found = DotInteraction(3)(dense, sparse).numpy()
    vectors = np.concatenate([dense.numpy()[:, None], sparse.numpy()], axis=1)
    for sample in range(BATCH):
        dots = [vectors[sample, i] @ vectors[sample, j] for i in range(4) for j in range(i + 1, 4)]
        np.testing.assert_allclose(found[sample], [*vectors[sample, 0], *dots], rtol=1e-12)


@pytest.mark.parametrize("features", [1, 2, 5])
def test_interaction_gradients(features: int) -> None:
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    sparse = torch.randn(2, features, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DotInteraction(features), (dense, sparse))


def test_towers_compile_to_the_same_values() -> None:
    torch.manual_seed(1)
    model = DLRM(tables(), dense_in_features=DENSE, bottom_mlp=[16], over_mlp=[12])
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


def test_tables_of_a_built_model_have_no_storage_yet() -> None:
    model = build_dlrm(
        {"x": 10**12, "y": 4}, embedding_dim=DIM, dense_in_features=2, bottom_mlp=[4], over_mlp=[4]
    )
    weights = dict(model.named_parameters())
    table = weights["sparse_arch.embedding_bag_collection.embedding_bags.t_x.weight"]
    assert table.is_meta
    assert table.shape == (10**12, DIM)
