"""Checkpoints through torch.distributed.checkpoint that a crash at any moment cannot spoil.

A checkpoint is written under a partial name, synced to disk, and renamed when every rank is done: a
folder ``step_N`` is complete or does not exist.  Only tensors go through DCP (nothing is unpickled);
what else a run needs is JSON.

    <run>/checkpoints/step_00000400/
        .metadata, __<rank>_0.distcp    weights and optimizer state
        trainer.json                    step, world size, what the model looks like
        config.yaml                     the resolved config
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from recsys_tpu.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8,})")
TRAINER_FILE = "trainer.json"
CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class TrainerState:
    """What a resumed run needs beside tensors."""

    step: int
    batches_per_epoch: int
    batch_size: int
    world_size: int
    num_embeddings: dict[str, int]


class CheckpointStore:
    """The checkpoints of one run, in one folder that every rank can reach."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory, self._keep = directory, keep

    def save(self, tensors: dict[str, Any], trainer: TrainerState, config_yaml: str) -> Path:
        """Write one checkpoint; collective. The newest `keep` stay.

        Raises:
            CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        final = self.directory / f"step_{trainer.step:08}"
        partial = self.directory / f".{final.name}.partial"
        if dist.get_rank() == 0:
            self._remove_partials()
            partial.mkdir(parents=True)
        dist.barrier()
        try:
            dcp.save(tensors, checkpoint_id=str(partial))
        except CheckpointException as error:
            raise CheckpointError(_save_failure(error, final, self.latest())) from error
        if dist.get_rank() == 0:
            _write(partial / TRAINER_FILE, json.dumps(asdict(trainer), indent=2))
            _write(partial / CONFIG_FILE, config_yaml)
            _sync_folder(partial)
            if final.exists():  # the same step again, after a resume from an older one
                shutil.rmtree(final)
            partial.rename(final)
            _sync_folder(self.directory)
            for old in self.list()[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier()
        return final

    def list(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        found = self.list()
        return found[-1] if found else None

    def _remove_partials(self) -> None:
        if self.directory.is_dir():
            for path in self.directory.glob(".step_*.partial"):
                shutil.rmtree(path)


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """The JSON side of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = checkpoint / TRAINER_FILE
    try:
        return TrainerState(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint}: not a checkpoint (it has no {TRAINER_FILE}); give a folder step_N of a run"
        ) from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); use an older checkpoint") from error


def load_tensors(checkpoint: Path, tensors: dict[str, Any]) -> None:
    """Read a checkpoint into `tensors` in place; collective.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or a file is damaged.
    """
    try:
        saved = dcp.FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{checkpoint}: its .metadata cannot be read ({error})") from error
    missing = sorted(set(_flat(tensors)) - set(saved))
    if missing:
        raise CheckpointError(
            f"{checkpoint}: has no {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}; it belongs to another model "
            "or optimizer"
        )
    try:
        dcp.load(tensors, checkpoint_id=str(checkpoint))
    except CheckpointException as error:
        raise CheckpointError(f"{checkpoint}: {_first_failure(error)}") from error


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            names += _flat(value, f"{prefix}{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _save_failure(error: CheckpointException, final: Path, previous: Path | None) -> str:
    full = any(
        isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause, _ in error.failures.values()
    )
    reason = "the disk is full" if full else _first_failure(error)
    kept = f"the previous checkpoint {previous} is untouched" if previous else "there is no earlier one"
    return (
        f"{final} could not be written: {reason}. {kept}. Free space (or set run.output_dir to another "
        "disk) and start again with train.resume=auto"
    )


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
