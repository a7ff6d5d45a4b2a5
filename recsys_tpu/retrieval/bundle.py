"""A folder with all that serving needs, readable without TorchRec.

    bundle.json         dims, widths of the features, histories; where it came from
    query_tower.pt2     the query tower with its tables (torch.export)
    item_vectors.npy    ``[items, D]`` float32
    items.parquet       the key of each item, in the order of the vectors
    users.parquet       key, ids of the user's features, and the known events in time order
    <kind>.faiss        indexes, and index_report.json about them

bundle.json is written last: a folder that has one is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from recsys_tpu.data.metadata import DatasetError, write_json_atomically

BUNDLE_FILE = "bundle.json"


class BundleInfo(BaseModel):
    """The content of bundle.json."""

    model_config = ConfigDict(extra="forbid")

    format_version: Literal[1] = 1
    checkpoint: str
    embedding_dim: int
    items: int
    users: int
    user_widths: dict[str, int]
    """Ids per user of each feature that users.parquet holds."""
    history_lengths: dict[str, int]
    """How many of the latest known events each history takes."""
    exclude_seen: bool


@dataclass(frozen=True)
class Bundle:
    """A loaded bundle.

    users: row of each user key in `user_ids` and `events`.
    user_ids: ``[users]`` lists of ids by feature.
    events: known items of each user in time order.
    """

    directory: Path
    info: BundleInfo
    item_keys: list[Any]
    item_ids: dict[Any, int]
    item_vectors: npt.NDArray[np.float32]
    users: dict[Any, int]
    user_ids: dict[str, list[list[int]]]
    events: list[list[int]]
    query_tower: Callable[[dict[str, Tensor]], Tensor]


def save_bundle(
    directory: Path,
    *,
    info: BundleInfo,
    query_tower: torch.export.ExportedProgram,
    item_vectors: npt.NDArray[np.float32],
    item_keys: list[Any],
    user_keys: list[Any],
    user_ids: Mapping[str, list[list[int]]],
    events: list[list[int]],
) -> None:
    """Write a bundle; an older one in the folder stops being one first."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / BUNDLE_FILE).unlink(missing_ok=True)
    torch.export.save(query_tower, directory / "query_tower.pt2")
    np.save(directory / "item_vectors.npy", item_vectors)
    pq.write_table(pa.table({"key": item_keys}), directory / "items.parquet")
    lists = pa.list_(pa.int32())
    columns = {f"ids_{name}": pa.array(values, lists) for name, values in user_ids.items()}
    table = pa.table({"key": pa.array(user_keys), "events": pa.array(events, lists), **columns})
    pq.write_table(table, directory / "users.parquet")
    write_json_atomically(directory / BUNDLE_FILE, info.model_dump())


def load_bundle(directory: Path) -> Bundle:
    """Read a bundle.

    Raises:
        DatasetError: the folder is no bundle, unfinished or of another version.
    """
    path = directory / BUNDLE_FILE
    try:
        info = BundleInfo.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetError(
            f"{path}: not found; make a bundle with `python -m recsys_tpu.retrieve index --checkpoint STEP_N "
            "--output FOLDER`"
        ) from None
    except ValidationError as error:
        raise DatasetError(f"{path}: of another version or damaged ({error}); make it again") from None
    item_keys = pq.read_table(directory / "items.parquet")["key"].to_pylist()
    users = pq.read_table(directory / "users.parquet")
    return Bundle(
        directory=directory,
        info=info,
        item_keys=item_keys,
        item_ids={key: number for number, key in enumerate(item_keys)},
        item_vectors=np.load(directory / "item_vectors.npy"),
        users={key: number for number, key in enumerate(users["key"].to_pylist())},
        user_ids={name: users[f"ids_{name}"].to_pylist() for name in info.user_widths},
        events=users["events"].to_pylist(),
        query_tower=torch.export.load(directory / "query_tower.pt2").module(),
    )
