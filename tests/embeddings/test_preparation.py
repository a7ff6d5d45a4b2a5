import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.embeddings.preparation import CapacityError, prepare
from tests.kernels.cases import Case, cases


def build(rows, **options):
    arguments = dict(num_bags=2, num_rows=10, id_capacity=8, unique_capacity=8)
    return prepare(np.asarray(rows), **(arguments | options))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 1000))
def test_both_orders_describe_the_same_ids(case: Case, seed: int):
    shuffled = np.random.default_rng(seed).permutation(len(case.rows))
    case.rows, case.bags = case.rows[shuffled], case.bags[shuffled]
    if case.weights is not None:
        case.weights = case.weights[shuffled]
    batch = case.batch()
    count, unique = batch.counts.tolist()
    assert (count, unique) == (len(case.rows), len(np.unique(case.rows)))

    # forward: ids sorted by bag, stably
    by_bag = np.argsort(case.bags, kind="stable")
    np.testing.assert_array_equal(batch.rows[:count], case.rows[by_bag])
    np.testing.assert_array_equal(batch.bags[:count], case.bags[by_bag])
    lengths = np.bincount(case.bags, minlength=case.num_bags)
    np.testing.assert_array_equal(np.diff(batch.bag_offsets), lengths)

    # backward: the same ids sorted by row, stably
    order = batch.order[:count].numpy()
    np.testing.assert_array_equal(order, np.argsort(case.rows[by_bag], kind="stable"))
    np.testing.assert_array_equal(batch.unique_rows[:unique], np.unique(case.rows))
    np.testing.assert_array_equal(batch.unique_rows[batch.segments[:count].long()], case.rows[by_bag][order])
    np.testing.assert_array_equal(batch.sorted_bags[:count], case.bags[by_bag][order])
    np.testing.assert_array_equal(
        np.diff(batch.row_offsets[: unique + 1]), np.unique(case.rows, return_counts=True)[1]
    )
    if case.weights is not None:
        np.testing.assert_array_equal(batch.weights[:count], case.weights[by_bag])
        np.testing.assert_array_equal(batch.sorted_weights[:count], case.weights[by_bag][order])

    # padding is what LookupBatch says
    assert (batch.rows[count:] == 0).all() and (batch.bags[count:] == case.num_bags).all()
    assert (batch.unique_rows[unique:] == case.num_rows).all()
    assert (batch.row_offsets[unique:] == count).all()
    assert (batch.sorted_bags[count:] == case.num_bags).all()
    assert (batch.segments[count:] == case.unique_capacity).all()
    assert (batch.order[count:] == case.id_capacity - 1).all()


def test_lengths_and_bags_are_two_ways_to_say_the_same():
    by_length = build([3, 1, 3], lengths=np.array([1, 2]))
    by_bag = build([3, 1, 3], bags=np.array([0, 1, 1]))
    for name, value in vars(by_length).items():
        other = getattr(by_bag, name)
        assert value is other is None or (
            value == other if isinstance(value, int) else (value == other).all()
        )


def test_capacities_name_what_is_needed():
    with pytest.raises(CapacityError, match="9 needed, but id_capacity is 8"):
        build(np.zeros(9, int), lengths=np.array([4, 5]))
    with pytest.raises(CapacityError, match="3 needed, but unique_capacity is 2"):
        build([1, 2, 3], lengths=np.array([1, 2]), unique_capacity=2)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([1, 10], dict(lengths=np.array([1, 1])), r"row 10 at position 1 is not in \[0, 10\)"),
        ([-1], dict(lengths=np.array([1, 0])), "row -1 at position 0"),
        ([1], dict(bags=np.array([2])), r"bag 2 at position 0 is not in \[0, 2\)"),
        ([1], dict(lengths=np.array([1])), "1 lengths for 2 bags"),
        ([1], dict(lengths=np.array([1, 1])), "lengths sum to 2, but there are 1 rows"),
        ([1, 1], dict(lengths=np.array([3, -1])), "length -1 is negative"),
        ([1], dict(bags=np.array([1, 1])), "1 rows but 2 bags"),
        ([1], dict(bags=np.array([1]), weights=np.ones(2)), "1 rows but 2 weights"),
        ([1], {}, "either lengths or bags"),
    ],
)
def test_bad_input_is_named(rows, options, message):
    with pytest.raises(ValueError, match=message):
        build(rows, **options)
