import numpy as np
import pytest
import torch

from recsys_tpu.models.interaction import DotInteraction

DIM, BATCH = 8, 6


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
