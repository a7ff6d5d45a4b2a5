"""From a trained two-tower model to a bundle with indexes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys_tpu.errors import ConfigError
from recsys_tpu.retrieval.bundle import BundleInfo, save_bundle
from recsys_tpu.retrieval.index import IndexKind, IndexReport, build_index, measure_index, save_index
from recsys_tpu.retrieval.query_tower import QueryTower, export_query_tower
from recsys_tpu.retrieval.recommender import Recommender
from recsys_tpu.sharding.whole import whole_state
from recsys_tpu.tasks.retrieval import RetrievalTask
from recsys_tpu.trainer import Trainer

_REPORT_K = 10


def export_bundle(
    trainer: Trainer, checkpoint: Path, directory: Path, kinds: Sequence[IndexKind]
) -> list[IndexReport]:
    """Write the model of `checkpoint` to `directory` and measure its indexes on all users.

    What the bundle knows of users are the training events; a held-out event is in none of its files.

    Raises:
        ConfigError: the run is no two-tower run, or there is more than one rank.
        CheckpointError: see `Trainer.load_weights`.
    """
    task = trainer.task
    if not isinstance(task, RetrievalTask):
        raise ConfigError(f"{checkpoint}: is of a {trainer.config.model.kind} run; retrieval needs two_tower")
    if trainer.runtime.world_size != 1:
        raise ConfigError("export with one process: a checkpoint of any number of ranks can be read by one")
    trainer.load_weights(checkpoint)
    trainer.model.eval()
    with torch.no_grad():
        item_vectors = task.evaluation.item_vectors(trainer.model).cpu().numpy()
    users, stops = task.known_events()
    histories = task.features.history_lengths
    bags = {
        name: _lists(*found)
        for name, found in task.features.queries(users, stops).items()
        if name not in histories
    }
    widths = {name: max(1, *map(len, lists)) for name, lists in bags.items()}
    program = export_query_tower(_query_tower(trainer, task), {**widths, **histories})
    starts = task.log.user_starts
    save_bundle(
        directory,
        info=BundleInfo(
            checkpoint=str(checkpoint),
            embedding_dim=item_vectors.shape[1],
            items=len(item_vectors),
            users=len(users),
            user_widths=widths,
            history_lengths=histories,
            exclude_seen=task.exclude_seen,
        ),
        query_tower=program,
        item_vectors=item_vectors,
        item_keys=task.log.item_keys,
        user_keys=task.log.user_keys,
        user_ids=bags,
        events=[task.log.items[start:stop].tolist() for start, stop in zip(starts[:-1], stops, strict=True)],
    )
    return _write_indexes(directory, kinds, item_vectors)


def _write_indexes(directory: Path, kinds: Sequence[IndexKind], vectors: Any) -> list[IndexReport]:
    indexes = {kind: build_index(kind, vectors) for kind in kinds}
    for kind, index in indexes.items():
        save_index(index, directory, kind)
    recommender = Recommender(directory, kinds[0])
    bundle = recommender.bundle
    queries = recommender.query_vectors(list(range(bundle.info.users)), bundle.events)
    k = min(_REPORT_K, bundle.info.items)
    reports = [measure_index(kind, index, vectors, queries, k=k) for kind, index in indexes.items()]
    text = json.dumps([report.as_dict() for report in reports], indent=2)
    (directory / "index_report.json").write_text(text + "\n", encoding="utf-8")
    return reports


def _query_tower(trainer: Trainer, task: RetrievalTask) -> QueryTower:
    tables, dense = whole_state(trainer.model)
    table_of = {
        feature: f"t_{table.name}"
        for table in task.features.tables
        for feature in table.features
        if feature in task.features.query_features
    }
    model = task.build_model()
    tower = {name: value for name, value in dense.items() if name.startswith("query_tower.")}
    model.query_tower.load_state_dict({name.removeprefix("query_tower."): v for name, v in tower.items()})
    return QueryTower(
        {name: tables[name] for name in set(table_of.values())},
        {feature: table_of[feature] for feature in task.features.query_features},
        model.query_tower,
        normalize=task.normalize,
    )


def _lists(values: Any, lengths: Any) -> list[list[int]]:
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])]
