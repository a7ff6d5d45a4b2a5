"""Read what is to be planned from a run's config: `model`, `optimizer`, `train` and a `plan` section.

The other sections are the trainer's business; they are not read here, so a config may be planned before
anything can train it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recsys_tpu.sharding.planner.errors import PlanInputError
from recsys_tpu.sharding.planner.tables import (
    IdStatistics,
    ShardingType,
    TableConstraint,
    TableSpec,
    Workload,
    dlrm_dense_part,
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ConstraintInputs(_Section):
    """What a user fixes about one table; see `tables.TableConstraint`."""

    types: list[ShardingType] = []
    ranks: list[int] | None = None
    min_width: int | None = Field(None, gt=0)
    pinned: list[int] | None = None


class PlanInputs(_Section):
    """The `plan` section of a config.

    `batch_per_rank` defaults to the trainer's global batch over the ranks; `pooling_factors` (mean ids per
    sample, by feature) to 1.
    """

    batch_per_rank: int | None = Field(None, gt=0)
    pooling_factors: dict[str, float] = {}
    statistics: Path | None = None
    dense_features: int = Field(13, gt=0)
    cross_layers: int = Field(0, ge=0)
    cross_rank: int = Field(0, ge=0)
    host_cores: int = Field(96, gt=0)
    constraints: dict[str, ConstraintInputs] = {}


class _Model(BaseModel):
    embedding_dim: int = Field(16, gt=0)
    num_embeddings: dict[str, int]
    bottom_mlp: list[int] = [128, 64]
    over_mlp: list[int] = [256, 128]


class _Sparse(BaseModel):
    kind: str = "rowwise_adagrad"


class _Optimizer(BaseModel):
    sparse: _Sparse = _Sparse()


class _Train(BaseModel):
    batch_size: int = Field(2048, gt=0)


class _Inputs(BaseModel):
    model: _Model
    optimizer: _Optimizer = _Optimizer()
    train: _Train = _Train()
    plan: PlanInputs = PlanInputs()


def read_workload(
    path: Path, ranks: int, *, statistics: Path | None = None, batch_per_rank: int | None = None
) -> Workload:
    """The workload of a config on `ranks` ranks.

    Args:
        statistics: output of `python -m recsys_tpu.data.stats`, before the config's own.
        batch_per_rank: samples, before the config's own.

    Raises:
        PlanInputError: the file is missing or wrong; the message lists every key that is.
    """
    inputs = _read(path)
    plan, model = inputs.plan, inputs.model
    batch = batch_per_rank or plan.batch_per_rank
    if batch is None:
        batch, rest = divmod(inputs.train.batch_size, ranks)
        if rest or not batch:
            raise PlanInputError(
                f"{path}: train.batch_size={inputs.train.batch_size} does not divide over {ranks} ranks; "
                "set plan.batch_per_rank or --batch-per-rank"
            )
    unknown = sorted(set(plan.pooling_factors) - set(model.num_embeddings))
    if unknown:
        raise PlanInputError(f"{path}: plan.pooling_factors of unknown features: {', '.join(unknown)}")
    stats_file = statistics or plan.statistics
    measured = read_statistics(stats_file) if stats_file else {}
    factors = {name: measured[name][0] for name in measured} | plan.pooling_factors
    tables = tuple(
        TableSpec(
            name=f"t_{feature}",
            rows=rows,
            dim=model.embedding_dim,
            pooling_factors=(factors.get(feature, 1.0),),
            feature_names=(feature,),
            optimizer=inputs.optimizer.sparse.kind,
            statistics=measured[feature][1] if feature in measured else None,
        )
        for feature, rows in model.num_embeddings.items()
    )
    return Workload(
        tables=tables,
        batch_per_rank=batch,
        dense=dlrm_dense_part(
            embedding_dim=model.embedding_dim,
            dense_features=plan.dense_features,
            sparse_features=len(tables),
            bottom_mlp=[*model.bottom_mlp, model.embedding_dim],
            over_mlp=[*model.over_mlp, 1],
            cross_layers=plan.cross_layers,
            cross_rank=plan.cross_rank,
        ),
        host_cores=plan.host_cores,
        constraints={
            name: TableConstraint(
                types=tuple(given.types),
                ranks=None if given.ranks is None else tuple(given.ranks),
                min_width=given.min_width,
                pinned=None if given.pinned is None else tuple(given.pinned),
            )
            for name, given in plan.constraints.items()
        },
    )


def read_statistics(path: Path) -> dict[str, tuple[float, IdStatistics]]:
    """Pooling factor and id statistics of each feature, from a file of `recsys_tpu.data.stats`.

    Raises:
        PlanInputError: the file is missing or not of that command.
    """
    try:
        features: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["features"]
        return {
            name: (
                float(feature["pooling_factor"]),
                IdStatistics(
                    lookups=tuple(feature["lookups"]),
                    distinct=tuple(feature["distinct"]),
                    block_shares=tuple(feature["block_shares"]),
                ),
            )
            for name, feature in features.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanInputError(
            f"{path}: not id statistics ({error!r}); make them: python -m recsys_tpu.data.stats DIRECTORY"
        ) from None


def _read(path: Path) -> _Inputs:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PlanInputError(f"{path}: cannot be read as a config: {error}") from None
    try:
        return _Inputs.model_validate(tree)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        hint = (
            " (the planner needs model.num_embeddings: rows by feature)"
            if "num_embeddings" in str(error)
            else ""
        )
        raise PlanInputError(f"{path}: " + "; ".join(problems) + hint) from None
