"""Predictions of a split: one for each row, in the order of the files."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.evaluation import write_predictions
from recsys_tpu.metrics import click_metrics
from recsys_tpu.runtime import Runtime
from recsys_tpu.tasks.click import ClickTask
from recsys_tpu.trainer import Trainer
from tests.test_trainer import tiny


def test_predictions_are_those_of_the_evaluation_in_the_order_of_the_rows(tmp_path: Path) -> None:
    config = tiny(tmp_path, train__eval_batch_size=704)  # the last batch is filled up
    with Runtime.start(config.runtime) as runtime:
        trainer = Trainer(config, runtime)
        try:
            evaluated = trainer.run()
            task = trainer.task
            assert isinstance(task, ClickTask)
            path = tmp_path / "out/predictions.parquet"
            assert write_predictions(trainer.model, task.reader_in_order("test"), runtime, path) == 3000
            found = pq.read_table(path)
            expected = pq.read_table(next((task.data_directory / "test").glob("*.parquet")))
            assert found["label"].to_pylist() == expected["label"].to_pylist()
            probability = found["probability"].to_numpy().astype(np.float64)
            again = click_metrics(found["label"].to_numpy(), np.log(probability / (1 - probability)))
            assert again.auc == pytest.approx(evaluated.as_dict()["auc"], abs=1e-6)
            assert again.log_loss == pytest.approx(evaluated.as_dict()["log_loss"], abs=1e-6)
            with pytest.raises(DatasetError, match="no split 'nothing'"):
                task.reader_in_order("nothing")
            assert [file.name for file in path.parent.iterdir()] == ["predictions.parquet"]
        finally:
            trainer.close()
