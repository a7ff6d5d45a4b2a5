"""The typed config of a run: YAML file, dotted overrides, one error message for all that is wrong.

No torch is imported here: the config says which device to activate, and that must happen first.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, model_validator

from recsys_tpu.config_section import NonNegativeFloat, PositiveFloat, PositiveInt, Probability, Section
from recsys_tpu.data.multi_hot import MultiHot
from recsys_tpu.data.planted_clusters import PlantedClusters
from recsys_tpu.data.synthetic import SyntheticLog
from recsys_tpu.errors import ConfigError
from recsys_tpu.models.settings import DCNv2Config, DeepFMConfig, DLRMConfig, DLRMDCNv2Config
from recsys_tpu.protocol.settings import ProtocolConfig
from recsys_tpu.runtime.settings import RuntimeConfig


class RunConfig(Section):
    """Where a run writes and what decides its random numbers."""

    name: str = Field("dlrm", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: Path = Path("runs")
    seed: int = Field(1, ge=0, lt=2**63)

    @property
    def directory(self) -> Path:
        """The run's own folder."""
        return self.output_dir / self.name


class ClickDataConfig(Section):
    """Which click log to train on, and how it is read."""

    kind: Literal["synthetic", "criteo_sample", "parquet"] = "synthetic"
    path: Path | None = Field(
        None,
        description="parquet: the directory that preprocess wrote; criteo_sample: the folder of the sample "
        "(default $RECSYS_TPU_DATA/criteo)",
    )
    cache_dir: Path = Path("data-cache")
    synthetic: SyntheticLog = SyntheticLog()
    min_count: PositiveInt = Field(
        4, description="criteo_sample: categories seen less often in train share one id per feature"
    )
    evaluate_on: Literal["test", "validation"] = Field(
        "test",
        description="validation: the split val of a parquet directory; of the criteo_sample rows "
        "60,001-70,000, training on those before and leaving the test rows (70,001-80,000) out of all",
    )
    shuffle: bool = True
    shuffle_row_groups: PositiveInt = Field(4, description="row groups shuffled together in one window")
    lanes: PositiveInt = Field(
        8, description="independent streams that make up a global batch; the world size must divide it"
    )
    prefetch_batches: PositiveInt = 4
    multi_hot: MultiHot | None = Field(
        None, description="make every id several, as MLPerf's DLRM-DCNv2 does (docs/criteo.md)"
    )

    @model_validator(mode="after")
    def _path_for_parquet(self) -> ClickDataConfig:
        if self.kind == "parquet" and self.path is None:
            raise ValueError("data.kind=parquet needs data.path, the directory that preprocess wrote")
        if self.kind == "synthetic" and self.evaluate_on != "test":
            raise ValueError(f"data.evaluate_on={self.evaluate_on}: a synthetic log has no such split")
        return self

    @property
    def evaluation_split(self) -> str:
        """The split that evaluations read; in a criteo_sample its name is test whatever its rows are."""
        return "val" if self.kind == "parquet" and self.evaluate_on == "validation" else "test"


class EventsConfig(Section):
    """Which events (user, item, time) to train a two-tower model on, and what is held out of them."""

    kind: Literal["movielens", "events", "planted_clusters"]
    path: Path | None = Field(
        None,
        description="movielens: the folder of ml-100k, ml-1m, ml-20m or ml-25m (default "
        "$RECSYS_TPU_DATA/movielens-100k); events: a folder with events.parquet (docs/retrieval.md)",
    )
    cache_dir: Path = Path("data-cache")
    planted_clusters: PlantedClusters = PlantedClusters()
    split: Literal["leave_one_out", "temporal"] = "leave_one_out"
    temporal_fraction: float = Field(
        0.1, gt=0.0, lt=0.5, description="temporal: the part of all events, the latest, that is a holdout"
    )
    evaluate_on: Literal["test", "validation"] = Field(
        "test",
        description="validation: leave the test holdout out of everything and evaluate on the one before it",
    )
    exclude_seen: bool = Field(True, description="rank only items that the user has no earlier event with")
    cutoffs: list[PositiveInt] = Field([10, 50], min_length=1, description="the K of recall@K and NDCG@K")

    @model_validator(mode="after")
    def _path_for_events(self) -> EventsConfig:
        if self.kind == "events" and self.path is None:
            raise ValueError("data.kind=events needs data.path, a folder with events.parquet")
        return self


