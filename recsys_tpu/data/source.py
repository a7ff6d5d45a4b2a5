"""From the config's `data` section to a directory of Parquet files that the reader can open."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from recsys_tpu.config import ClickDataConfig, sample_data_path
from recsys_tpu.data.criteo.preprocess import preprocess
from recsys_tpu.data.criteo.recipe import Recipe, Vocabulary
from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.data.synthetic import ensure_synthetic_log

_SAMPLE_FILE = "head80k_reconstructed.txt.gz"
# By time, as the sample's provenance note says; the rows are in the order of the original log.
_SAMPLE_SPLITS = {
    "test": ("train=1-70000", "test=70001-80000"),
    "validation": ("train=1-60000", "test=60001-70000"),
}
# Small row groups: the sample has too few rows to fill the default size on every lane.
_SAMPLE_ROW_GROUP_ROWS = 4096


def prepare_data(config: ClickDataConfig) -> Path:
    """Directory of the data, generated or preprocessed first where the config says so.

    Raises:
        DatasetError: the sample's file is missing.
        ConfigError: nothing says where the sample is.
    """
    if config.kind == "synthetic":
        return ensure_synthetic_log(config.synthetic, config.cache_dir)
    if config.kind == "criteo_sample":
        return _prepare_sample(config)
    assert config.path is not None  # checked by the config
    return config.path


def _prepare_sample(config: ClickDataConfig) -> Path:
    folder = sample_data_path(config)
    source = folder / _SAMPLE_FILE
    if not source.is_file():
        raise DatasetError(f"{source}: no such file; docs/data.md says how to get the Criteo sample")
    name = f"criteo-sample-min{config.min_count}"
    output = config.cache_dir / (name if config.evaluate_on == "test" else f"{name}-{config.evaluate_on}")
    recipe = Recipe(
        ids=Vocabulary(config.min_count),
        splits=_SAMPLE_SPLITS[config.evaluate_on],
        row_group_rows=_SAMPLE_ROW_GROUP_ROWS,
        rows_per_part=_SAMPLE_ROW_GROUP_ROWS * 32,
    )
    config.cache_dir.mkdir(parents=True, exist_ok=True)
    preprocess([str(source)], output, recipe, jobs=1, console=Console(stderr=True))
    return output
