"""A trained click model outside of training: the exported dense part, and tables in int8."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys_tpu.inference.dense_part import export_dense_part
from recsys_tpu.inference.int8_tables import evaluate_int8, quantize_tables
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.whole import whole_state
from recsys_tpu.trainer import Trainer
from tests.test_trainer import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    config = tiny(tmp_path_factory.mktemp("run"), optimizer__sparse={"learning_rate": 0.1})
    with Runtime.start(config.runtime) as runtime:
        trainer = Trainer(config, runtime)
        trainer.run()
        yield trainer
        trainer.close()


_WITHOUT_TORCHREC = """
import sys, numpy as np, torch
program = torch.export.load(sys.argv[1] + "/dense.pt2").module()
given = np.load(sys.argv[1] + "/given.npz")
for rows in (1, 7, len(given["dense"])):
    found = program(torch.from_numpy(given["dense"][:rows]), torch.from_numpy(given["embedded"][:rows]))
    assert found.shape == (rows,)
    np.testing.assert_allclose(found.detach().numpy(), given["logits"][:rows], atol=1e-6)
assert not [name for name in sys.modules if name.startswith(("torchrec", "fbgemm_gpu", "recsys_tpu"))]
"""


def test_the_exported_dense_part_gives_the_same_logits_without_torchrec(
    trained: Trainer, tmp_path: Path
) -> None:
    info = export_dense_part(trained, Path("somewhere"), tmp_path)
    assert json.loads((tmp_path / "dense.json").read_text())["sparse_features"] == info.sparse_features
    assert info.checked_rows == 512
    assert info.max_difference <= 1e-6
    batch = next(iter(trained.task.reader_in_order("test").epoch(0)))  # type: ignore[attr-defined]
    tables, _ = whole_state(trained.model)
    embedded = []  # looked up here by hand, one id a bag
    for feature in info.sparse_features:
        jagged = batch.sparse[feature]
        assert (jagged.lengths() == 1).all()
        embedded.append(tables[f"t_{feature}"][jagged.values().long()])
    with torch.no_grad():
        logits = trained.model.eval()(batch.dense, batch.sparse)
    np.savez(
        tmp_path / "given.npz",
        dense=batch.dense.numpy(),
        embedded=torch.stack(embedded, dim=1).numpy(),
        logits=logits.numpy(),
    )
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCHREC, str(tmp_path)],
        cwd=tmp_path, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_int8_tables_are_near_the_trained_ones_in_every_element(trained: Trainer) -> None:
    made = quantize_tables(trained)
    tables, _ = whole_state(trained.model)
    state = made.model.state_dict()
    for name, table in tables.items():
        key = f"sparse_arch.embedding_bag_collection.embedding_bags.{name}.weight"
        stored = state[key].numpy()
        dim = table.shape[1]
        scale, offset = np.ascontiguousarray(stored[:, :4]).view(np.float16).astype(np.float32).T
        found = stored[:, 4 : 4 + dim] * scale[:, None] + offset[:, None]
        step = (table.max(1).values - table.min(1).values).numpy() / 255
        rounding = 2.0**-10 * np.abs(table.numpy()).max()  # of scale and offset, kept in float16
        assert (np.abs(found - table.numpy()) <= step[:, None] / 2 + rounding).all()
        assert np.abs(found - table.numpy()).max() > 0
    assert made.int8_bytes == made.float_bytes / 2  # dim 8: 4 + 8 bytes, filled up to 16, for 32


def test_int8_tables_cost_little_and_change_the_predictions(trained: Trainer) -> None:
    before = {name: table.clone() for name, table in whole_state(trained.model)[0].items()}
    expected = trained.task.evaluate(trained.model)
    metrics, _ = evaluate_int8(trained)
    assert metrics.rows == expected.rows  # type: ignore[attr-defined]
    assert metrics.log_loss != expected.log_loss  # type: ignore[attr-defined]
    assert metrics.auc == pytest.approx(expected.auc, abs=2e-3)  # type: ignore[attr-defined]
    for name, table in whole_state(trained.model)[0].items():
        torch.testing.assert_close(table, before[name], rtol=0, atol=0)
