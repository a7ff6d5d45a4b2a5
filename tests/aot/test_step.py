"""The step that is compiled computes what DLRM and torch.optim compute; it compiles for chips and slices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from recsys_tpu.aot.__main__ import table_sizes
from recsys_tpu.aot.step import build_step, rows_of_fullest_rank
from recsys_tpu.chips import devices_of
from recsys_tpu.config import Config
from recsys_tpu.errors import ConfigError
from recsys_tpu.models.build import build_click_model

SIZES = {"a": 7, "b": 5, "c": 9}
BATCH, DIM, DENSE = 16, 8, 4


def _config(**dense_optimizer) -> Config:
    return Config.model_validate(
        {
            "model": {"embedding_dim": DIM, "bottom_mlp": [6], "over_mlp": [10, 5]},
            "optimizer": {
                "dense": {"learning_rate": 0.05, **dense_optimizer},
                "sparse": {"kind": "adagrad", "learning_rate": 0.1, "eps": 1e-8},
            },
            "train": {"batch_size": BATCH, "eval_batch_size": BATCH},
        }
    )


def _lookup_inputs(ids_FB: torch.Tensor) -> dict[str, torch.Tensor]:
    """One id per bag: bags are positions, and rows are ids behind the tables before."""
    starts = torch.tensor([0, *SIZES.values()]).cumsum(0)[:-1]
    rows = (ids_FB + starts[:, None]).flatten()
    count, total = len(rows), sum(SIZES.values())
    order = torch.sort(rows, stable=True).indices
    unique, segments = torch.unique(rows[order], return_inverse=True)
    offsets = torch.searchsorted(rows[order].contiguous(), unique)
    padding = count - len(unique)
    tensors = {
        "rows_N": rows,
        "bags_N": torch.arange(count),
        "bag_offsets": torch.arange(count + 1),
        "unique_rows": torch.cat([unique, torch.full((padding,), total)]),
        "row_offsets": torch.cat([offsets, torch.full((padding + 1,), count)]),
        "sorted_bags_N": order,
        "segments_N": segments,
        "order_N": order,
        "counts": torch.tensor([count, len(unique)]),
    }
    return {name: tensor.to(torch.int32) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("options", "torch_optimizer"),
    [
        ({"kind": "adamw", "weight_decay": 0.1}, torch.optim.AdamW),
        ({"kind": "adagrad"}, torch.optim.Adagrad),
        ({"kind": "sgd", "momentum": 0.9}, torch.optim.SGD),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_two_steps_equal_dlrm_with_torch_optim(tpu, options, torch_optimizer):
    torch.manual_seed(0)
    config = _config(**options)
    step = build_step(config, SIZES, dense_in_features=DENSE)
    model = build_click_model(config.model, SIZES, dense_in_features=DENSE)
    dense = dict(p for p in model.named_parameters() if "embedding_bags" not in p[0])
    table = nn.Parameter(torch.randn(sum(SIZES.values()), DIM))
    start = table.detach().clone()
    extra = {k: v for k, v in options.items() if k != "kind"}
    eps = {} if options["kind"] == "sgd" else {"eps": 1e-8}
    update = torch_optimizer(dense.values(), lr=0.05, **eps, **extra)
    table_update = torch.optim.Adagrad([table], lr=0.1, eps=1e-8)

    def initial(name: str) -> torch.Tensor:
        if name == "table":
            return table.detach().flatten()
        if name.startswith("weight."):
            return dense[name.removeprefix("weight.")].detach()
        return torch.zeros(step.arguments[name].shape)

    state = {name: initial(name).clone().to(tpu) for name in step.state_names}
    for number in (1, 2):
        ids = torch.stack([torch.randint(size, (BATCH,)) for size in SIZES.values()])
        x, y = torch.randn(BATCH, DENSE), torch.rand(BATCH).round()
        hyper = torch.zeros(step.arguments["hyper"].shape)
        hyper[0], hyper[1] = 0.1, number
        inputs = {
            "dense": x,
            "labels": y,
            **_lookup_inputs(ids),
            "hyper": hyper,
            "step": torch.tensor(number),
        }
        given = {**state, **{name: value.to(tpu) for name, value in inputs.items()}}
        loss, *new = step.function(*(given[name] for name in step.arguments))
        state = dict(zip(step.state_names, new, strict=True))

        starts = torch.tensor([0, *SIZES.values()]).cumsum(0)[:-1]
        embedded = table[(ids + starts[:, None]).T]
        expected = nn.functional.binary_cross_entropy_with_logits(model.towers(x, embedded), y)
        update.zero_grad(), table_update.zero_grad()
        expected.backward()
        update.step(), table_update.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    tables = state["table"].cpu().reshape(-1, DIM)
    torch.testing.assert_close(tables, table.detach(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(tables, start)
    for name, parameter in dense.items():
        torch.testing.assert_close(state[f"weight.{name}"].cpu(), parameter.detach(), rtol=1e-4, atol=1e-5)


def test_every_replaced_argument_is_donated_to_its_own_output(tpu):
    step = build_step(_config(kind="adamw"), SIZES, dense_in_features=DENSE)
    names = list(step.arguments)
    assert {names[a]: o for a, o in step.aliases.items()} == {
        n: i + 1 for i, n in enumerate(step.state_names)
    }


def test_the_fullest_rank_holds_at_least_its_share():
    assert rows_of_fullest_rank({"a": 10, "b": 6, "c": 5, "d": 1}, 2) == (11, 2)
    assert rows_of_fullest_rank(SIZES, 1) == (21, 3)
    assert rows_of_fullest_rank(SIZES, 4) == (9, 1)


def test_what_cannot_be_built_is_a_config_error(tpu):
    with pytest.raises(ConfigError, match="not a multiple of the 3 devices"):
        build_step(_config(), SIZES, dense_in_features=DENSE, world_size=3)
    with pytest.raises(ConfigError, match=r"model\.num_embeddings"):
        table_sizes(Config.model_validate({"data": {"kind": "criteo_sample", "path": "/absent"}}))


def test_devices_of_a_topology():
    assert [devices_of(t) for t in ("v6e:2x4", "v5p:2x2x1", "tpu7x:2x2x1")] == [8, 4, 8]
    with pytest.raises(ValueError, match="its extents"):
        devices_of("v6e")


def _compile(tmp_path: Path, *arguments: str) -> list[dict]:
    out = tmp_path / "reports.json"
    command = [sys.executable, "-m", "recsys_tpu.aot", "--config", "configs/dlrm.yaml", "--json", str(out)]
    run = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2]
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_the_command_compiles_the_step_of_a_slice_with_its_collectives(tpu, tmp_path):
    (report,) = _compile(tmp_path, "--topology", "v6e:2x2", "--kernels", "xla", "train.batch_size=1024")
    assert report["num_devices"] == 4 and report["error"] is None
    assert report["collectives"]["all-to-all"] == 2 and report["collectives"]["all-reduce"] == 1
    assert report["alias_bytes"] > 0
