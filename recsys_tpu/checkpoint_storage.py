"""Checkpoint files: tensors through torch.distributed.checkpoint, everything that describes them as JSON.

Stock DCP pickles its metadata and every value that is no tensor.  Reading a pickle runs whatever code it
names, so here the metadata is JSON, values that are no tensors are refused, and tensors are read with
``weights_only``.  A manifest with the size and SHA-256 of every file makes damage visible.

    tensors.json          where each tensor's chunks lie
    __<rank>_<n>.distcp   the chunks
    manifest.json         size and SHA-256 of every other file; written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from recsys_tpu.errors import CheckpointError

TENSORS_FILE = "tensors.json"
MANIFEST_FILE = "manifest.json"
_HASH_BLOCK_BYTES = 1 << 22


# ---- staging: a copy on the host that training cannot change


@dataclass(frozen=True)
class StagedShards:
    """This rank's shards of a sharded tensor, copied to the host: ``(offsets, tensor)`` each."""

    size: torch.Size
    shards: list[tuple[torch.Size, Tensor]]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """One write a shard; the protocol by which DCP plans foreign tensor types."""
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=tensor.size()),
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=self.size,
                ),
            )
            for offsets, tensor in self.shards
        ]

    def shard(self, offsets: torch.Size | None) -> Tensor:
        return next(tensor for found, tensor in self.shards if found == offsets)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts of tensors as one dict with dotted names.

    Raises:
        TypeError: a value is neither a tensor nor a mapping, so it would have to be pickled.
    """
    tensors: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            tensors |= flat(value, f"{name}.")
        elif isinstance(value, Tensor | ShardedTensor):
            tensors[name] = value
        else:
            raise TypeError(f"{name} is a {type(value).__name__}; a checkpoint holds tensors only")
    return tensors


def with_local_part(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Without sharded tensors that have no shard on this rank: DCP asks those for a CUDA device."""
    return {
        name: value
        for name, value in tensors.items()
        if not isinstance(value, ShardedTensor) or value.local_shards()
    }


def stage(tree: Mapping[str, Any]) -> dict[str, Tensor | StagedShards]:
    """A copy in host memory of nested dicts of tensors, by dotted name; what trains may go on at once."""
    return {name: _stage_tensor(value) for name, value in flat(tree).items()}


def _stage_tensor(value: Tensor | ShardedTensor) -> Tensor | StagedShards:
    if not isinstance(value, ShardedTensor):
        return _copy(value)
    shards = [
        (torch.Size(shard.metadata.shard_offsets), _copy(shard.tensor)) for shard in value.local_shards()
    ]
    return StagedShards(value.size(), shards)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class StagedPlanner(DefaultSavePlanner):
    """DCP's default save plan, which also finds the shards of `StagedShards`."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.shard(index.offset) if isinstance(value, StagedShards) else super().lookup_object(index)


# ---- writing


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """A write's result that also carries the size and hash of the file that it went to."""

    file_bytes: int
    file_sha256: str


class CheckpointWriter(FileSystemWriter):
    """Writes ``.step_N.partial``; when every rank is done, rank 0 adds the rest and renames it to `final`.

    A crash at any moment leaves either no `final` or a whole one.

    Args:
        final: folder of the finished checkpoint; its parent also holds the partial one.
        documents: small text files by name, written beside the tensors.
    """

    def __init__(self, final: Path, documents: Mapping[str, str]) -> None:
        self._final, self._documents = final, documents
        super().__init__(partial_path(final), overwrite=False)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before any rank writes: remove what earlier crashes left."""
        folder = Path(self.path)
        for leftover in folder.parent.glob(".step_*"):
            shutil.rmtree(leftover)
        folder.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        folder = Path(self.path)
        hashes = {
            name: _fingerprint(folder / name) for name in {r.storage_data.relative_path for r in results}
        }
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                _HashedResult(r.index, r.size_in_bytes, r.storage_data, *hashes[r.storage_data.relative_path])
                for r in results
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when every rank has written and synced its files."""
        folder = Path(self.path)
        written = [result for of_rank in results for result in of_rank]
        places = {result.index: result.storage_data for result in written}
        documents = {**self._documents, TENSORS_FILE: json.dumps(_encode(metadata, places), indent=1)}
        files: dict[str, tuple[int, str]] = {}
        for result in written:
            assert isinstance(result, _HashedResult)
            files[result.storage_data.relative_path] = (result.file_bytes, result.file_sha256)
        for name, text in documents.items():
            _write(folder / name, text)
            files[name] = _fingerprint(folder / name)
        manifest = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(files.items())}
        _write(folder / MANIFEST_FILE, json.dumps({"format_version": 1, "files": manifest}, indent=1))
        sync_folder(folder)
        replace_folder(folder, self._final)


