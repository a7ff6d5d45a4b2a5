"""Load test of `retrieve serve`: latency and throughput at several numbers of concurrent clients.

    python -m recsys_tpu.retrieve serve --bundle bundle --port 8000 &
    python benchmarks/retrieval_load.py --url http://127.0.0.1:8000 --bundle bundle

Every client asks for the best 10 of one random known user after another.  Client and server share the
machine, so the figures are of both together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    users = pq.read_table(arguments.bundle / "users.parquet", columns=["key"])["key"].to_pylist()
    console = Console(highlight=False)
    console.print(f"command: {' '.join(sys.argv)}\nmachine: {platform.machine()}, {os.cpu_count()} cores")
    table = Table(title=f"POST /recommend, k = 10, {len(users):,} users")
    for column in ("clients", "requests", "requests/s", "ms p50", "ms p95", "ms p99", "failed"):
        table.add_column(column, justify="right")
    for clients in arguments.clients:
        asyncio.run(load(arguments.url, users, 1, seconds=1.0))  # warm-up
        started = time.perf_counter()
        latencies, failed = asyncio.run(load(arguments.url, users, clients, seconds=arguments.seconds))
        seconds = time.perf_counter() - started
        percentiles = np.percentile(latencies, [50, 95, 99]) * 1e3
        table.add_row(
            str(clients),
            str(len(latencies)),
            f"{len(latencies) / seconds:.0f}",
            *(f"{value:.1f}" for value in percentiles),
            str(failed),
        )
    console.print(table)


async def load(url: str, users: list[int | str], clients: int, *, seconds: float) -> tuple[list[float], int]:
    """(seconds of every answered request, number of failed ones)."""
    end = time.perf_counter() + seconds
    latencies: list[float] = []
    failed = 0

    async def one(seed: int, client: httpx.AsyncClient) -> None:
        nonlocal failed
        rng = np.random.default_rng(seed)
        while time.perf_counter() < end:
            user = users[rng.integers(len(users))]
            started = time.perf_counter()
            try:
                answer = await client.post("/recommend", json={"user": user, "k": 10})
                answer.raise_for_status()
            except httpx.HTTPError:
                failed += 1
            else:
                latencies.append(time.perf_counter() - started)

    async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
        await asyncio.gather(*(one(seed, client) for seed in range(clients)))
    return latencies, failed


if __name__ == "__main__":
    main()
