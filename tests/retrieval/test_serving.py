"""From a checkpoint to answers over HTTP: the same ones as offline, within limits, without TorchRec."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.retrieval.export import export_bundle
from recsys_tpu.retrieval.index import build_index, measure_index
from recsys_tpu.retrieval.recommender import Query, Recommender, UnknownKeyError
from recsys_tpu.retrieval.service import ServiceLimits, create_app
from recsys_tpu.runtime import Runtime
from recsys_tpu.trainer import Trainer
from tests.tasks.test_retrieval import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, list[int]]]]:
    """(bundle folder, the best 10 items of every test user by the offline evaluation)."""
    folder = tmp_path_factory.mktemp("serving")
    config = tiny(folder, train__epochs=1)
    with Runtime.start(config.runtime) as runtime:
        trainer = Trainer(config, runtime)
        trainer.run()
        export_bundle(trainer, trainer.store.list()[-1], folder / "bundle", ["flat", "hnsw"])
        task: Any = trainer.task
        offline = {
            task.log.user_keys[task.holdout.users[query]]: [task.log.item_keys[item] for item in items[:10]]
            for block in task.evaluation.ranked(trainer.model)
            for query, items in zip(block.queries, block.items, strict=True)
        }
        trainer.close()
    yield folder / "bundle", offline


def test_the_served_top_k_is_the_offline_one_for_every_test_user(
    exported: tuple[Path, dict[int, list[int]]],
) -> None:
    bundle, offline = exported
    assert len(offline) == 240
    with TestClient(create_app(Recommender(bundle))) as client:
        for user, expected in offline.items():
            answer = client.post("/recommend", json={"user": user, "k": 10})
            assert [found["item"] for found in answer.json()["items"]] == expected


def test_a_bundle_is_read_without_torchrec(exported: tuple[Path, dict[int, list[int]]]) -> None:
    bundle, offline = exported
    user = next(iter(offline))
    program = (
        "import sys; sys.modules['torchrec'] = None; sys.modules['fbgemm_gpu'] = None\n"
        "from pathlib import Path\n"
        "import recsys_tpu.retrieval.service\n"
        "from recsys_tpu.retrieval.recommender import Query, Recommender\n"
        f"found = Recommender(Path({str(bundle)!r})).recommend([Query(user={user})], 10)[0]\n"
        "print([one.item for one in found])\n"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(offline[user])


def test_a_history_counts_as_later_events(exported: tuple[Path, dict[int, list[int]]]) -> None:
    bundle, offline = exported
    recommender = Recommender(bundle)
    user, best = next(iter(offline.items()))
    later = [one.item for one in recommender.recommend([Query(user=user, history=best[:3])], 10)[0]]
    assert not set(later) & set(best[:3])
    alone, together = (
        recommender.recommend([Query(history=best[:3])], 5)[0],
        recommender.recommend([Query(user=user), Query(history=best[:3])], 5),
    )
    assert [one.item for one in together[1]] == [one.item for one in alone]
    with pytest.raises(UnknownKeyError, match="item 'nothing'"):
        recommender.recommend([Query(history=["nothing"])], 5)


def test_requests_out_of_limits_are_refused_and_counted(
    exported: tuple[Path, dict[int, list[int]]],
) -> None:
    limits = ServiceLimits(max_k=20, max_body_bytes=200)
    with TestClient(create_app(Recommender(exported[0]), limits)) as client:
        for body, status in (
            ({"user": 1, "k": 5}, 200),
            ({"user": 1, "k": 21}, 422),
            ({"user": 1, "k": 0}, 422),
            ({"user": 1, "k": "5"}, 422),
            ({"user": 1, "more": 5}, 422),
            ({}, 422),
            ({"user": 10**9}, 404),
            ({"history": [1, 10**9]}, 404),
            ({"history": [1] * 200}, 413),
        ):
            assert client.post("/recommend", json=body).status_code == status, body
        assert client.post("/recommend", content=iter([b"{}"])).status_code == 411
        assert client.get("/health").json()["status"] == "ok"
        text = client.get("/metrics").text
        for line in (
            'recommend_requests_total{status="200"} 1',
            'recommend_requests_total{status="422"} 5',
            'recommend_requests_total{status="404"} 2',
            "recommend_seconds_count 10",
            "recommend_batches_total 1",
        ):
            assert line in text.splitlines()
        assert "/recommend" in client.get("/openapi.json").json()["paths"]
        assert client.get("/docs").status_code == 200


def test_a_request_that_takes_too_long_is_ended_and_the_service_goes_on(
    exported: tuple[Path, dict[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recommender = Recommender(exported[0])
    answer, slow = recommender.recommend, [True]

    def sometimes_slow(queries: list[Query], k: int) -> Any:
        if slow:
            slow.pop()
            time.sleep(1.0)
        return answer(queries, k)

    monkeypatch.setattr(recommender, "recommend", sometimes_slow)
    user = next(iter(exported[1]))

    async def ask() -> list[int]:
        app = create_app(recommender, ServiceLimits(max_answer_s=0.3))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            late = await client.post("/recommend", json={"user": user})
            await asyncio.sleep(1.0)
            in_time = await client.post("/recommend", json={"user": user})
            slow_body = await client.post("/recommend", content=_trickle(), headers={"content-length": "100"})
            return [late.status_code, in_time.status_code, slow_body.status_code]

    assert asyncio.run(ask()) == [504, 200, 504]


async def _trickle() -> AsyncIterator[bytes]:
    """A body that never comes to its end."""
    while True:
        yield b" "
        await asyncio.sleep(0.05)


def test_requests_at_one_time_share_batches_or_are_turned_away(
    exported: tuple[Path, dict[int, list[int]]],
) -> None:
    bundle, offline = exported

    async def ask(limits: ServiceLimits) -> tuple[list[httpx.Response], str]:
        app = create_app(Recommender(bundle), limits)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            users = list(offline)[:40]
            answers = await asyncio.gather(
                *(client.post("/recommend", json={"user": user, "k": 1 + user % 10}) for user in users)
            )
            return answers, (await client.get("/metrics")).text

    answers, text = asyncio.run(ask(ServiceLimits(max_wait_s=0.2)))
    for user, answer in zip(offline, answers, strict=False):
        assert [found["item"] for found in answer.json()["items"]] == offline[user][: 1 + user % 10]
    counts = dict(line.split() for line in text.splitlines() if line.startswith("recommend_batch"))
    assert int(counts["recommend_batched_total"]) == 40
    assert int(counts["recommend_batches_total"]) < 20
    answers, _ = asyncio.run(ask(ServiceLimits(max_waiting=1, max_batch=1)))
    assert {answer.status_code for answer in answers} == {200, 503}


def test_indexes_find_what_the_exact_search_finds() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((2000, 16)).astype(np.float32)
    queries = rng.standard_normal((50, 16)).astype(np.float32)
    expected = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    _, flat = build_index("flat", vectors).search(queries, 10)
    assert (flat == expected).all()
    for kind, floor in (("hnsw", 0.95), ("ivfpq", 0.2)):
        index = build_index(kind, vectors)
        report = measure_index(kind, index, vectors, queries, k=10)
        _, found = index.search(queries, 10)
        hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), expected.tolist(), strict=True)]
        assert report.recall == pytest.approx(np.mean(hits) / 10)
        assert report.recall >= floor
        assert report.bytes > 0


def test_a_missing_bundle_or_index_is_named(
    exported: tuple[Path, dict[int, list[int]]], tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match="make a bundle with"):
        Recommender(tmp_path)
    with pytest.raises(DatasetError, match=r"ivfpq\.faiss: no such index \(found: flat, hnsw\)"):
        Recommender(exported[0], "ivfpq")
    with pytest.raises(DatasetError, match="256 items"):
        build_index("ivfpq", np.zeros((10, 8), np.float32))
