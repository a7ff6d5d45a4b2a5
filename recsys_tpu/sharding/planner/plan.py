"""A plan: where every column and row of every table lies; as an object, as a file, checked on loading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from recsys_tpu.sharding.planner.errors import PlanDriftError, PlanInputError
from recsys_tpu.sharding.planner.options import row_blocks
from recsys_tpu.sharding.planner.problem import IntArray
from recsys_tpu.sharding.planner.tables import ShardingType, TableSpec, Workload
from recsys_tpu.sharding.planner.topology import Topology

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """A rectangle of a table on a rank."""

    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """How one table is sharded.

    Attributes:
        column_shards: (place, columns) of each column shard, left to right.  The place is the owner
            (table-wise, column-wise), the first rank of the row group that shares its rows (table-row-wise,
            grid) or of the group that shares its columns (table-column-wise: one entry per rank), or
            0 for row-wise and data-parallel, which lie on all ranks.
    """

    name: str
    rows: int
    dim: int
    kind: ShardingType
    column_shards: tuple[tuple[int, int], ...]

    def shards(self, ranks: int, row_group: int) -> Iterator[Shard]:
        """All shards: column by column, row block by row block; data-parallel: all of it on every rank."""
        if self.kind is ShardingType.DATA_PARALLEL:
            yield from (Shard(rank, 0, self.rows, 0, self.dim) for rank in range(ranks))
            return
        at, first, rows, columns = self.shard_arrays(ranks, row_group)
        ways = len(at) // len(self.column_shards)
        left = np.repeat(np.cumsum([0, *(width for _, width in self.column_shards[:-1])]), ways)
        for numbers in zip(*(one.tolist() for one in (at, first, rows, left, columns)), strict=True):
            yield Shard(*numbers)

    def shard_arrays(self, ranks: int, row_group: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Rank, first row, rows and columns of every shard of a table that is not data-parallel."""
        ways = {ShardingType.ROW_WISE: ranks}.get(
            self.kind, row_group if self.kind in _ROW_GROUP_KINDS else 1
        )
        first, rows = row_blocks(self.rows, ways)
        places, widths = np.array(self.column_shards, dtype=np.int64).T
        count = len(places)
        at = (places[:, None] + np.arange(ways)).ravel()
        return at, np.tile(first, count), np.tile(rows, count), np.repeat(widths, ways)


