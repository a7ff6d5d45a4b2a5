"""Models that are not ours train with our sharders in TorchRec's place: one line changes, nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.sharding.ranks import on_ranks

Trained = list[dict[str, dict[bool, Any]]]  # by rank, model, whether the sharders are ours

MODELS = ("torchrec.models.dlrm", "torchrec.models.deepfm", "a user's own")


@pytest.fixture(scope="module")
def trained() -> Trained:
    return on_ranks("tests.sharding.foreign_models:train", 2, "cpu")


@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_torchrecs_sharders(trained: Trained, model: str) -> None:
    """FBGEMM's fused row-wise Adagrad behind TorchRec's sharders is the reference; plans are TorchRec's."""
    for rank in trained:
        theirs, ours = rank[model][False], rank[model][True]
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-5)
        assert ours["state"].keys() == theirs["state"].keys()
    for key in trained[0][model][True]["state"]:
        theirs, ours = (_whole([rank[model][side]["state"][key] for rank in trained]) for side in (0, 1))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _whole(ranks: list[list[tuple[list[int], torch.Tensor]]]) -> torch.Tensor:
    """A tensor from the pieces of all ranks, of which replicated ones overlap."""
    found = [piece for pieces in ranks for piece in pieces]
    ends = [[start + size for start, size in zip(at, part.shape, strict=True)] for at, part in found]
    shape = np.max(ends, 0)
    whole = torch.full(tuple(int(size) for size in shape), float("nan"))
    for at, part in found:
        whole[tuple(slice(start, start + size) for start, size in zip(at, part.shape, strict=True))] = part
    assert not whole.isnan().any()
    return whole
