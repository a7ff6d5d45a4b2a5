"""From the config's `data` section to a folder of events, converted or generated on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from recsys_tpu.config import EventsConfig
from recsys_tpu.data.movielens import write_movielens
from recsys_tpu.data.planted_clusters import write_planted_clusters
from recsys_tpu.errors import ConfigError

_VERSION = 1  # part of the folder's name: raise it when a conversion writes something else


def prepare_events(config: EventsConfig) -> Path:
    """The folder of events that the config names (docs/retrieval.md says what is in one).

    Raises:
        ConfigError: nothing says where MovieLens is.
        DatasetError: there is no MovieLens set at the path, or it is damaged.
    """
    if config.kind == "events":
        assert config.path is not None  # checked by the config
        return config.path
    if config.kind == "planted_clusters":
        clusters = config.planted_clusters
        name = f"planted-clusters-{clusters.fingerprint()}-v{_VERSION}"
        return _made_once(config.cache_dir / name, lambda folder: write_planted_clusters(clusters, folder))
    source = _movielens_path(config)
    name = f"{source.name}-{hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]}-v{_VERSION}"
    return _made_once(config.cache_dir / name, lambda folder: write_movielens(source, folder))


def _movielens_path(config: EventsConfig) -> Path:
    if config.path is not None:
        return config.path
    root = os.environ.get("RECSYS_TPU_DATA")
    if not root:
        raise ConfigError(
            "MovieLens was not found: set data.path=FOLDER or the environment variable "
            "RECSYS_TPU_DATA=PARENT-FOLDER of movielens-100k (docs/retrieval.md says how to get it)"
        )
    return Path(root) / "movielens-100k"


def _made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, written under a temporary name and renamed when complete."""
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    partial.rename(folder)
    return folder
