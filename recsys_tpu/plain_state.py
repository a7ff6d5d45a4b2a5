"""Plain, unsharded state_dicts: files of torch.save that torch and TorchRec on GPUs write and read.

A file holds a state_dict, names and shapes of the unsharded model; or, with optimizer state,
``{"model": state_dict, "optimizer": {dotted name: tensor}}``, the canonical form (`sharding.canonical_state`)
with names joined by dots.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsys_tpu.checkpoint_storage import CheckpointReader
from recsys_tpu.errors import CheckpointError

_PARTS = {"model", "optimizer"}


@dataclass
class LoadReport:
    """What a state_dict gave to a model: names; grown: rows before and now of tables that have grown."""

    loaded: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # in the model only: initial values
    unused: list[str] = field(default_factory=list)  # in the file only
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded"]
        if self.kept:
            lines.append(f"{len(self.kept)} keep their initial values: {_few(self.kept)}")
        if self.unused:
            lines.append(f"{len(self.unused)} in the file have no place: {_few(self.unused)}")
        lines += [
            f"{name} grew from {before:,} to {now:,} rows" for name, (before, now) in self.grown.items()
        ]
        return "; ".join(lines)


def read_plain(path: Path) -> dict[str, dict[str, Tensor]]:
    """{"model": ..., and "optimizer": ... if it is there} of a file; tensors are mapped, not read.

    Raises:
        CheckpointError: the file is no state_dict, or holds other objects than tensors.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; give a state_dict that torch.save wrote") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path}: not a state_dict that torch.save wrote, or one with more than tensors ({reason})"
        ) from error
    parts = (
        content if isinstance(content, dict) and content.keys() <= _PARTS and content else {"model": content}
    )
    for part, tensors in parts.items():
        if not isinstance(tensors, Mapping) or not all(isinstance(v, Tensor) for v in tensors.values()):
            raise CheckpointError(f"{path}: its {part} is not a mapping of names to tensors")
    return {part: dict(tensors) for part, tensors in parts.items()}


def load_plain(
    target: Mapping[str, Any],
    source: Mapping[str, Tensor],
    *,
    path: Path,
    partial: bool = False,
    grow: bool = False,
    of_all_ranks: bool = False,
) -> LoadReport:
    """Copies `source` into `target` in place: each rank the parts that it holds; not collective.

    target: (sharded) tensors by name, as `model.state_dict()`.  partial: names may be missing on either
    side.  of_all_ranks: `source` has what other ranks hold as well, which is no difference.  grow: a tensor
    of the target may have more rows; rows that the file does not have keep their values: those of the seeded
    initialisation, and zeros in optimizer state.

    Raises:
        CheckpointError: names or shapes differ otherwise; nothing is copied then.
    """
    report = LoadReport(
        loaded=[name for name in target if name in source],
        kept=[name for name in target if name not in source],
        unused=[name for name in source if name not in target],
    )
    if not partial and (report.kept or (report.unused and not of_all_ranks)):
        raise CheckpointError(
            f"{path}: belongs to another model: it lacks {_few(report.kept) or 'nothing'}, and has "
            f"{_few(report.unused) or 'nothing'} beyond it. To take what fits: train.start_partial=true"
        )
    if not report.loaded and target:
        raise CheckpointError(f"{path}: none of its names is one of the model's, such as {_few([*target])}")
    for name in report.loaded:
        wanted, found = tuple(target[name].size()), tuple(source[name].shape)
        if wanted == found:
            continue
        if not (len(wanted) == len(found) >= 1 and wanted[1:] == found[1:] and wanted[0] > found[0]):
            raise CheckpointError(f"{path}: {name} has shape {found}, the model's has {wanted}")
        if not grow:
            raise CheckpointError(
                f"{path}: {name} has {found[0]:,} rows, the model's has {wanted[0]:,}. To keep the initial "
                "values of the rows beyond: train.grow_tables=true"
            )
        report.grown[name] = (found[0], wanted[0])
    with torch.no_grad():
        for name in report.loaded:
            _copy(target[name], source[name])
    return report


def _copy(target: Tensor | ShardedTensor, source: Tensor) -> None:
    if not isinstance(target, ShardedTensor):
        rows = source.shape[0] if source.dim() else None
        (target[:rows] if rows is not None else target).copy_(source)
        return
    for shard in target.local_shards():
        starts = shard.metadata.shard_offsets
        ends = [start + size for start, size in zip(starts, shard.metadata.shard_sizes, strict=True)]
        part = source[tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))]
        if part.numel():
            shard.tensor[: part.shape[0]].copy_(part)


def read_checkpoint(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """{"model": ..., "optimizer": ...} of a checkpoint folder, whole, in this process's memory.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint.
    """
    reader = CheckpointReader(checkpoint)
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    whole = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in saved.items()}
    dcp.load(whole, storage_reader=reader, no_dist=True)
    return {
        part: {
            name.removeprefix(f"{part}."): value
            for name, value in whole.items()
            if name.startswith(f"{part}.")
        }
        for part in sorted(_PARTS)
    }


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
