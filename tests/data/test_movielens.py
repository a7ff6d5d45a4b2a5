"""The four MovieLens formats on made-up files, and the real 100k set where it is there."""

import os
from pathlib import Path

import numpy as np
import pytest

from recsys_tpu.config import EventsConfig
from recsys_tpu.data.events import load_events
from recsys_tpu.data.events_source import prepare_events
from recsys_tpu.data.holdout import hold_out
from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.data.movielens import write_movielens
from recsys_tpu.retrieval.ranking import RankingSums, rank_catalogue

GENRES = "|".join("1" if genre in (1, 5) else "0" for genre in range(19))
SETS = {
    "100k": {
        "u.data": "1\t11\t5\t100\n2\t12\t3\t90\n1\t12\t1\t99\n",
        "u.user": "1|24|M|technician|85711\n2|53|F|other|94043\n",
        "u.item": f"11|Café (1994)|01-Jan-1994||http://x|{GENRES}\n12|unknown||||{GENRES}\n",
    },
    "1m": {
        "ratings.dat": "1::11::5::100\n2::12::3::90\n1::12::1::99\n",
        "users.dat": "1::M::24::10::85711\n2::F::53::16::94043\n",
        "movies.dat": "11::Café: (1994)::Action|Comedy\n12::unknown::Action|Comedy\n",
    },
    "25m": {
        "ratings.csv": "userId,movieId,rating,timestamp\n1,11,5.0,100\n2,12,3.5,90\n1,12,1.0,99\n",
        "movies.csv": 'movieId,title,genres\n11,"Café, The (1994)",Action|Comedy\n12,unknown,Action|Comedy\n',
    },
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_becomes_events(tmp_path: Path, name: str) -> None:
    encoding = "utf-8" if name == "25m" else "latin-1"
    for file, text in SETS[name].items():
        (tmp_path / file).write_text(text, encoding=encoding)
    (tmp_path / "out").mkdir()
    write_movielens(tmp_path, tmp_path / "out")
    log = load_events(tmp_path / "out")
    assert (log.user_keys, log.item_keys) == ([1, 2], [11, 12])
    assert (log.users.tolist(), log.items.tolist()) == ([0, 0, 1], [1, 0, 1])
    assert log.timestamps.tolist() == [99, 100, 90]
    genres, year = log.item_features["genres"], log.item_features["year"]
    assert genres.vocabulary == ["Action", "Comedy"]
    assert genres.offsets.tolist() == [0, 2, 4]
    assert (year.vocabulary, year.offsets.tolist()) == ([1994], [0, 1, 1])
    assert set(log.user_features) == (set() if name == "25m" else {"age", "gender", "occupation"})


def test_what_is_no_movielens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no MovieLens set here"):
        write_movielens(tmp_path, tmp_path)
    (tmp_path / "u.data").write_text("1\t2\t3\n")
    with pytest.raises(DatasetError, match=r"u\.data, line 1: 3 fields, expected 4"):
        write_movielens(tmp_path, tmp_path)


def test_popularity_on_the_real_100k(tmp_path: Path) -> None:
    """The whole evaluation, on real data, against a count in NumPy."""
    root = os.environ.get("RECSYS_TPU_DATA", "")
    if not (Path(root) / "movielens-100k/u.data").is_file():
        pytest.skip("set RECSYS_TPU_DATA to the parent folder of movielens-100k (docs/retrieval.md)")
    log = load_events(prepare_events(EventsConfig(kind="movielens", cache_dir=tmp_path)))
    assert (len(log.users), len(log.user_keys), len(log.item_keys)) == (100_000, 943, 1682)
    found = hold_out(log, split="leave_one_out", evaluate_on="test", temporal_fraction=0.1, exclude_seen=True)
    assert (found.queries, len(found.train), found.unreachable) == (943, 99_057, 0)
    counts = np.bincount(log.items[found.train], minlength=1682)
    places = []
    for query, user in enumerate(found.users):
        scores = counts.astype(float)
        scores[log.items[log.user_starts[user] : found.stops[query]]] = -1
        target = found.targets[query]
        places.append(int((scores > scores[target]).sum() + (scores[:target] == scores[target]).sum()))
    import torch

    width = int((found.stops - log.user_starts[found.users]).max())
    seen = np.full((943, width), 1682)
    for query, user in enumerate(found.users):
        known = log.items[log.user_starts[user] : found.stops[query]]
        seen[query, : len(known)] = known
    ranked, _, best = rank_catalogue(
        torch.ones(943, 1),
        torch.from_numpy(counts[:, None].astype(np.float32)),
        torch.from_numpy(seen),
        torch.from_numpy(found.targets[:, None].astype(np.int64)),
        10,
    )
    assert ranked[:, 0].tolist() == places
    sums = RankingSums(1682, [10])
    sums.add(ranked.numpy(), np.ones((943, 1), bool), best.numpy())
    assert sums.metrics().recall[10] == pytest.approx(0.08590, abs=1e-5)
    assert sums.metrics().ndcg[10] == pytest.approx(0.04491, abs=1e-5)