def partial_path(final: Path) -> Path:
    """Where a checkpoint lies until it is whole."""
    return final.with_name(f".{final.name}.partial")


def replace_folder(new: Path, final: Path) -> None:
    """Give `new` the name `final`; what had that name is moved away first, never seen half removed."""
    doomed = _hide(final) if final.exists() else None
    new.rename(final)
    sync_folder(final.parent)
    if doomed:
        shutil.rmtree(doomed)


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint; a crash on the way leaves no half of one under its name."""
    shutil.rmtree(_hide(folder))


def _hide(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".{folder.name}.removed"))


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames and new files of a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> tuple[int, str]:
    """(bytes, SHA-256) of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
        return file.tell(), digest.hexdigest()


# ---- reading


def read_manifest(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """(bytes, SHA-256) of each file of a checkpoint.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """
    path = checkpoint / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format_version"] != 1:
            raise CheckpointError(f"{path}: format {content['format_version']} is unknown to this version")
        return {
            _plain_name(name): (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in content["files"].items()
        }
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint}: not a checkpoint (it has no {MANIFEST_FILE}); give a folder step_N of a run"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: damaged ({error!r}); use an older checkpoint") from error


def _plain_name(name: str) -> str:
    if name != Path(name).name or name in ("", ".", ".."):
        raise CheckpointError(f"manifest names {name!r}, which lies outside the checkpoint")
    return name


def damage(checkpoint: Path, *, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, or None; of every `parts`-th file only.

    Raises:
        CheckpointError: the manifest itself is missing or damaged.
    """
    files = sorted(read_manifest(checkpoint).items())
    for name, (size, digest) in files[part::parts]:
        path = checkpoint / name
        if not path.is_file():
            return f"{path}: missing"
        found = path.stat().st_size
        if found != size:
            return f"{path}: has {found:,} bytes, but {size:,} were written: truncated or changed"
        if _fingerprint(path)[1] != digest:
            return f"{path}: corrupted, its SHA-256 is not the one that was written"
    return None


class CheckpointReader(FileSystemReader):
    """Reads what `CheckpointWriter` wrote; nothing is unpickled."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Shapes and places of all tensors.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        path = Path(self.path) / TENSORS_FILE
        try:
            return _decode(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing; use an older checkpoint") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: damaged ({error!r}); use an older checkpoint") from error


def saved_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a checkpoint, by dotted name.

    Raises:
        CheckpointError: the metadata is missing or damaged.
    """
    saved = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: tuple(tensor.size)
        for name, tensor in saved.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


def _encode(metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, Any]:
    by_place = {(index.fqn, index.offset): info for index, info in places.items()}
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert not isinstance(tensor, BytesStorageMetadata), f"{name} is no tensor"
        chunks = []
        for chunk in tensor.chunks:
            info = by_place.get((name, chunk.offsets)) or by_place[(name, None)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": info.relative_path,
                    "position": info.offset,
                    "bytes": info.length,
                }
            )
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return tensors


def _decode(content: Mapping[str, Any]) -> Metadata:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in content.items():
        dtype = getattr(torch, entry["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"tensor {name} has dtype {entry['dtype']!r}, which torch does not know")
        chunks = [
            ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
            for chunk in entry["chunks"]
        ]
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(entry["size"]), chunks
        )
        for number, (chunk, stored) in enumerate(zip(chunks, entry["chunks"], strict=True)):
            places[MetadataIndex(name, chunk.offsets, number)] = _StorageInfo(
                _plain_name(stored["file"]), int(stored["position"]), int(stored["bytes"])
            )
    return Metadata(state_dict_metadata=tensors, storage_data=places)
