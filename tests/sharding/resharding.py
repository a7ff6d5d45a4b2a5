"""On a rank: train under one plan and save; load under another and continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys_tpu.checkpoint import CheckpointStore, TrainerState
from recsys_tpu.plain_state import load_plain, read_checkpoint, read_plain
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.canonical_state import canonical_state, restore_state
from tests.sharding.sharded import shard, train_steps
from tests.sharding.training import Case


def tensors(dmp: DistributedModelParallel) -> dict[str, Any]:
    state = dmp.fused_optimizer.state_dict()["state"]
    return {"model": dmp.state_dict(), "optimizer": canonical_state(dmp, state)}


def train_and_save(runtime: Runtime, jobs: list[tuple[Case, str]]) -> list[list[float]]:
    """Trains each case and saves it in its folder.  Returns this rank's losses."""
    losses = []
    for case, folder in jobs:
        dmp = shard(case, runtime)
        losses.append(train_steps(dmp, case, runtime, range(case.steps))[0])
        dcp.save(tensors(dmp), checkpoint_id=folder)
    return losses


def load_and_continue(runtime: Runtime, jobs: list[tuple[Case, str, int]]) -> list[dict[str, Any]]:
    """Loads each checkpoint under the case's plan, saves it again beside, and trains `steps` more steps.

    The batches are those of `steps` ranks' worth of samples, whatever the number of ranks here.
    """
    results = []
    for case, folder, steps in jobs:
        dmp = shard(case, runtime)
        target = tensors(dmp)
        dcp.load(target, checkpoint_id=folder)
        dmp.load_state_dict(target["model"])
        restore_state(dmp, target["optimizer"])
        losses, _ = train_steps(dmp, case, runtime, range(case.steps, case.steps + steps))
        results.append({"losses": losses})
    return results


def save_and_continue(
    runtime: Runtime, saving: tuple[Case, str], loading: tuple[Case, str, int]
) -> list[dict[str, Any]]:
    """Both in one set of processes: trains and saves one run, and continues another."""
    train_and_save(runtime, [saving])
    return load_and_continue(runtime, [loading])


def resave(runtime: Runtime, jobs: list[tuple[Case, str, str]]) -> None:
    """Loads a checkpoint under the case's plan and saves it again."""
    for case, folder, again in jobs:
        dmp = shard(case, runtime)
        target = tensors(dmp)
        dcp.load(target, checkpoint_id=folder)
        dmp.load_state_dict(target["model"])
        restore_state(dmp, target["optimizer"])
        dcp.save(tensors(dmp), checkpoint_id=again)


def through_plain(runtime: Runtime, case: Case, folder_name: str) -> None:
    """Takes in.pt (smaller tables) into a sharded model, saves a checkpoint, and writes that as out.pt."""
    folder = Path(folder_name)
    dmp = shard(case, runtime)
    state = dmp.state_dict()
    load_plain(state, read_plain(folder / "in.pt")["model"], path=folder / "in.pt", grow=True)
    dmp.load_state_dict(state)
    store = CheckpointStore(folder / "checkpoints", keep=1)
    saved = store.save(tensors(dmp), TrainerState(1, runtime.world_size, {}, {}), "")
    store.wait()
    if runtime.rank == 0:
        torch.save(read_checkpoint(saved), folder / "out.pt")


def read_whole(folder: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return _flat(found)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
