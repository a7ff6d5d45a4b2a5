"""`metadata.json`: what a directory of preprocessed Parquet files contains, and what made it.

The file is written last and atomically, so a directory that has one is complete.  Columns of every
Parquet file: `label` int8; each dense feature float32, already transformed; each sparse feature int32,
an id in ``[0, num_embeddings[feature])``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from recsys_tpu.errors import UserError

METADATA_FILE = "metadata.json"

_Count = Annotated[int, Field(ge=0, strict=True)]
_TableSize = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]


class DatasetError(UserError, ValueError):
    """A preprocessed data directory is missing, unfinished, damaged or does not fit the model."""


class Split(BaseModel):
    """One split: its Parquet files, relative to the directory, in reading order.

    `positives` counts the rows of label 1; None where the source has no labels (the column is then -1).
    """

    model_config = ConfigDict(extra="forbid")

    rows: _Count
    positives: _Count | None
    files: list[str]

    @model_validator(mode="after")
    def _check(self) -> Split:
        if self.positives is not None and self.positives > self.rows:
            raise ValueError(f"positives ({self.positives}) exceed rows ({self.rows})")
        if len(set(self.files)) != len(self.files):
            raise ValueError("a file is listed twice")
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"file {name!r} lies outside the directory")
        return self


class DatasetMetadata(BaseModel):
    """The content of `metadata.json`.

    `row_group_rows` is the rows of every Parquet row group but the last of each file.  `recipe` holds
    every choice that decided the content; `source` says what it was made from (files with size and
    fingerprint, rows read and rejected, or a generator's parameters).
    """

    model_config = ConfigDict(extra="forbid")

    format_version: Literal[1] = 1
    dense_features: list[str]
    sparse_features: list[str]
    num_embeddings: dict[str, _TableSize]
    row_group_rows: Annotated[int, Field(ge=1, strict=True)]
    splits: dict[str, Split]
    recipe: dict[str, JsonValue]
    source: dict[str, JsonValue]

    @model_validator(mode="after")
    def _check(self) -> DatasetMetadata:
        names = ["label", *self.dense_features, *self.sparse_features]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"feature named twice: {', '.join(repeated)}")
        missing = [name for name in self.sparse_features if name not in self.num_embeddings]
        unknown = [name for name in self.num_embeddings if name not in self.sparse_features]
        if missing or unknown:
            raise ValueError(
                f"num_embeddings must name exactly the sparse features: missing {missing}, unknown {unknown}"
            )
        return self

    @classmethod
    def load(cls, directory: str | Path) -> DatasetMetadata:
        """Read and validate `directory`/metadata.json.

        Raises:
            DatasetError: the directory or file is missing, or its content is not valid.
        """
        path = Path(directory) / METADATA_FILE
        if not Path(directory).is_dir():
            raise DatasetError(
                f"{directory}: no such directory; give the output directory of a preprocess run"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DatasetError(
                f"{path}: not found. It is written last, so the directory is unfinished or not preprocessed "
                "data: run the preprocess command again (it continues where it stopped)"
            ) from None
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path}: not UTF-8 text ({error}); preprocess the data again") from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in item['loc']) or 'file'}: {item['msg']}"
                for item in error.errors()
            )
            raise DatasetError(f"{path}: {problems}. Preprocess the data again with this version") from None

    @property
    def content_hash(self) -> str:
        """Hash of all that this says, so of the recipe, the source files and their fingerprints."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def save(self, directory: str | Path) -> None:
        """Write `directory`/metadata.json atomically: after a crash there is the whole file or none."""
        path = Path(directory) / METADATA_FILE
        write_json_atomically(path, self.model_dump(mode="json"))

    def split(self, name: str) -> Split:
        """The split called `name`.

        Raises:
            DatasetError: there is none of that name.
        """
        if name not in self.splits:
            raise DatasetError(
                f"the data has no split {name!r}; it has {', '.join(sorted(self.splits))}. "
                "Choose one of these or preprocess the data again with another --split"
            )
        return self.splits[name]

    def check_table_sizes(self, num_embeddings: Mapping[str, int]) -> None:
        """Check that a model's tables can hold every id of this data.

        Args:
            num_embeddings: rows of the table that each sparse feature of the model reads.

        Raises:
            DatasetError: naming each feature whose table is too small, or that the data lacks.
        """
        problems = []
        for feature, rows in num_embeddings.items():
            if feature not in self.num_embeddings:
                problems.append(f"feature {feature} is not in the data")
            elif rows < self.num_embeddings[feature]:
                problems.append(
                    f"feature {feature}: the table has {rows:,} rows but the data was made for "
                    f"{self.num_embeddings[feature]:,}"
                )
        if problems:
            raise DatasetError(
                "; ".join(problems) + ". Enlarge the tables, or preprocess the data again under these sizes"
            )


def write_json_atomically(path: Path, content: object) -> None:
    """Write `content` as JSON so that `path` holds the old or the whole new text, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