class HistoryConfig(Section):
    """A bag of the items that a user last had events with, as a feature of the query."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    length: PositiveInt = Field(description="at most this many items, the latest")
    share_item_table: bool = Field(True, description="embed with the item tower's table, or with its own")


class MinedNegativesConfig(Section):
    """Hard negatives from a FAISS index of the current item vectors (docs/retrieval.md)."""

    count: int = Field(
        0, ge=0, description="items for each global batch, drawn from its users' pools; 0: none"
    )
    every: PositiveInt = Field(200, description="steps between two refreshes of index and pools")
    pool: PositiveInt = Field(
        100, description="a user's pool: this many of the best items not had in training"
    )
    index: Literal["flat", "hnsw", "ivfpq"] = "flat"


class TwoTowerConfig(Section):
    """Two-tower retrieval: a query and an item tower, trained by sampled softmax (docs/retrieval.md)."""

    kind: Literal["two_tower"]
    embedding_dim: PositiveInt = 64
    histories: list[HistoryConfig] = Field(
        default_factory=lambda: [
            HistoryConfig(name="last_item", length=1, share_item_table=False),
            HistoryConfig(name="recent_items", length=10),
            HistoryConfig(name="past_items", length=100),
        ]
    )
    user_id: bool = Field(True, description="a table of users; without it a query is its features only")
    query_mlp: list[PositiveInt] = Field(default_factory=lambda: [128], description="hidden layers")
    item_mlp: list[PositiveInt] = Field(default_factory=lambda: [128], description="hidden layers")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="of the pooled embeddings, in training")
    similarity: Literal["cosine", "dot"] = "cosine"
    temperature: PositiveFloat = Field(0.1, description="scores are similarity / temperature")
    uniform_negatives: int = Field(
        0, ge=0, description="items drawn uniformly from the catalogue for each global batch, as candidates"
    )
    hard_negatives: int = Field(
        0, ge=0, description="compete with this many of the highest-scored candidates only; 0: with all"
    )
    mined_negatives: MinedNegativesConfig = MinedNegativesConfig()
    frequency_window: PositiveInt = Field(
        1000, description="steps over which an item's sampling frequency is estimated (logQ correction)"
    )

    @model_validator(mode="after")
    def _distinct_names(self) -> TwoTowerConfig:
        names = [history.name for history in self.histories]
        if len(set(names)) != len(names):
            raise ValueError("two histories have the same name")
        return self


class DenseOptimizerConfig(Section):
    """Optimizer of the dense towers."""

    kind: Literal["adamw", "adagrad", "sgd"] = "adamw"
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    eps: PositiveFloat = 1e-8
    momentum: Probability = 0.0

    @model_validator(mode="after")
    def _momentum_is_for_sgd(self) -> DenseOptimizerConfig:
        if self.momentum and self.kind != "sgd":
            raise ValueError("momentum is used by kind=sgd only")
        return self


class SparseOptimizerConfig(Section):
    """Optimizer fused into the backward of the embedding tables."""

    kind: Literal["rowwise_adagrad", "adagrad", "sgd"] = "rowwise_adagrad"
    learning_rate: PositiveFloat = 0.02
    eps: PositiveFloat = 1e-8


class ScheduleConfig(Section):
    """Linear warm-up, constant, then polynomial decay; the factor multiplies every learning rate."""

    warmup_steps: int = Field(0, ge=0)
    decay_start_step: int | None = Field(None, ge=0, description="None: no decay")
    decay_steps: int | None = Field(None, gt=0, description="None: until the last step of training")
    decay_power: PositiveFloat = 2.0
    min_factor: Probability = 1e-7


class OptimizerConfig(Section):
    dense: DenseOptimizerConfig = DenseOptimizerConfig()
    sparse: SparseOptimizerConfig = SparseOptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    max_gradient_norm: PositiveFloat | None = Field(
        None, description="clip the norm of all gradients together, tables and dense; None: no clipping"
    )


class ShardingConfig(Section):
    """Where the tables lie. Without `plan` one is made for the topology and written beside the outputs."""

    topology: str | None = Field(
        None,
        description="the slice, such as v5p:4x4x4, or a YAML file; default: one emulated chip a rank, which "
        "a real TPU does not take",
    )
    plan: Path | None = Field(None, description="a plan file of `python -m recsys_tpu.plan`")
    validate_ids: Literal["full", "sample", "off"] = Field(
        "full", description="how much of each batch is checked on the host before it is sent"
    )
    deduplicate: bool | list[str] = Field(
        False,
        description="tables (true: all; or names) whose distinct ids are sent to their owners, and whose "
        "rows come back to be pooled at home, instead of bags that the owners pool",
    )
    exchange: Literal["collective", "pallas"] = Field(
        "collective",
        description="who moves pooled rows and their gradients between ranks: torch.distributed, or our "
        "remote-DMA kernels (on TPU chips; elsewhere their lines travel by torch.distributed)",
    )
    wire: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="exchange=pallas: what pooled rows and their gradients are rounded to while they travel "
        "all to all; sums of row-sharded tables travel as fp32",
    )

    @model_validator(mode="after")
    def _wire_of_our_exchange(self) -> ShardingConfig:
        if self.wire != "fp32" and self.exchange != "pallas":
            raise ValueError(f"sharding.wire={self.wire} needs sharding.exchange=pallas")
        return self


class TrainConfig(Section):
    """How long to train, and what to write on the way. Steps are optimizer steps of the global batch."""

    batch_size: PositiveInt = Field(2048, description="global batch: samples per step over all ranks")
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    log_every: PositiveInt = 20
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0: at the end only")
    eval_batch_size: PositiveInt = 8192
    checkpoint_every: int = Field(0, ge=0, description="steps between checkpoints; 0: at the end only")
    keep_checkpoints: PositiveInt = 3
    step: Literal["separate_ops", "one_program"] = Field(
        "separate_ops",
        description="lookups and updates as operations around compiled towers, or the whole step as one "
        "program that takes over the tables (one chip, click models); the losses are the same",
    )
    debug_ids: bool = Field(
        False,
        description="check right before each lookup that every id lies in its table, and build kernels with "
        "bounds checks; waits for the device in each step",
    )
    resume: str = Field("never", description="never, auto (newest of this run) or a checkpoint's path")
    start_from: Path | None = Field(
        None, description="a plain state_dict (torch.save) to start from, where nothing is resumed"
    )
    start_partial: bool = Field(False, description="start_from may lack tensors, or have others")
    grow_tables: bool = Field(False, description="tables may have more rows than in start_from")
    baselines: bool = Field(
        False, description="fit a logistic regression and a constant on the same split, in the same report"
    )


def _kind_tag(default: str, *sections: type[Section]) -> Discriminator:
    """Picks the section of a union by its `kind`; a value without one is of kind `default`."""
    kinds = {
        kind: section for section in sections for kind in get_args(section.model_fields["kind"].annotation)
    }

    def tag(value: Any) -> str | None:
        kind = value.get("kind", default) if isinstance(value, dict) else getattr(value, "kind", None)
        section = kinds.get(kind) if isinstance(kind, str) else None
        return section.__name__ if section else None

    return Discriminator(
        tag,
        custom_error_type="unknown_kind",
        custom_error_message=f"kind is none of {', '.join(kinds)}",
    )


_DATA: list[type[Section]] = [ClickDataConfig, EventsConfig]
_MODELS: list[type[Section]] = [DLRMConfig, DLRMDCNv2Config, DeepFMConfig, DCNv2Config, TwoTowerConfig]
DataConfig = Annotated[
    Annotated[ClickDataConfig, Tag("ClickDataConfig")] | Annotated[EventsConfig, Tag("EventsConfig")],
    _kind_tag("synthetic", *_DATA),
]
ModelConfig = Annotated[
    Annotated[DLRMConfig, Tag("DLRMConfig")]
    | Annotated[DLRMDCNv2Config, Tag("DLRMDCNv2Config")]
    | Annotated[DeepFMConfig, Tag("DeepFMConfig")]
    | Annotated[DCNv2Config, Tag("DCNv2Config")]
    | Annotated[TwoTowerConfig, Tag("TwoTowerConfig")],
    _kind_tag("dlrm", *_MODELS),
]
_TAGGED: dict[str, type[Section]] = {section.__name__: section for section in [*_DATA, *_MODELS]}


class Config(Section):
    run: RunConfig = RunConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    data: DataConfig = ClickDataConfig()
    model: ModelConfig = DLRMConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sharding: ShardingConfig = ShardingConfig()
    train: TrainConfig = TrainConfig()
    protocol: ProtocolConfig = ProtocolConfig()

    @model_validator(mode="after")
    def _data_fits_model(self) -> Config:
        if isinstance(self.data, EventsConfig) != isinstance(self.model, TwoTowerConfig):
            raise ValueError(
                f"model.kind={self.model.kind} cannot train on data.kind={self.data.kind}: two_tower takes "
                "movielens, events or planted_clusters; click models take synthetic, criteo_sample or parquet"
            )
        return self

    @model_validator(mode="after")
    def _protocol_fits(self) -> Config:
        given = self.protocol != ProtocolConfig()
        if given and isinstance(self.model, TwoTowerConfig):
            raise ValueError("the protocol section is for click models, not for model.kind=two_tower")
        if self.protocol.evaluations_per_epoch and self.train.eval_every:
            raise ValueError("give train.eval_every or protocol.evaluations_per_epoch, not both")
        return self

    @model_validator(mode="after")
    def _lanes_divide_batches(self) -> Config:
        if isinstance(self.data, EventsConfig):
            return self
        for name in ("batch_size", "eval_batch_size"):
            size = getattr(self.train, name)
            if size % self.data.lanes:
                raise ValueError(f"train.{name}={size} must be a multiple of data.lanes={self.data.lanes}")
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (YAML), apply ``section.key=value`` overrides, check all of it.

    Values of overrides are YAML: ``train.resume=auto``, ``model.over_mlp=[64,32]``.

    Raises:
        ConfigError: the file is missing or not a YAML mapping, a key does not exist (the message gives
            the nearest one that does), or a value has the wrong type or range.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such config file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        tree = yaml.load(text, _ConfigLoader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, found {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from error


class _ConfigLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice: plain YAML would take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def dump_config(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def sample_data_path(config: ClickDataConfig) -> Path:
    """Folder of the Criteo sample: ``data.path``, else ``$RECSYS_TPU_DATA/criteo``.

    Raises:
        ConfigError: neither is set.
    """
    if config.path is not None:
        return config.path
    root = os.environ.get("RECSYS_TPU_DATA")
    if not root:
        raise ConfigError(
            "the Criteo sample was not found: set data.path=FOLDER or the environment variable "
            "RECSYS_TPU_DATA=PARENT-FOLDER (docs/data.md says how to get the data)"
        )
    return Path(root) / "criteo"


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value, e.g. train.max_steps=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is not a section")
        node = child
    node[last] = value


def _explain(error: ValidationError, path: Path) -> str:
    lines = []
    for item in error.errors():
        location = ".".join(str(part) for part in item["loc"] if part not in _TAGGED) or "config"
        if item["type"] == "extra_forbidden":
            lines.append(f"{location}: no such key{_nearest(item['loc'])}")
        elif item["type"] == "unknown_kind":
            found = item["input"]
            kind = found.get("kind") if isinstance(found, dict) else found
            lines.append(f"{location}.{item['msg']} (found {kind!r})")
        else:
            lines.append(
                f"{location}: {item['msg']} (found {item['input']!r})" if item["loc"] else item["msg"]
            )
    return f"{path}: " + "\n  ".join(["the config has errors:", *lines])


def _nearest(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] | None = Config
    for part in location[:-1]:
        if part in _TAGGED:
            model = _TAGGED[str(part)]
            continue
        field = model.model_fields.get(str(part)) if model else None
        sections = _sections(field.annotation) if field else []
        model = sections[0] if sections else None
    if model is None:
        return ""
    names, wanted = list(model.model_fields), str(location[-1])
    here = ".".join(str(part) for part in location if part not in _TAGGED)
    others = [key for key in _all_keys(Config, "") if key != here]
    elsewhere = [key for key in others if key.rpartition(".")[2] == wanted]
    found = (
        elsewhere
        or difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
        or difflib.get_close_matches(wanted, others, n=1, cutoff=0.6)
    )
    hint = f"; did you mean {found[0]!r}?" if found else ""
    return f"{hint or '; valid here: ' + ', '.join(names)}"


def _all_keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        sections = _sections(field.annotation)
        for section in sections:
            keys += _all_keys(section, f"{prefix}{name}.")
        if not sections:
            keys.append(f"{prefix}{name}")
    return keys


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The config sections that a field can hold: one, or those of a union."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [section for argument in get_args(annotation) for section in _sections(argument)]
