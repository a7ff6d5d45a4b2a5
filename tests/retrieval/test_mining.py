"""Mined negatives: pools against a loop over all scores, draws against their expected counts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.retrieval.mining import MinedNegatives
from recsys_tpu.runtime import Runtime
from recsys_tpu.tasks.retrieval import RetrievalTask
from recsys_tpu.trainer import Trainer
from tests.tasks.test_retrieval import losses, tiny

MINING = {"count": 64, "every": 7, "pool": 9}


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    config = tiny(tmp_path, model__mined_negatives=MINING, train__max_steps=10)
    with Runtime.start(config.runtime) as runtime:
        made = Trainer(config, runtime)
        made.run()
        yield made
        made.close()


def mined_of(trainer: Trainer) -> tuple[RetrievalTask, MinedNegatives]:
    task = trainer.task
    assert isinstance(task, RetrievalTask) and task.mined is not None
    return task, task.mined


def test_a_pool_holds_the_best_items_that_the_user_has_not_had(trainer: Trainer) -> None:
    task, mined = mined_of(trainer)
    mined.refresh(trainer.model)
    users, stops = task.known_events()
    trainer.model.eval()
    with torch.no_grad():
        items = task.evaluation.item_vectors(trainer.model)
        for first in range(0, len(users), 100):
            own = users[first : first + 100]
            queries = task.evaluation.query_vectors(trainer.model, own, stops[own])
            scores = (queries[: len(own)] @ items.T).numpy()
            for user, of_user in zip(own, scores, strict=True):
                had = task.log.items[task.log.user_starts[user] : stops[user]]
                of_user[had] = -np.inf
                floor = np.sort(of_user)[-9]
                pool = mined.pool[user].numpy()
                assert len(set(pool)) == 9 and (np.diff(pool) > 0).all()
                assert (of_user[pool] >= floor - 1e-5).all()  # which of equal scores is the index's choice


def test_items_are_drawn_as_often_as_the_correction_says(trainer: Trainer) -> None:
    task, mined = mined_of(trainer)
    generator = np.random.default_rng(0)
    train, found, rounds = task.holdout.train, np.zeros(len(task.log.item_keys)), 400
    for _ in range(rounds):
        batch = generator.choice(train, 128, replace=False)
        found += np.bincount(mined.draw(task.log.users[batch], generator), minlength=len(found))
    assert mined.expected.sum() == pytest.approx(64)
    sigma = np.sqrt(np.maximum(mined.expected, 1e-3) / rounds)
    assert (np.abs(found / rounds - mined.expected) < 6 * sigma).all()


def test_a_resumed_run_draws_from_the_pools_it_had(tmp_path: Path) -> None:
    """Steps 8 to 14 draw from pools that were mined before step 8; the run is cut after step 10."""
    for name, resume in (("whole", "never"), ("parts", "never"), ("parts", "auto")):
        config = tiny(
            tmp_path,
            run__name=name,
            model__mined_negatives=MINING,
            train__max_steps=16,
            train__checkpoint_every=10,
            train__resume=resume,
        )
        with Runtime.start(config.runtime) as runtime:
            made = Trainer(config, runtime)
            made.run()
            made.close()
        if resume == "never":
            last = tmp_path / "runs" / name / "checkpoints/step_00000016"
            last.rename(last.with_name("gone"))
    expected, found = losses(tmp_path / "runs/whole"), losses(tmp_path / "runs/parts")
    assert len(expected) == 16
    assert found == expected + expected[10:]


def test_users_who_had_every_item_are_not_drawn_from(trainer: Trainer) -> None:
    _, mined = mined_of(trainer)
    before = mined.pool.clone()
    try:
        changed = before.clone()
        changed[0] = -1
        mined.load_pool(changed)
        assert mined.expected.sum() == pytest.approx(64)
        drawn = mined.draw(np.array([0, 5], np.int32), np.random.default_rng(1))
        assert set(drawn) <= set(before[5].tolist())
        with pytest.raises(DatasetError, match="nothing is left to mine"):
            mined.draw(np.array([0], np.int32), np.random.default_rng(1))
    finally:
        mined.load_pool(before)
