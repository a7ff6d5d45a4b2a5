"""On a rank: train under one plan and save; load under another and continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recsys_tpu.checkpoint import CheckpointStore, TrainerState
from recsys_tpu.plain_state import load_plain, read_checkpoint, read_plain
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.canonical_state import canonical_state, restore_state
from tests.sharding.sequence_and_vbe import sequence_step, shard_sequences
from tests.sharding.sharded import dense_optimizer, shard, train_steps
from tests.sharding.training import Case


def tensors(dmp: DistributedModelParallel, dense: KeyedOptimizerWrapper | None = None) -> dict[str, Any]:
    """What a checkpoint holds: live, but for what has another canonical form."""
    optimizers = [dmp.fused_optimizer] if dense is None else [dmp.fused_optimizer, dense]
    state = CombinedOptimizer(optimizers).state_dict()["state"]
    return {"model": dmp.state_dict(), "optimizer": canonical_state(dmp, state)}


def load(dmp: DistributedModelParallel, dense: KeyedOptimizerWrapper | None, folder: str) -> None:
    if dense is not None:
        dense.init_state()
    target = tensors(dmp, dense)
    dcp.load(target, checkpoint_id=folder)
    dmp.load_state_dict(target["model"])
    restore_state(dmp, target["optimizer"])


def train_and_save(runtime: Runtime, jobs: list[tuple[Case, str]]) -> list[list[float]]:
    """Trains each case and saves it in its folder.  Returns this rank's losses."""
    losses = []
    for case, folder in jobs:
        dmp = shard(case, runtime)
        dense = dense_optimizer(dmp, case)
        losses.append(train_steps(dmp, case, runtime, range(case.steps), dense)[0])
        dcp.save(tensors(dmp, dense), checkpoint_id=folder)
    return losses


def load_and_continue(runtime: Runtime, jobs: list[tuple[Case, str, int]]) -> list[dict[str, Any]]:
    """Loads each checkpoint under the case's plan, saves it again beside, and trains `steps` more steps.

    The batches are those of `steps` ranks' worth of samples, whatever the number of ranks here.
    """
    results = []
    for case, folder, steps in jobs:
        dmp = shard(case, runtime)
        dense = dense_optimizer(dmp, case)
        load(dmp, dense, folder)
        losses, _ = train_steps(dmp, case, runtime, range(case.steps, case.steps + steps), dense)
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
        dense = dense_optimizer(dmp, case)
        load(dmp, dense, folder)
        dcp.save(tensors(dmp, dense), checkpoint_id=again)


def unpooled(runtime: Runtime, jobs: list[tuple[Case, Case, Any, str]]) -> None:
    """Trains unpooled tables for a step and saves them; loads that under another plan and saves it again."""
    for case, other, optimizer, folder in jobs:
        dmp = shard_sequences(case, runtime, optimizer)
        sequence_step(dmp, case, runtime, 0).backward()
        dcp.save(tensors(dmp), checkpoint_id=f"{folder}/first")
        dmp = shard_sequences(other, runtime, optimizer)
        load(dmp, None, f"{folder}/first")
        dcp.save(tensors(dmp), checkpoint_id=f"{folder}/again")


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
