"""Synthetic events with planted clusters: what a retrieval model must find is known exactly.

Items fall into equal clusters.  A user belongs to one cluster and has events with all but a few of its
items, in random order; so the items that a user has not seen yet, out of the user's own cluster, are what
an ideal model ranks first, and the held-out item is among them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, model_validator


class PlantedClusters(BaseModel):
    """Parameters of the generator; together they decide every event."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clusters: Annotated[int, Field(gt=1)] = 40
    items_per_cluster: Annotated[int, Field(gt=1)] = 25
    users_per_cluster: Annotated[int, Field(gt=0)] = 25
    unseen_per_user: Annotated[
        int,
        Field(gt=0, description="items of the own cluster without an event, the held-out one not counted"),
    ] = 5
    seed: Annotated[int, Field(ge=0)] = 7

    @model_validator(mode="after")
    def _enough_items(self) -> PlantedClusters:
        if self.items_per_cluster - self.unseen_per_user < 3:
            raise ValueError(
                "a user needs three events: items_per_cluster - unseen_per_user must be 3 or more"
            )
        return self

    def fingerprint(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def write_planted_clusters(clusters: PlantedClusters, directory: Path) -> None:
    """Write events.parquet and items.parquet (which says the cluster's name to nobody) to `directory`."""
    rng = np.random.default_rng(clusters.seed)
    size, events = clusters.items_per_cluster, clusters.items_per_cluster - clusters.unseen_per_user
    items = rng.permutation(clusters.clusters * size).reshape(clusters.clusters, size)
    users = rng.permutation(clusters.clusters * clusters.users_per_cluster)
    cluster_of = np.arange(len(users)) % clusters.clusters
    chosen = np.stack([rng.permutation(items[cluster])[:events] for cluster in cluster_of])
    order = rng.permutation(chosen.size)
    timestamps = np.sort(rng.random((len(users), events)) * 1e6, axis=1).astype(np.int64)
    table = pa.table(
        {
            "user": np.repeat(users, events)[order],
            "item": chosen.ravel()[order],
            "timestamp": timestamps.ravel()[order],
        }
    )
    pq.write_table(table, directory / "events.parquet")
    pq.write_table(pa.table({"item": np.arange(items.size)}), directory / "items.parquet")
