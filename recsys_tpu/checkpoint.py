"""Checkpoints of a run: written in the background, whole or not there, verified before they are used.

A checkpoint is a folder.  It is written under a hidden name, synced to disk, and renamed when every rank
is done, so that ``step_N`` is whole or does not exist (`checkpoint_storage` has the files).

    <run>/checkpoints/step_00000400/
        tensors.json, __<rank>_0.distcp     weights and optimizer state
        trainer.json                        step, batch, what the model looks like
        config.yaml                         the resolved config
        manifest.json                       size and SHA-256 of every file
"""

from __future__ import annotations

import errno
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from recsys_tpu.checkpoint_storage import (
    CheckpointReader,
    CheckpointWriter,
    StagedPlanner,
    damage,
    flat,
    remove_folder,
    saved_shapes,
    stage,
    with_local_part,
)
from recsys_tpu.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8,})")
_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not grow that large",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EIO: "the disk reports an error",
}
TRAINER_FILE = "trainer.json"
CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class TrainerState:
    """What a resumed run needs beside tensors."""

    step: int
    world_size: int
    num_embeddings: dict[str, int]
    data_order: dict[str, Any]

    def refuse_others(self, checkpoint: Path, current: TrainerState) -> None:
        """Check that a run in state `current` can go on from this one, at any number of ranks.

        Raises:
            CheckpointError: tables have other sizes, or step N would not see the same rows.
        """
        for what, then, now in (
            ("table", self.num_embeddings, current.num_embeddings),
            ("data", self.data_order, current.data_order),
        ):
            differences = [
                f"{what} {key} was {then.get(key, 'absent')}, now {now.get(key, 'absent')}"
                for key in dict.fromkeys([*then, *now])
                if then.get(key) != now.get(key)
            ]
            if differences:
                raise CheckpointError(
                    f"{checkpoint}: belongs to another run: {'; '.join(differences[:5])}. "
                    "Use the config.yaml beside it, or start anew with train.resume=never"
                )


class CheckpointStore:
    """The checkpoints of one run, in one folder that every rank can reach.

    Attributes:
        blocked_s: seconds that `save` and `wait` have kept training waiting so far.
    """

    def __init__(self, directory: Path, *, keep: int) -> None:
        """Collective: makes a process group of its own, for saving beside the training's collectives."""
        self.directory, self._keep = directory, keep
        self._group = dist.new_group(backend="gloo")
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.blocked_s = 0.0

    def save(self, tensors: Mapping[str, Any], trainer: TrainerState, config_yaml: str) -> Path:
        """Copy `tensors` to the host and write them in the background; collective. The newest `keep` stay.

        Returns the folder that will hold the checkpoint: it is there after `wait`.

        Raises:
            CheckpointError: an earlier one could not be written (disk full, not writable); those before
                it are untouched.
        """
        self.wait()
        started = time.perf_counter()
        final = self.directory / f"step_{trainer.step:08}"
        documents = {TRAINER_FILE: json.dumps(asdict(trainer), indent=2), CONFIG_FILE: config_yaml}
        staged = stage(tensors)
        self._writing = threading.Thread(
            target=self._write, args=(staged, final, documents), name="checkpoint-writer", daemon=True
        )
        self._writing.start()
        self.blocked_s += time.perf_counter() - started
        return final

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        started = time.perf_counter()
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        self.blocked_s += time.perf_counter() - started
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def list(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))

    def newest_intact(self, report: Callable[[str], None]) -> Path | None:
        """The newest checkpoint whose files are as they were written, or None if there is none; collective.

        Damaged ones are passed over, each with a line to `report`.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged.
        """
        found = self.list()
        problem = None
        for checkpoint in reversed(found):
            problem = self._damage(checkpoint)
            if problem is None:
                return checkpoint
            report(f"damaged checkpoint passed over: {problem}")
        if problem is not None:
            raise CheckpointError(
                f"{self.directory}: all {len(found)} checkpoints are damaged, the oldest: {problem}. "
                "Restore one from a copy, or start anew with train.resume=never and another run.name"
            )
        return None

    def verify(self, checkpoint: Path) -> None:
        """Check every file against the manifest, the work shared among ranks; collective.

        Raises:
            CheckpointError: naming the first damaged file.
        """
        problem = self._damage(checkpoint)
        if problem is not None:
            raise CheckpointError(f"{problem}. Use an older checkpoint (train.resume=auto does)")

    def _damage(self, checkpoint: Path) -> str | None:
        try:
            own = damage(checkpoint, part=dist.get_rank(), parts=dist.get_world_size())
        except CheckpointError as error:
            own = str(error)
        except OSError as error:
            own = f"{error.filename or checkpoint}: cannot be read ({error.strerror})"
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, own, group=self._group)
        return next((problem for problem in problems if problem is not None), None)

    def _write(self, staged: dict[str, Any], final: Path, documents: Mapping[str, str]) -> None:
        """Runs in a thread; what goes wrong is kept for `wait`."""
        try:
            dcp.save(
                staged,
                storage_writer=CheckpointWriter(final, documents),
                planner=StagedPlanner(),
                process_group=self._group,
            )
            if dist.get_rank() == 0:
                for old in self.list()[: -self._keep]:
                    remove_folder(old)
        except CheckpointException as error:  # no Exception: DCP derives it from BaseException
            self._failure = CheckpointError(_save_failure(error.failures, final, self.list()))
            self._failure.__cause__ = error
        except Exception as error:
            self._failure = error


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
    """Read a checkpoint into `tensors` in place; collective. `CheckpointStore.verify` it first.

    For each key of `tensors` the checkpoint must hold exactly the tensors below it; keys that only the
    checkpoint has (the optimizer's, for an evaluation) are not read.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape, or a file is damaged.
    """
    wanted = flat(tensors)
    saved = saved_shapes(checkpoint)
    below = {name for name in saved if name.split(".")[0] in tensors}
    # a rank has the optimizer state of its own tables only, so all ranks together say what has a place
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, list(wanted))
    places = {name for of_rank in names for name in of_rank}
    for problem, found in (
        ("has no", sorted(places - below)),
        ("has, but this run has no place for,", sorted(below - places)),
    ):
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise CheckpointError(
                f"{checkpoint}: {problem} {', '.join(found[:5])}{more}; it belongs to another model or "
                "optimizer. Use the config.yaml beside it"
            )
    for name, value in wanted.items():
        shape = saved[name]
        if tuple(value.size()) != shape:
            raise CheckpointError(
                f"{checkpoint}: {name} has shape {shape}, this run's has "
                f"{tuple(value.size())}. Use the config.yaml beside it"
            )
    try:
        dcp.load(with_local_part(wanted), storage_reader=CheckpointReader(checkpoint))
    except CheckpointException as error:
        raise CheckpointError(f"{checkpoint}: {_first_failure(error.failures)}") from error


def _first_failure(failures: Mapping[int, Any]) -> str:
    rank, (cause, _) = next(iter(failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _save_failure(failures: Mapping[int, Any], final: Path, kept: list[Path]) -> str:
    reasons = (
        f"{_DISK_ERRORS[cause.errno]} (rank {rank})"
        for rank, (cause, _) in failures.items()
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS
    )
    reason = next(reasons, None) or _first_failure(failures)
    earlier = f"The previous checkpoint {kept[-1]} is untouched" if kept else "There is no earlier one"
    return (
        f"{final} could not be written: {reason}. {earlier}. Free space (or set run.output_dir to another "
        "disk) and start again with train.resume=auto"
    )
