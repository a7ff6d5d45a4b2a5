"""FAISS indexes of the item vectors by inner product, and how exact and fast they are."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import faiss
import numpy as np
import numpy.typing as npt

from recsys_tpu.data.metadata import DatasetError

IndexKind = Literal["flat", "ivfpq", "hnsw"]
INDEX_KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
_PQ_BITS = 8
_HNSW_LINKS = 32
Vectors = npt.NDArray[np.float32]


def build_index(kind: IndexKind, vectors: Vectors, *, seed: int = 1) -> Any:
    """An index over ``vectors`` ``[items, D]``; ids are their rows.

    flat compares with every item.  ivfpq keeps one byte for four dims in about ``4 sqrt(items)`` cells, an
    eighth of which are searched.  hnsw walks a graph of 32 links an item.

    Raises:
        DatasetError: ivfpq with fewer than 256 items (its codebooks have 256 entries).
    """
    items, dim = vectors.shape
    metric = faiss.METRIC_INNER_PRODUCT
    index: Any
    if kind == "flat":
        index = faiss.IndexFlatIP(dim)
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, _HNSW_LINKS, metric)
        index.hnsw.efConstruction = 200
        index.hnsw.efSearch = 256
    else:
        if items < 2**_PQ_BITS:
            raise DatasetError(f"index ivfpq needs 256 items or more, there are {items}: use flat or hnsw")
        cells = min(int(4 * items**0.5), max(items // 39, 1))  # 39 items a cell is FAISS's own advice
        parts = dim // 4 if dim % 4 == 0 else dim
        index = faiss.IndexIVFPQ(faiss.IndexFlatIP(dim), dim, cells, parts, _PQ_BITS, metric)
        index.nprobe = max(cells // 8, 1)
        index.cp.seed = seed
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
        index.train(vectors)
    index.add(vectors)
    return index


def save_index(index: Any, directory: Path, kind: IndexKind) -> None:
    faiss.write_index(index, str(directory / f"{kind}.faiss"))


def load_index(directory: Path, kind: IndexKind) -> Any:
    """
    Raises:
        DatasetError: the bundle has no index of that kind.
    """
    path = directory / f"{kind}.faiss"
    if not path.is_file():
        found = ", ".join(sorted(p.stem for p in directory.glob("*.faiss"))) or "none"
        raise DatasetError(
            f"{path}: no such index (found: {found}); make it with `retrieve index --kind {kind}`"
        )
    return faiss.read_index(str(path))


@dataclass(frozen=True)
class IndexReport:
    """An index measured on real queries.

    recall: the part of the exact best `k` that it finds, mean over the queries.
    milliseconds: of one query alone, median and 99th percentile; per query in one batch of all.
    """

    kind: str
    k: int
    queries: int
    items: int
    bytes: int
    recall: float
    single_ms_p50: float
    single_ms_p99: float
    batch_ms_per_query: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_index(kind: IndexKind, index: Any, vectors: Vectors, queries: Vectors, *, k: int) -> IndexReport:
    """Search `queries` ``[n, D]`` for the best `k`, against the exact result in the same run."""
    exact = faiss.IndexFlatIP(vectors.shape[1])
    exact.add(vectors)
    _, expected = exact.search(queries, k)
    started = time.perf_counter()
    _, found = index.search(queries, k)
    batch = time.perf_counter() - started
    single = []
    for query in queries[:1000]:
        started = time.perf_counter()
        index.search(query[None], k)
        single.append(1e3 * (time.perf_counter() - started))
    hits = [len(set(a) & set(b)) for a, b in zip(expected.tolist(), found.tolist(), strict=True)]
    return IndexReport(
        kind=kind,
        k=k,
        queries=len(queries),
        items=len(vectors),
        bytes=len(faiss.serialize_index(index)),
        recall=float(np.mean(hits)) / k,
        single_ms_p50=float(np.percentile(single, 50)),
        single_ms_p99=float(np.percentile(single, 99)),
        batch_ms_per_query=1e3 * batch / len(queries),
    )
