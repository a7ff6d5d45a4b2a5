"""The same training on the emulated tpu device: equal to the unsharded CPU run, and compiled once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from recsys_tpu.emulation import requirements
from tests.sharding import training
from tests.sharding.ranks import on_ranks
from tests.sharding.test_sequence_and_vbe import SEQUENCES, check_sequences, sequence_case
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
    Case(small("table_row_wise"), steps=3),
    Case(small("row_wise"), steps=4, deduplicate=True, max_norm=0.3),
]
SEQUENCE_CASES = [replace(sequence_case(kind), steps=4) for kind in SEQUENCES]


def test_sharded_training_on_the_emulated_device_equals_unsharded_training() -> None:
    results = on_ranks(TRAIN, 2, "tpu-emulated", CASES)
    for index, case in enumerate(CASES):
        check_equal(case, [rank[index] for rank in results], training.train_unsharded(case))


def test_unpooled_embeddings_on_the_emulated_device_keep_their_shapes_and_equal_unsharded_training() -> None:
    results = on_ranks("tests.sharding.sequence_and_vbe:train_sequences", 2, "tpu-emulated", SEQUENCE_CASES)
    for index, case in enumerate(SEQUENCE_CASES):
        ranks = [rank[index] for rank in results]
        check_sequences(case, ranks)
        assert all(len(rank["shapes"]) == 1 and rank["late"] == 0 for rank in ranks), (
            "shapes follow the batch"
        )


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [
        ("row_wise", 1),
        pytest.param("data_parallel", 1, marks=pytest.mark.long),
        pytest.param("table_wise", 2, marks=pytest.mark.long),
    ],
)
def test_every_size_is_foreseen_however_many_ids_a_batch_has(sharding: str, ranks: int) -> None:
    case = Case(small(sharding), steps=14, batch=32)
    longest = [8, 1, 40, 0, 60, 3]  # ids of a sample, at most
    train = "tests.sharding.emulated:train_with_tower"
    emulated = on_ranks(train, ranks, "tpu-emulated", case, longest)
    (reference,) = on_ranks(train, 1, "cpu", case, longest)
    losses = np.mean([rank["losses"] for rank in emulated], axis=0)
    np.testing.assert_allclose(losses, reference["losses"], rtol=1e-4, atol=1e-5)
    for name, ((_, expected),) in reference["tables"].items():
        pieces = [piece for rank in emulated for piece in rank["tables"].get(name, ())]
        trained = next(piece for _, piece in pieces if piece.shape == expected.shape)
        torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-5)
    for rank in emulated:
        assert rank["late"] == 0 and rank["shapes"] > 1
