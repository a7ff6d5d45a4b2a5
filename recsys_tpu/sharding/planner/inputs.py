"""Read what is to be planned from a run's config: `model`, `optimizer`, `train` and a `plan` section.

The other sections are the trainer's business; they are not read here, so a config may be planned before
anything can train it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from recsys_tpu.data.metadata import DatasetMetadata
from recsys_tpu.data.synthetic import SyntheticLog
from recsys_tpu.models.settings import DCNv2Config, DeepFMConfig, DLRMConfig, DLRMDCNv2Config
from recsys_tpu.sharding.planner.errors import PlanInputError
from recsys_tpu.sharding.planner.tables import (
    DensePart,
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
    host_cores: int = Field(96, gt=0)
    constraints: dict[str, ConstraintInputs] = {}


AnyModel = DLRMConfig | DLRMDCNv2Config | DeepFMConfig | DCNv2Config
_Model = Annotated[
    Annotated[DLRMConfig, Tag("dlrm")]
    | Annotated[DLRMDCNv2Config, Tag("dlrm_dcnv2")]
    | Annotated[DeepFMConfig, Tag("deepfm")]
    | Annotated[DCNv2Config, Tag("dcnv2")],
    Discriminator(lambda given: given.get("kind", "dlrm") if isinstance(given, dict) else given.kind),
]


class _MultiHot(BaseModel):
    sizes: dict[str, float] = {}


class _Data(BaseModel):
    kind: str = "synthetic"
    path: Path | None = None
    synthetic: dict[str, Any] = {}
    multi_hot: _MultiHot | None = None


class _Sharding(BaseModel):
    deduplicate: bool | list[str] = False


class _Sparse(BaseModel):
    kind: str = "rowwise_adagrad"


class _Optimizer(BaseModel):
    sparse: _Sparse = _Sparse()


class _Train(BaseModel):
    batch_size: int = Field(2048, gt=0)


class _Inputs(BaseModel):
    model: _Model
    data: _Data = _Data()
    sharding: _Sharding = _Sharding()
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
    rows = _table_rows(path, inputs)
    multi_hot = inputs.data.multi_hot.sizes if inputs.data.multi_hot else {}
    unknown = sorted(set(plan.pooling_factors) - set(rows))
    if unknown:
        raise PlanInputError(f"{path}: plan.pooling_factors of unknown features: {', '.join(unknown)}")
    stats_file = statistics or plan.statistics
    measured = read_statistics(stats_file) if stats_file else {}
    factors = {name: measured[name][0] for name in measured} | multi_hot | plan.pooling_factors
    dedup = inputs.sharding.deduplicate
    if not isinstance(dedup, bool) and (unknown := sorted(set(dedup) - {f"t_{feature}" for feature in rows})):
        raise PlanInputError(f"{path}: sharding.deduplicate of unknown tables: {', '.join(unknown)}")
    tables = tuple(
        TableSpec(
            name=f"t_{feature}",
            rows=count,
            dim=model.embedding_dim,
            pooling_factors=(factors.get(feature, 1.0),),
            feature_names=(feature,),
            optimizer=inputs.optimizer.sparse.kind,
            statistics=measured[feature][1] if feature in measured else None,
            deduplicated=dedup if isinstance(dedup, bool) else f"t_{feature}" in dedup,
        )
        for feature, count in rows.items()
    )
    return Workload(
        tables=tables,
        batch_per_rank=batch,
        dense=_dense_part(model, len(tables), plan.dense_features),
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


def _dense_part(model: AnyModel, sparse_features: int, dense_features: int) -> DensePart:
    """What every rank replicates; DeepFM and DCN-V2 as if their dense features were one vector."""
    dim = model.embedding_dim
    flat = (sparse_features + 1) * dim
    match model:
        case DLRMConfig() | DLRMDCNv2Config():
            bottom, over = [*model.bottom_mlp, dim], [*model.over_mlp, 1]
        case DeepFMConfig() | DCNv2Config():
            bottom, over = [dim], [*model.mlp, 1]
    layers = rank = 0
    if isinstance(model, DLRMDCNv2Config | DCNv2Config):
        # A full matrix has as many weights as two factors of half its width.
        layers, rank = model.cross_layers, model.cross_rank or flat // 2
    return dlrm_dense_part(
        embedding_dim=dim,
        dense_features=dense_features,
        sparse_features=sparse_features,
        bottom_mlp=bottom,
        over_mlp=over,
        cross_layers=layers,
        cross_rank=rank,
        dot_products=not isinstance(model, DeepFMConfig),
    )


def _table_rows(path: Path, inputs: _Inputs) -> Mapping[str, int]:
    """Rows of each table by feature: of the config, of the data's metadata, or of the generator."""
    data = inputs.data
    if inputs.model.num_embeddings is not None:
        return inputs.model.num_embeddings
    if data.kind == "parquet" and data.path is not None:
        return DatasetMetadata.load(data.path).num_embeddings
    if data.kind == "synthetic":
        return SyntheticLog.model_validate(data.synthetic).table_rows
    raise PlanInputError(
        f"{path}: data.kind={data.kind} does not say the rows of each table without its data (the planner "
        "needs model.num_embeddings: rows by feature)"
    )


def _read(path: Path) -> _Inputs:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PlanInputError(f"{path}: cannot be read as a config: {error}") from None
    try:
        return _Inputs.model_validate(tree)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise PlanInputError(f"{path}: " + "; ".join(problems)) from None
