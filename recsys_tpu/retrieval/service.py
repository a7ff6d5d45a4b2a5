"""A small HTTP service over a `Recommender`: concurrent requests are answered in batches.

POST /recommend, GET /health, GET /metrics (Prometheus text), GET /docs (OpenAPI page).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from recsys_tpu.retrieval.recommender import Query, Recommendation, Recommender, UnknownKeyError

Key = int | Annotated[str, Field(max_length=256)]
MAX_HISTORY = 1000
_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class ServiceLimits:
    """What a request may ask for, and how requests are put together.

    max_wait_s: how long the first request of a batch waits for others.
    max_waiting: requests in the queue; further ones are answered 503.
    max_answer_s: from the head of a request to its answer, a slowly sent body included; then it is 504.
    """

    max_k: int = 1000
    max_body_bytes: int = 64 * 1024
    max_batch: int = 64
    max_wait_s: float = 0.002
    max_waiting: int = 1024
    max_answer_s: float = 10.0


class RecommendRequest(BaseModel):
    """A known user, a history of items (oldest first), or a user with events since the bundle was made."""

    model_config = ConfigDict(extra="forbid", strict=True)

    user: Key | None = None
    history: list[Key] = Field(default=[], max_length=MAX_HISTORY)
    k: int = Field(10, ge=1)

    @model_validator(mode="after")
    def _someone_asks(self) -> RecommendRequest:
        if self.user is None and not self.history:
            raise ValueError("give user, history, or both")
        return self


class Item(BaseModel):
    item: Key
    score: float


class RecommendResponse(BaseModel):
    """Best items first."""

    items: list[Item]


@dataclass
class ServiceMetrics:
    """Counts since the service started."""

    answers: Counter[int] = field(default_factory=Counter)
    latency_s: Counter[float] = field(default_factory=Counter)
    latency_sum_s: float = 0.0
    batches: int = 0
    batched: int = 0

    def answered(self, status: int, seconds: float) -> None:
        self.answers[status] += 1
        self.latency_sum_s += seconds
        self.latency_s[next((edge for edge in _BUCKETS_S if seconds <= edge), float("inf"))] += 1

    def text(self) -> str:
        """Prometheus text exposition format."""
        lines = ["# TYPE recommend_requests_total counter"]
        lines += [f'recommend_requests_total{{status="{s}"}} {n}' for s, n in sorted(self.answers.items())]
        lines.append("# TYPE recommend_seconds histogram")
        total = 0
        for edge in (*_BUCKETS_S, float("inf")):
            total += self.latency_s[edge]
            label = "+Inf" if edge == float("inf") else f"{edge:g}"
            lines.append(f'recommend_seconds_bucket{{le="{label}"}} {total}')
        lines += [f"recommend_seconds_sum {self.latency_sum_s:.6f}", f"recommend_seconds_count {total}"]
        lines += ["# TYPE recommend_batches_total counter", f"recommend_batches_total {self.batches}"]
        lines += ["# TYPE recommend_batched_total counter", f"recommend_batched_total {self.batched}"]
        return "\n".join(lines) + "\n"


class _Batcher:
    """Collects queries that wait at the same time and answers them with one call."""

    def __init__(self, recommender: Recommender, limits: ServiceLimits, metrics: ServiceMetrics) -> None:
        self._recommender, self._limits, self._metrics = recommender, limits, metrics
        self._waiting: asyncio.Queue[tuple[Query, int, asyncio.Future[list[Recommendation]]]] = asyncio.Queue(
            limits.max_waiting
        )

    async def recommend(self, query: Query, k: int) -> list[Recommendation]:
        """
        Raises:
            asyncio.QueueFull: too many requests wait already.
        """
        answer: asyncio.Future[list[Recommendation]] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((query, k, answer))
        return await answer

    async def run(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            deadline = time.monotonic() + self._limits.max_wait_s
            while len(batch) < self._limits.max_batch:
                left = deadline - time.monotonic()
                try:
                    batch.append(await asyncio.wait_for(self._waiting.get(), max(left, 0.0)))
                except TimeoutError:
                    break
            await self._answer(batch)

    async def _answer(self, batch: list[tuple[Query, int, asyncio.Future[list[Recommendation]]]]) -> None:
        queries, k = [query for query, _, _ in batch], max(k for _, k, _ in batch)
        try:
            found = await asyncio.to_thread(self._recommender.recommend, queries, k)
        except Exception as error:
            for _, _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        self._metrics.batches += 1
        self._metrics.batched += len(batch)
        for (_, own_k, answer), items in zip(batch, found, strict=True):
            if not answer.done():  # the client may have gone
                answer.set_result(items[:own_k])


def create_app(recommender: Recommender, limits: ServiceLimits | None = None) -> FastAPI:
    """The service as an ASGI application."""
    limits = limits or ServiceLimits()
    metrics = ServiceMetrics()
    batcher = _Batcher(recommender, limits, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker

    app = FastAPI(title="recsys_tpu retrieval", version="1", lifespan=lifespan)

    @app.middleware("http")
    async def measured_and_limited(
        request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if request.url.path != "/recommend":
            return await answer(request)
        started = time.perf_counter()
        length = request.headers.get("content-length", "")
        response: Response
        if not length.isdecimal():
            response = JSONResponse({"detail": "a request needs a Content-Length"}, 411)
        elif int(length) > limits.max_body_bytes:
            response = JSONResponse({"detail": f"a body has {limits.max_body_bytes} bytes at most"}, 413)
        else:
            try:
                response = await asyncio.wait_for(answer(request), limits.max_answer_s)
            except TimeoutError:
                response = JSONResponse({"detail": f"no answer within {limits.max_answer_s:g} s"}, 504)
        metrics.answered(response.status_code, time.perf_counter() - started)
        return response

    @app.post("/recommend")
    async def recommend(request: RecommendRequest) -> RecommendResponse:
        if request.k > limits.max_k:
            raise HTTPException(422, f"k is {limits.max_k} at most")
        query = Query(user=request.user, history=request.history)
        try:
            recommender.check(query)
            found = await batcher.recommend(query, request.k)
        except UnknownKeyError as error:
            raise HTTPException(404, str(error)) from None
        except asyncio.QueueFull:
            raise HTTPException(503, "too many requests are waiting; try again") from None
        return RecommendResponse(items=[Item(item=one.item, score=one.score) for one in found])

    @app.get("/health")
    def health() -> dict[str, str | int]:
        info = recommender.bundle.info
        return {"status": "ok", "items": info.items, "users": info.users, "checkpoint": info.checkpoint}

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics_text() -> str:
        return metrics.text()

    return app
