"""Synthetic multi-hot ids, the same as MLPerf training v2 makes from one-hot Criteo data.

The reference (mlcommons/training aa344c7, recommendation_v2/torchrec_dlrm/multi_hot.py) seeds numpy's
legacy generator with 0 and draws, table after table in the order of the features, ``size - 1`` further ids
for every row of the table; a sample's id then stands for itself and the ids drawn for it. So an id always
brings the same others, a table of size 1 draws nothing, and the draws of a table depend on the sizes of all
tables before it.

The draws of MLPerf's tables are 23 GB. They are made in pieces, kept in files that are mapped into memory,
and looked up when a batch is put together: the data on disk stays one-hot (the reference's materialised
data set is 3.8 TB).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from rich.progress import Progress

from recsys_tpu.data.metadata import DatasetError

Ids = NDArray[np.int32]
Size = Annotated[int, Field(ge=1)]

_PIECE_IDS = 1 << 22  # drawn at once: 32 MiB of int64
_VERSION = 1  # part of the fingerprint: raise it when the output changes


class MultiHot(BaseModel):
    """How one-hot ids become multi-hot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: dict[str, Size] = Field(
        description="ids that each id of a feature becomes; others stay as they are"
    )
    distribution: Literal["uniform", "pareto"] = Field(
        "uniform", description="of the further ids; pareto: numpy's pareto(0.25), modulo the table"
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="the reference's is 0")

    def check_features(self, num_embeddings: Mapping[str, int]) -> None:
        """Check that the data has every feature.

        Raises:
            DatasetError: naming those that it lacks.
        """
        unknown = [name for name in self.sizes if name not in num_embeddings]
        if unknown:
            raise DatasetError(
                f"data.multi_hot.sizes names {', '.join(unknown)}, which the data does not have; "
                f"it has {', '.join(num_embeddings)}"
            )

    def bytes_on_disk(self, num_embeddings: Mapping[str, int]) -> int:
        """Of the files that `ensure_multi_hot_tables` writes."""
        return sum(4 * num_embeddings[name] * (size - 1) for name, size in self.sizes.items())


class MultiHotTables:
    """The drawn ids of a directory, mapped into memory; processes of a machine share the pages."""

    def __init__(self, directory: Path, sizes: Mapping[str, int], num_embeddings: Mapping[str, int]) -> None:
        self.fingerprint = directory.name
        self._drawn: dict[str, Ids] = {
            name: np.memmap(_file(directory, name), "<i4", mode="r", shape=(num_embeddings[name], size - 1))
            for name, size in sizes.items()
            if size > 1
        }

    def size(self, feature: str) -> int:
        """Ids that each id of the feature becomes."""
        return self._drawn[feature].shape[1] + 1 if feature in self._drawn else 1

    def expand(self, feature: str, ids: Ids) -> Ids:
        """Ids ``[N]`` of a feature to ``[N * size]``: each one followed by those drawn for it."""
        if feature not in self._drawn:
            return ids
        drawn = self._drawn[feature]
        result = np.empty((len(ids), drawn.shape[1] + 1), np.int32)
        result[:, 0] = ids
        result[:, 1:] = drawn[ids]
        return result.reshape(-1)


def ensure_multi_hot_tables(
    settings: MultiHot, num_embeddings: Mapping[str, int], cache_dir: Path
) -> MultiHotTables:
    """The tables of these sizes, drawn on first use; several processes may ask at once.

    Args:
        settings: sizes, distribution and seed.
        num_embeddings: rows of each table, by feature, in the order in which they are drawn.
        cache_dir: where they are kept, in a folder named after all that decides them.

    Raises:
        DatasetError: the data lacks a feature, or the disk has no room.
    """
    settings.check_features(num_embeddings)
    directory = cache_dir / f"multi-hot-{_fingerprint(settings, num_embeddings)}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            _draw_all(settings, num_embeddings, directory)
    return MultiHotTables(directory, settings.sizes, num_embeddings)


def _fingerprint(settings: MultiHot, num_embeddings: Mapping[str, int]) -> str:
    tables = [[name, rows, settings.sizes.get(name, 1)] for name, rows in num_embeddings.items()]
    text = json.dumps([_VERSION, settings.distribution, settings.seed, tables])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _draw_all(settings: MultiHot, num_embeddings: Mapping[str, int], directory: Path) -> None:
    """Write every table's file; the directory appears when all are there."""
    needed, free = settings.bytes_on_disk(num_embeddings), shutil.disk_usage(directory.parent).free
    if needed > free:
        raise DatasetError(
            f"{directory}: the multi-hot ids take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
            "set data.cache_dir to a larger disk"
        )
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    generator = np.random.RandomState(settings.seed)
    with Progress(disable=needed < 1e9, transient=True) as progress:
        task = progress.add_task("multi-hot ids", total=needed)
        for name, rows in num_embeddings.items():
            columns = settings.sizes.get(name, 1) - 1
            if not columns:
                continue
            piece_rows = max(_PIECE_IDS // columns, 1)
            with _file(partial, name).open("wb") as file:
                for start in range(0, rows, piece_rows):
                    drawn = _draw(generator, settings, rows, (min(piece_rows, rows - start), columns))
                    file.write(drawn.astype("<i4").data)
                    progress.advance(task, 4 * drawn.size)
    partial.rename(directory)


def _draw(
    generator: np.random.RandomState, settings: MultiHot, rows: int, shape: tuple[int, int]
) -> NDArray[np.int64]:
    """The next ids of a table; numpy draws one number after another, so pieces join without a seam."""
    if settings.distribution == "uniform":
        return generator.randint(0, rows, size=shape)
    draws = generator.pareto(a=0.25, size=shape)
    # The reference casts to int32: x86 makes the smallest int32 of a number that does not fit.
    whole = np.where(draws < 2.0**31, draws, -(2.0**31)).astype(np.int64)
    return whole % rows


def _file(directory: Path, feature: str) -> Path:
    return directory / f"{feature}.ids"
