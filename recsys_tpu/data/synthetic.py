"""A synthetic click log with planted truth: the click probability of every row is known.

So a model's AUC can be compared with the best that any model could reach on the same rows (the AUC of
the true probabilities), with no download.  13 dense and 26 categorical features, as in Criteo's logs.

    logit = bias + sum_j f_j(dense_j) + sum_c effect_c[id_c] + sum_(a,b) <u_a[id_a], u_b[id_b]>

with Zipf-distributed ids, per-id effects, smooth non-linear f_j, and pairwise interactions of latent
vectors over a few feature pairs.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field
from rich.progress import Progress

from recsys_tpu.data.metadata import METADATA_FILE, DatasetMetadata, Split

NUM_DENSE = 13
ROW_GROUP_ROWS = 16_384
PROBABILITY_COLUMN = "click_probability"
_LATENT_DIM = 4
_INTERACTING_PAIRS = 4
_VERSION = 1  # part of the fingerprint: raise it when the generator's output changes

FloatArray = npt.NDArray[np.float64]


class SyntheticLog(BaseModel):
    """Parameters of the generator; together they decide every byte of the log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train_rows: Annotated[int, Field(gt=0)] = 2_000_000
    test_rows: Annotated[int, Field(gt=0)] = 100_000
    num_embeddings: Annotated[
        tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=2, description="rows of table C1, C2, …")
    ] = (
        1000, 600, 800, 400, 300, 20, 500, 200, 3, 1000, 400, 300, 250,
        26, 350, 700, 10, 280, 200, 4, 900, 18, 15, 500, 100, 400,
    )  # fmt: skip
    zipf_exponent: Annotated[float, Field(gt=0)] = 1.2
    click_rate_logit: float = -1.6
    seed: Annotated[int, Field(ge=0)] = 7

    @property
    def sparse_features(self) -> list[str]:
        return [f"C{index + 1}" for index in range(len(self.num_embeddings))]

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table, by feature."""
        return dict(zip(self.sparse_features, self.num_embeddings, strict=True))

    @property
    def dense_features(self) -> list[str]:
        return [f"I{index + 1}" for index in range(NUM_DENSE)]

    def fingerprint(self) -> str:
        text = f"{_VERSION}:{self.model_dump_json()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def ensure_synthetic_log(log: SyntheticLog, cache_dir: Path) -> Path:
    """Directory of the generated log, made on first use.

    The log is written under a temporary name and renamed when complete, so an interrupted generation
    leaves nothing that looks finished.

    Raises:
        OSError: the cache cannot be written (full disk, no permission).
    """
    directory = cache_dir / f"synthetic-{log.fingerprint()}"
    if (directory / METADATA_FILE).exists():
        return directory
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = cache_dir / f".{directory.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    splits = {}
    with Progress(transient=True) as progress:
        for split, rows in (("train", log.train_rows), ("test", log.test_rows)):
            task = progress.add_task(f"generating synthetic {split} log", total=rows)
            positives = 0
            path = partial / split / "part-00000.parquet"
            path.parent.mkdir(parents=True)
            with pq.ParquetWriter(path, _schema(log), compression="zstd") as writer:
                for chunk, start in enumerate(range(0, rows, ROW_GROUP_ROWS)):
                    count = min(ROW_GROUP_ROWS, rows - start)
                    table = generate_chunk(log, split, chunk, count)
                    positives += int(np.asarray(table["label"]).sum())
                    writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
                    progress.advance(task, count)
            splits[split] = Split(rows=rows, positives=positives, files=[f"{split}/{path.name}"])
    DatasetMetadata(
        dense_features=log.dense_features,
        sparse_features=log.sparse_features,
        num_embeddings=log.table_rows,
        row_group_rows=ROW_GROUP_ROWS,
        splits=splits,
        recipe={"kind": "synthetic", "generator_version": _VERSION},
        source={"generator": log.model_dump(mode="json")},
    ).save(partial)
    partial.rename(directory)
    return directory


def generate_chunk(log: SyntheticLog, split: str, chunk: int, rows: int) -> pa.Table:
    """Rows of one row group; depends on (log, split, chunk) only, so chunks can be made in any order."""
    truth = _planted_truth(log)
    rng = np.random.default_rng([log.seed, {"train": 0, "test": 1}[split], chunk])
    # heavy-tailed counts, as ad logs have, given to the model as log(1 + x)
    dense = np.log1p(np.floor(rng.lognormal(1.0, 1.2, size=(rows, NUM_DENSE))))
    ids = [
        permutation[np.searchsorted(cdf, rng.random(rows), side="right").clip(max=len(cdf) - 1)]
        for cdf, permutation in zip(truth.cdfs, truth.permutations, strict=True)
    ]
    probability = 1.0 / (1.0 + np.exp(-truth.logit(dense, ids)))
    label = (rng.random(rows) < probability).astype(np.int8)
    columns: dict[str, npt.NDArray[np.generic]] = {"label": label}
    columns |= {name: dense[:, j].astype(np.float32) for j, name in enumerate(log.dense_features)}
    columns |= {name: ids[c].astype(np.int32) for c, name in enumerate(log.sparse_features)}
    columns[PROBABILITY_COLUMN] = probability
    return pa.table(columns, schema=_schema(log))


class _Truth:
    """The planted parameters, drawn once from the log's seed."""

    def __init__(self, log: SyntheticLog) -> None:
        rng = np.random.default_rng([log.seed, 99])
        tables = len(log.num_embeddings)
        self.bias = log.click_rate_logit
        self.cdfs: list[FloatArray] = []
        self.permutations: list[npt.NDArray[np.int64]] = []
        self.effects: list[FloatArray] = []
        self.latents: list[FloatArray] = []
        for rows in log.num_embeddings:
            weights = np.arange(1, rows + 1, dtype=np.float64) ** -log.zipf_exponent
            self.cdfs.append(np.cumsum(weights / weights.sum()))
            self.permutations.append(rng.permutation(rows))
            self.effects.append(rng.normal(0.0, 0.22, rows))
            self.latents.append(rng.normal(0.0, 0.35, (rows, _LATENT_DIM)))
        self.scale = rng.normal(0.0, 0.25, NUM_DENSE)
        self.shift = rng.uniform(0.5, 2.5, NUM_DENSE)
        # interactions between tables that are small enough for their latent vectors to be learnt
        small = [c for c in np.argsort(log.num_embeddings) if log.num_embeddings[c] <= 100] or list(
            range(tables)
        )
        self.pairs = [(small[i % len(small)], small[(i + 3) % len(small)]) for i in range(_INTERACTING_PAIRS)]

    def logit(self, dense: FloatArray, ids: list[npt.NDArray[np.int64]]) -> FloatArray:
        result = self.bias + np.tanh(dense - self.shift) @ self.scale
        for effect, id_column in zip(self.effects, ids, strict=True):
            result += effect[id_column]
        for a, b in self.pairs:
            result += np.einsum("nd,nd->n", self.latents[a][ids[a]], self.latents[b][ids[b]])
        return np.asarray(result)


@functools.lru_cache(maxsize=4)
def _planted_truth(log: SyntheticLog) -> _Truth:
    return _Truth(log)


def _schema(log: SyntheticLog) -> pa.Schema:
    return pa.schema(
        [("label", pa.int8())]
        + [(name, pa.float32()) for name in log.dense_features]
        + [(name, pa.int32()) for name in log.sparse_features]
        + [(PROBABILITY_COLUMN, pa.float64())]
    )
