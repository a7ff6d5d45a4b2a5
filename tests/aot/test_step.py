"""The step that is compiled computes what DLRM and torch.optim compute; it compiles for chips and slices."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recsys_tpu import dense_rules
from recsys_tpu.aot.models import table_sizes
from recsys_tpu.aot.step import Step, build_step
from recsys_tpu.aot.tables import Slice, rank_tables
from recsys_tpu.chips import devices_of
from recsys_tpu.config import Config
from recsys_tpu.data.synthetic import NUM_DENSE
from recsys_tpu.embeddings.capacity import rung
from recsys_tpu.embeddings.preparation import prepare
from recsys_tpu.embeddings.stacks import storage_rows
from recsys_tpu.errors import ConfigError
from recsys_tpu.kernels.batch import Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec
from recsys_tpu.models.build import build_click_model
from recsys_tpu.models.click_model import sum_pooled_tables

SIZES = {"a": 7, "b": 5, "c": 9}
BATCH, DIM = 16, 8
STARTS = torch.tensor([0, 7, 12])


def _config(model: dict | None = None, **dense_optimizer) -> Config:
    return Config.model_validate(
        {
            "model": {
                "embedding_dim": DIM,
                "num_embeddings": SIZES,
                **(model or {"bottom_mlp": [6], "over_mlp": [10, 5]}),
            },
            "optimizer": {
                "dense": {"learning_rate": 0.05, **dense_optimizer},
                "sparse": {"kind": "adagrad", "learning_rate": 0.1, "eps": 1e-8},
            },
            "train": {"batch_size": BATCH, "eval_batch_size": BATCH},
        }
    )


def _lookup_inputs(step: Step, ids_FB: torch.Tensor) -> dict[str, torch.Tensor]:
    """One id per bag; bags are sample by sample, rows are ids behind the tables before."""
    rows = (ids_FB + STARTS[:, None]).T.flatten().numpy()
    batch = prepare(
        rows,
        bags=np.arange(len(rows)),
        num_bags=len(rows),
        num_rows=step.arguments["table.0" if "table.0" in step.arguments else "weight.table.0"].numel()
        // DIM,
        id_capacity=step.arguments["rows_N.0"].numel(),
        unique_capacity=step.arguments["unique_rows.0"].numel(),
    )
    names = {"bag_offsets", "unique_rows", "row_offsets", "counts"}
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return {f"{name if name in names else f'{name}_N'}.0": value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("model", "options", "torch_optimizer", "sharding"),
    [
        (None, {"kind": "adamw", "weight_decay": 0.1}, torch.optim.AdamW, "table_wise"),
        (
            {"kind": "dlrm_dcnv2", "cross_rank": 3},
            {"kind": "sgd", "momentum": 0.9},
            torch.optim.SGD,
            "table_wise",
        ),
        ({"kind": "deepfm"}, {"kind": "sgd"}, torch.optim.SGD, "table_wise"),
        (None, {"kind": "adagrad"}, torch.optim.Adagrad, "data_parallel"),
    ],
    ids=["dlrm-adamw", "dcnv2-momentum", "deepfm-sgd", "replicated-adagrad"],
)
def test_two_steps_equal_the_model_with_torch_optim(tpu, model, options, torch_optimizer, sharding):
    torch.manual_seed(0)
    config = _config(model, **options)
    step = build_step(config, sharding=sharding)
    reference = build_click_model(config.model, SIZES, dense_in_features=NUM_DENSE)
    dense = dict(p for p in reference.named_parameters() if "embedding_bags" not in p[0])
    table = nn.Parameter(torch.randn(sum(SIZES.values()), DIM))
    start = table.detach().clone()
    extra = {k: v for k, v in options.items() if k != "kind"}
    eps = {} if options["kind"] == "sgd" else {"eps": 1e-8}
    update = torch_optimizer(dense.values(), lr=0.05, **eps, **extra)
    rate = 0.05 if sharding == "data_parallel" else 0.1
    table_update = torch.optim.Adagrad([table], lr=rate, eps=1e-8)

    def initial(name: str) -> torch.Tensor:
        shape = step.arguments[name].shape
        if name in ("table.0", "weight.table.0"):
            padded = torch.zeros(shape)
            padded[: table.numel()] = table.detach().flatten()
            return padded
        if name.startswith("weight."):
            return dense[name.removeprefix("weight.model.")].detach()
        return torch.zeros(shape)

    state = {name: initial(name).clone().to(tpu) for name in step.state_names}
    for number in (1, 2):
        ids = torch.stack([torch.randint(size, (BATCH,)) for size in SIZES.values()])
        x, y = torch.randn(BATCH, NUM_DENSE), torch.rand(BATCH).round()
        hyper = torch.zeros(step.arguments["hyper"].shape)
        hyper[0], hyper[1] = 0.1, number
        inputs = {
            "dense": x,
            "labels": y,
            **_lookup_inputs(step, ids),
            "hyper": hyper,
            "dense_hyper": torch.tensor([0.05, *dense_rules.bias_corrections(number)]),
        }
        given = {**state, **{name: value.to(tpu) for name, value in inputs.items()}}
        loss, *new = step.function(*(given[name] for name in step.arguments))
        state = dict(zip(step.state_names, new, strict=True))

        embedded = table[(ids + STARTS[:, None]).T]
        expected = nn.functional.binary_cross_entropy_with_logits(reference.towers(x, embedded), y)
        update.zero_grad(), table_update.zero_grad()
        expected.backward()
        update.step(), table_update.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    name = "weight.table.0" if sharding == "data_parallel" else "table.0"
    tables = state[name].cpu().reshape(-1, DIM)[: len(table)]
    torch.testing.assert_close(tables, table.detach(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(tables, start)
    for name, parameter in dense.items():
        trained = state[f"weight.model.{name}"].cpu()
        torch.testing.assert_close(trained, parameter.detach(), rtol=1e-4, atol=1e-5)


def test_every_replaced_argument_is_donated_to_its_own_output(tpu):
    step = build_step(_config(kind="adamw"))
    names = list(step.arguments)
    assert {names[a]: o for a, o in step.aliases.items()} == {
        n: i + 1 for i, n in enumerate(step.state_names)
    }


def _rank_tables(kind: str, **sizes: int):
    rows = {"a": 1000, "b": 600, "c": 500, "d": 128}
    configs = sum_pooled_tables(rows, 16).embedding_bag_configs()
    ranks = Slice(None, None, None, **{"ranks": 4, "row_group": 2, **sizes})
    return rank_tables(
        configs,
        kind,
        spec=OptimizerSpec(Optimizer.SGD),
        max_ids={"a": 3},
        samples=10,
        within_slice=ranks,
        transport="collective",
    )


@pytest.mark.parametrize(
    ("kind", "rows", "width", "slots", "bags", "ids"),
    [
        ("table_wise", 1000, 16, 1, 1, 3 * 40),
        ("column_wise", 1000 + 128, 8, 2, 2, 4 * 40),
        ("row_wise", 250 + 150 + 125 + 32, 16, 4, 4, 6 * 40 / 4 * 1.125),
        ("table_row_wise", 500 + 64, 16, 2, 2, 4 * 40 / 2 * 1.125),
        ("data_parallel", 2228, 16, 4, 4, 6 * 10),
    ],
)
def test_the_fullest_rank_of_every_type(kind, rows, width, slots, bags, ids):
    found = _rank_tables(kind)
    (stack,) = found.stacks
    assert (stack.num_rows, stack.dim) == (storage_rows(rows), width)
    assert (found.slots, found.features) == (slots, [bags])
    assert found.sizes == [(rung(math.ceil(ids)), min(rung(math.ceil(ids)), rung(stack.num_rows)))]
    assert found.samples == (10 if kind == "data_parallel" else 40)


def test_no_table_is_materialised_and_one_that_no_rank_can_hold_is_refused(tpu):
    huge = {"model": {"num_embeddings": {"a": 40_000_000, "b": 40_000_000}, "embedding_dim": 128}}
    with pytest.raises(ConfigError, match="row-wise"):
        build_step(Config.model_validate(huge))
    fits = {"model": {"num_embeddings": {"a": 10_000_000, "b": 9_000_000}, "embedding_dim": 128}}
    step = build_step(Config.model_validate(fits))
    assert all(value.device.type == "meta" for value in step.arguments.values())
    assert step.table_bytes == 4 * 128 * storage_rows(19_000_000)


def test_what_cannot_be_built_is_a_config_error(tpu):
    with pytest.raises(ConfigError, match="not a multiple of the 3 devices"):
        build_step(_config(), ranks=Slice(None, None, None, ranks=3))
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


@pytest.mark.slow
def test_our_exchange_and_lookups_compile_in_one_program_without_xlas_collectives(tpu, tmp_path):
    tables = "model.num_embeddings={C1: 4000000, C2: 2000000}"
    size = ("train.batch_size=1024", "model.embedding_dim=32", tables)
    asked = ("--topology", "v6e:2x2", "--sharding", "row_wise", "--exchange", "pallas")
    (report,) = _compile(tmp_path, *asked, *size)
    assert report["error"] is None
    assert set(report["collectives"]) <= {"all-reduce"}  # of the dense gradients
    assert report["table_bytes"] == 4 * 32 * storage_rows(6_000_000 // 4)
    assert report["temp_bytes"] < report["table_bytes"] / 10  # no table is copied