_ROW_GROUP_KINDS = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sharding plan for one topology.

    Attributes:
        row_group: ranks that share the rows of table-row-wise and grid shards; the training job's
            LOCAL_WORLD_SIZE.
        summary: what the planner estimated when it made the plan: numbers of `report.summarise`.
        made_for: the tables and workload that the plan was made for, as plain values.
    """

    topology: Topology
    row_group: int
    tables: tuple[TablePlan, ...]
    made_for: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, float] = field(default_factory=dict)

    def table(self, name: str) -> TablePlan:
        """Plan of one table.

        Raises:
            PlanInputError: there is no such table.
        """
        for table in self.tables:
            if table.name == name:
                return table
        near = ", ".join(sorted(table.name for table in self.tables)[:8])
        raise PlanInputError(f"the plan has no table {name!r}; it has {len(self.tables)}, such as {near}")

    def shards(self) -> Iterator[tuple[TablePlan, Shard]]:
        """Every shard of every table."""
        for table in self.tables:
            for shard in table.shards(self.topology.ranks, self.row_group):
                yield table, shard

    def check_complete(self) -> None:
        """Check that each table is there once, and that its column shards cover its columns exactly and lie
        on ranks that exist.

        Raises:
            PlanInputError: naming each table and what is wrong.
        """
        problems = []
        names = [table.name for table in self.tables]
        problems += [f"table {name} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
        if not self.tables:
            raise PlanInputError("the plan has no tables")
        if self.row_group < 1:
            raise PlanInputError(f"row_group is {self.row_group}, must be at least 1")
        for table in self.tables:
            if table.rows < 1 or table.dim < 1 or not table.column_shards:
                problems.append(
                    f"table {table.name}: {table.rows} rows, dim {table.dim} and {len(table.column_shards)} "
                    "column shards must all be at least 1"
                )
                continue
            covered = sum(columns for _, columns in table.column_shards)
            if covered != table.dim or any(columns < 1 for _, columns in table.column_shards):
                problems.append(f"table {table.name}: column shards cover {covered} of {table.dim} columns")
            places = [place for place, _ in table.column_shards]
            width = self.row_group if table.kind in _ROW_GROUP_KINDS else 1
            if min(places) < 0 or max(places) + width > self.topology.ranks or len(set(places)) < len(places):
                problems.append(
                    f"table {table.name}: places {places} are not different ranks of {self.topology}"
                )
            elif table.kind in _ROW_GROUP_KINDS and any(place % self.row_group for place in places):
                problems.append(
                    f"table {table.name}: places {places} do not start row groups of {self.row_group}"
                )
        if problems:
            raise PlanInputError("; ".join(problems))

    def check_fits(self, workload: Workload, topology: Topology) -> None:
        """Check that the plan belongs to these tables and this topology.

        Raises:
            PlanDriftError: listing everything that changed since the plan was made.
        """
        changes = []
        mine = {table.name: table for table in self.tables}
        theirs = {table.name: table for table in workload.tables}
        changes += [f"table {name} is not in the plan" for name in theirs if name not in mine]
        changes += [f"table {name} of the plan is not in the model" for name in mine if name not in theirs]
        for name in mine.keys() & theirs.keys():
            for what in ("rows", "dim"):
                old, new = getattr(mine[name], what), getattr(theirs[name], what)
                if old != new:
                    changes.append(f"table {name}: {what} was {old:,}, is {new:,}")
        planned, given = self.topology.to_dict(), topology.to_dict()
        changes += [
            f"topology: {key} was {planned[key]}, is {given[key]}"
            for key in planned
            if planned[key] != given[key]
        ]
        now = made_for(workload)
        for key in ("optimizers", "batch_per_rank"):
            if key in self.made_for and self.made_for[key] != now[key]:
                changes.append(f"{key}: was {self.made_for[key]}, is {now[key]}")
        if changes:
            raise PlanDriftError(
                "the plan was made for something else: " + "; ".join(sorted(changes)) + ". Make it again: "
                "python -m recsys_tpu.plan"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values of everything."""
        return {
            "format_version": FORMAT_VERSION,
            "topology": self.topology.to_dict(),
            "row_group": self.row_group,
            "summary": dict(self.summary),
            "made_for": dict(self.made_for),
            "tables": [
                {
                    "name": table.name,
                    "rows": table.rows,
                    "dim": table.dim,
                    "sharding_type": table.kind.value,
                    "column_shards": [list(shard) for shard in table.column_shards],
                }
                for table in self.tables
            ],
        }

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`; checks that nothing is missing.

        Raises:
            PlanInputError: a key is missing or wrong, or a table is not covered.
        """
        if tree.get("format_version") != FORMAT_VERSION:
            raise PlanInputError(
                f"plan format_version {tree.get('format_version')!r}, this version reads {FORMAT_VERSION}"
            )
        try:
            plan = cls(
                topology=Topology.from_dict({k: v for k, v in tree["topology"].items() if k != "name"}),
                row_group=int(tree["row_group"]),
                summary=dict(tree["summary"]),
                made_for=dict(tree["made_for"]),
                tables=tuple(
                    TablePlan(
                        name=_text(table["name"]),
                        rows=int(table["rows"]),
                        dim=int(table["dim"]),
                        kind=ShardingType(table["sharding_type"]),
                        column_shards=tuple(
                            (int(place), int(columns)) for place, columns in table["column_shards"]
                        ),
                    )
                    for table in tree["tables"]
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanInputError(f"not a plan: {error!r}; make it again: python -m recsys_tpu.plan") from None
        plan.check_complete()
        return plan

    def save(self, path: Path) -> None:
        """Write JSON, or YAML for a .yaml or .yml name."""
        tree = self.to_dict()
        if path.suffix in (".yaml", ".yml"):
            text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110)
        else:
            text = json.dumps(tree, indent=1) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanInputError: the file is missing, not JSON or YAML, or not a whole plan.
        """
        try:
            text = path.read_text(encoding="utf-8")
            tree = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else json.loads(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise PlanInputError(f"{path}: cannot be read as a plan: {error}") from None
        if not isinstance(tree, dict):
            raise PlanInputError(f"{path}: a plan is a mapping, found {type(tree).__name__}")
        try:
            return cls.from_dict(tree)
        except PlanInputError as error:
            raise PlanInputError(f"{path}: {error}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"table name {value!r} is no text")
    return value


def made_for(workload: Workload) -> dict[str, Any]:
    """What of a workload a plan file keeps: enough to price the plan again and to see drift."""
    return {
        "batch_per_rank": workload.batch_per_rank,
        "optimizers": sorted({table.optimizer for table in workload.tables}),
        "pooling_factors": {table.name: list(table.pooling_factors) for table in workload.tables},
        "assumed_uniform_ids": [table.name for table in workload.tables if table.statistics is None],
    }


def table_plan(table: TableSpec, kind: ShardingType, column_shards: tuple[tuple[int, int], ...]) -> TablePlan:
    """Plan of `table`, named by what it really is: one piece of columns is table-wise."""
    if kind is ShardingType.COLUMN_WISE and len(column_shards) == 1:
        kind = ShardingType.TABLE_WISE
    elif kind is ShardingType.TABLE_WISE and len(column_shards) > 1:
        kind = ShardingType.COLUMN_WISE
    return TablePlan(name=table.name, rows=table.rows, dim=table.dim, kind=kind, column_shards=column_shards)
