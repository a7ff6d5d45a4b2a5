"""The first bad tensor, loss spikes and gradient norms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from recsys_tpu.errors import TrainingDivergedError
from recsys_tpu.numerics import SpikeWatch, first_bad_tensor, gradient_norm
from tests.tiny_run import tiny_config, trainer


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_bad_weight_is_named(value):
    model = _model()
    assert first_bad_tensor(model) is None
    with torch.no_grad():
        model[1].weight[0, 2] = value
        model[1].bias[0] = value
    assert first_bad_tensor(model) == f"weight 1.weight at [0, 2] is {value} (1 of 4 values)"


def test_a_bad_gradient_is_named_when_weights_are_finite():
    model = _model()
    model(torch.ones(2, 3)).sum().backward()
    model[0].bias.grad[1] = math.nan
    assert first_bad_tensor(model) == "gradient of 0.bias at [1] is nan (1 of 4 values)"


def test_gradient_norm_is_that_of_all_gradients_together():
    model = _model()
    assert gradient_norm(model.parameters()) is None
    model(torch.ones(2, 3)).square().sum().backward()
    expected = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
    assert float(gradient_norm(model.parameters())) == pytest.approx(expected, rel=1e-6)


def test_a_spike_is_a_loss_far_above_the_recent_ones():
    generator = torch.Generator().manual_seed(1)
    losses = (0.5 + 0.01 * torch.randn(200, generator=generator)).tolist()
    watch = SpikeWatch()
    assert not any(watch.is_spike(loss) for loss in losses)
    assert watch.is_spike(0.7)
    assert not watch.is_spike(0.3)
    assert not watch.is_spike(0.5)


def test_the_first_losses_are_no_spikes():
    watch = SpikeWatch()
    assert not any(watch.is_spike(loss) for loss in [0.7, 5.0, 0.7, 9.0])


def test_a_poisoned_table_is_named_by_the_run(tmp_path: Path):
    with trainer(tiny_config(tmp_path)) as made:
        name = next(name for name in made.model.state_dict() if name.endswith("t_C2.weight"))
        with torch.no_grad():
            for shard in made.model.state_dict()[name].local_shards():
                shard.tensor[:] = math.nan
        with pytest.raises(TrainingDivergedError, match=r"step 1 is nan on rank 0; table .*t_C2\.weight"):
            made.run()
        assert made.store.list() == []
