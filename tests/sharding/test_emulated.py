"""The same training on the emulated tpu device: equal to the unsharded CPU run, and compiled once."""

from __future__ import annotations

import pytest
import torch

from recsys_tpu.emulation import requirements
from tests.sharding import training
from tests.sharding.ranks import on_ranks
from tests.sharding.test_training import TRAIN, check_equal
from tests.sharding.training import Case, Table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(requirements.problems()),
        reason=f"no emulated tpu device. Run: {requirements.INSTALL}",
    ),
]


def small(sharding: str) -> tuple[Table, ...]:
    return (Table(50, 8, ("a", "b"), sharding), Table(30, 8, ("c",), sharding, ranks=(1, 0), mean=True))


CASES = [
    Case(small("table_wise"), optimizer="adam", steps=4),
    Case(small("row_wise"), optimizer="rowwise_adagrad", steps=4, ahead=2),
    Case(small("column_wise"), optimizer="adagrad", steps=4),
    Case(small("data_parallel"), optimizer="sgd", steps=4),
]


def test_sharded_training_on_the_emulated_device_equals_unsharded_training() -> None:
    results = on_ranks(TRAIN, 2, "tpu-emulated", CASES)
    for index, case in enumerate(CASES):
        check_equal(case, [rank[index] for rank in results], training.train_unsharded(case))


def test_a_compiled_tower_is_compiled_once_and_a_longer_batch_moves_up_the_ladder() -> None:
    case = Case(small("row_wise"), steps=8, batch=16)
    burst = 4
    (emulated,) = on_ranks("tests.sharding.emulated:train_with_tower", 1, "tpu-emulated", case, burst)
    (reference,) = on_ranks("tests.sharding.emulated:train_with_tower", 1, "cpu", case, burst)
    torch.testing.assert_close(emulated["losses"], reference["losses"], rtol=1e-4, atol=1e-5)
    for name, ((_, trained),) in emulated["tables"].items():
        torch.testing.assert_close(trained, reference["tables"][name][0][1], rtol=1e-4, atol=1e-5)
    assert emulated["moves"] > 0 and emulated["shapes"] == 2
    # A program is built when it first runs, and once more when its table first is another program's result.
    steps_that_compiled = {step for step, count in enumerate(emulated["compilations"]) if count}
    assert steps_that_compiled <= {0, 1, 2, burst, burst + 1}, emulated["compilations"]
