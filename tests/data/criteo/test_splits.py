import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.data.criteo.plan import group_parts, plan_parts
from recsys_tpu.data.criteo.source import SourceFile
from recsys_tpu.data.criteo.splits import LastDay, RowRange, SplitError, resolve_splits

DAYS = [f"day_{day}.gz" for day in range(24)]


def resolve(specs, rows, names=None, last_day=LastDay.VAL_FIRST):
    return resolve_splits(
        specs, names=names or [f"f{i}" for i in range(len(rows))], rows=rows, last_day=last_day
    )


def test_no_spec_trains_on_everything():
    assert resolve([], [3, 4]) == [RowRange("train", 1, 7)]


def test_kaggle_has_the_published_sizes():
    train, val, test = resolve(["kaggle"], [45_840_617])
    # Seven days of 45,840,617 // 7 rows, the first remainder ones with a row more; numpy halves the last.
    days = np.array_split(np.arange(45_840_617), 7)
    halves = np.array_split(days[-1], 2)
    assert (train.split, train.rows) == ("train", sum(len(day) for day in days[:-1]))
    assert (val.split, val.rows) == ("val", len(halves[0]))
    assert (test.split, test.rows) == ("test", len(halves[1]))
    assert (val.first, test.last) == (train.last + 1, 45_840_617)


def test_the_last_day_of_1tb_is_halved_with_the_longer_half_first():
    train, val, test = resolve(["1tb"], [100] * 23 + [178_274_637], DAYS)
    assert (train.rows, val.rows, test.rows) == (2300, 89_137_319, 89_137_318)
    assert (val.split, test.split) == ("val", "test")


def test_dlrm_tests_on_the_first_half():
    _, first, second = resolve(["1tb"], [10] * 23 + [5], DAYS, LastDay.TEST_FIRST)
    assert (first.split, first.rows, second.split, second.rows) == ("test", 3, "val", 2)


def test_1tb_needs_all_days_in_order():
    with pytest.raises(SplitError, match="needs the files day_0 to day_23"):
        resolve(["1tb"], [10] * 23, DAYS[:23])
    with pytest.raises(SplitError, match="needs the files day_0 to day_23"):
        resolve(["1tb"], [10] * 24, sorted(DAYS))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["train=5-4"], "selects no rows"),
        (["train=0-4"], "selects no rows"),
        (["test=11-"], "selects no rows"),
        (["train=1-11"], "the files have only 10 rows"),
        (["train=1-5", "test=5-6"], "train and test share rows 5-5"),
        (["train=1-2", "train=3-4"], "train is given more than one range"),
        (["trian=1-2"], "NAME one of train, val, test"),
        (["train=1:5"], "must be kaggle, 1tb, or NAME=FIRST-LAST"),
        (["kaggle", "train=1-2"], "must be kaggle"),
        (["kaggle"], "too few"),
    ],
)
def test_a_split_that_makes_no_sense_is_an_error(specs, message):
    with pytest.raises(SplitError, match=message):
        resolve(specs, [4, 6])


def make_sources(rows, offsets):
    return [SourceFile(f"f{i}", 1, 1, "", count, 0, [0] if offsets else None) for i, count in enumerate(rows)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 15), st.booleans(), st.data())
def test_parts_cover_the_splits_once_and_in_order(rows, rows_per_part, plain, data):
    total = sum(rows)
    cut = data.draw(st.integers(0, total - 1))
    ranges = (
        [RowRange("train", 1, cut), RowRange("test", cut + 1, total)] if cut else [RowRange("test", 1, total)]
    )
    parts = plan_parts(make_sources(rows, plain), ranges, rows_per_part)
    covered = {item.split: [] for item in ranges}
    starts = np.cumsum([0, *rows])
    for part in sorted(parts, key=lambda part: (part.split, part.number)):
        assert 1 <= part.lines <= rows_per_part
        assert part.last_line <= rows[part.source]
        covered[part.split].extend(
            starts[part.source] + line for line in range(part.first_line, part.last_line + 1)
        )
    for item in ranges:
        assert covered[item.split] == list(range(item.first, item.last + 1))
    groups = group_parts(parts, make_sources(rows, plain))
    assert [part for group in groups for part in group] == parts
    for group in groups:
        assert len({part.source for part in group}) == 1
        assert plain is False or len(group) == 1
