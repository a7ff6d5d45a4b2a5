"""Every way a table may be sharded, priced: from a workload and a topology to the solver's problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recsys_tpu.sharding.planner.costs import CostModel, ShardCost, SharedCost, layout_kind
from recsys_tpu.sharding.planner.errors import PlanInputError
from recsys_tpu.sharding.planner.problem import (
    EVERY,
    GROUP,
    STRIPS,
    BoolArray,
    FloatArray,
    IntArray,
    Options,
    Problem,
    Strips,
)
from recsys_tpu.sharding.planner.tables import DEFAULT_TYPES, ShardingType, TableConstraint, TableSpec


@dataclass(frozen=True)
class Layout:
    """A sharding type and how its columns are split.

    Attributes:
        shards: column shards (1: columns stay together).
        width: columns of a shard; the last may be narrower.
    """

    kind: ShardingType
    shards: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The solver's problem and the layout behind each of its options."""

    model: CostModel
    problem: Problem
    layouts: tuple[Layout, ...]
    unit_columns: tuple[int, ...]
    fixed_memory: dict[str, float]


def table_layouts(table: TableSpec, constraint: TableConstraint, model: CostModel) -> list[Layout]:
    """All layouts that a table may take here; column-wise ones of every width, for the solver to mix.

    Raises:
        PlanInputError: the constraint leaves none.
    """
    ranks, group = model.topology.ranks, model.row_group.ranks
    unit = unit_columns(table, constraint, model)
    units = table.dim // unit
    layouts: list[Layout] = []
    for kind in constraint.types or DEFAULT_TYPES:
        asked = bool(constraint.types)
        if kind is ShardingType.COLUMN_WISE:
            if ranks > 1:
                layouts += [
                    Layout(kind, -(-units // width), width * unit) for width in range(units - 1, 0, -1)
                ]
        elif kind is ShardingType.GRID_SHARD:
            if table.rows >= group:
                layouts += [
                    Layout(kind, shards, table.dim // shards)
                    for shards in range(2, units + 1)
                    if units % shards == 0 and shards <= ranks // group
                ]
        elif kind is ShardingType.TABLE_COLUMN_WISE:
            if units % group == 0:
                layouts.append(Layout(kind, group, table.dim // group))
        elif kind is ShardingType.TABLE_ROW_WISE:
            # With one group it is row-wise under another name.
            if asked or (ranks > group and group > 1 and table.rows >= group):
                layouts.append(Layout(kind, 1, table.dim))
        elif kind is ShardingType.ROW_WISE:
            if asked or (ranks > 1 and table.rows >= ranks):
                layouts.append(Layout(kind, 1, table.dim))
        elif kind is ShardingType.TABLE_WISE or asked or ranks > 1:
            layouts.append(Layout(kind, 1, table.dim))
    if constraint.ranks is not None:
        everywhere = set(constraint.ranks) >= set(range(ranks))
        layouts = [layout for layout in layouts if everywhere or layout_kind(layout.kind) != EVERY]
    if constraint.pinned is not None:
        layouts = [layout for layout in layouts if _items(layout) == len(constraint.pinned)][:1]
    if not layouts:
        types = ", ".join(kind.value for kind in constraint.types or DEFAULT_TYPES)
        raise PlanInputError(
            f"table {table.name} ({table.rows:,} x {table.dim}): no layout on {model.topology} under "
            f"its constraint (types: {types}; columns in multiples of {unit}; row groups of {group} ranks; "
            f"ranks: {constraint.ranks or 'all'}; pinned: {constraint.pinned or 'no'})"
        )
    return sorted(layouts, key=lambda layout: layout_kind(layout.kind))


def unit_columns(table: TableSpec, constraint: TableConstraint, model: CostModel) -> int:
    """Columns of the narrowest shard: a vector register, or the whole width where it is no multiple."""
    unit = constraint.min_width or model.topology.chip.lanes
    return unit if table.dim % unit == 0 else table.dim


Known = dict[tuple[int, ShardingType, bytes], ShardCost]
"""Prices that do not depend on the row group, by table number, sharding type and widths."""


def enumerate_options(model: CostModel, known: Known | None = None) -> Candidates:
    """Price every layout of every table.

    Args:
        known: prices to share between the row groups of one workload on one topology; added to.

    Raises:
        PlanInputError: a constraint leaves a table without a layout.
    """
    t, w = model.topology, model.workload
    known = {} if known is None else known
    layouts: list[Layout] = []
    owner: list[int] = []
    items: dict[str, list[FloatArray]] = {name: [] for name in ("work", "send", "memory")}
    shared: list[SharedCost] = []
    allowed, pinned = {}, {}
    unit_of = tuple(unit_columns(table, w.constraint(table.name), model) for table in w.tables)
    for index, table in enumerate(w.tables):
        constraint = w.constraint(table.name)
        mine = table_layouts(table, constraint, model)
        layouts += mine
        owner += [index] * len(mine)
        for kind in dict.fromkeys(layout.kind for layout in mine):
            widths = np.array([float(layout.width) for layout in mine if layout.kind is kind])
            cost = _price(model, known, index, kind, widths)
            for name, column in items.items():
                column.append(getattr(cost, name))
        # Pieces as a fraction where the last is narrower: then costs are exact for any mix of widths.
        shared += [model.shared(table, layout.kind, table.dim / layout.width) for layout in mine]
        if constraint.ranks is not None:
            allowed[index] = _rank_mask(table.name, constraint.ranks, t.ranks)
        if constraint.pinned is not None:
            pinned[index] = _pinned_places(table, constraint.pinned, mine[0], model.row_group.ranks, t.ranks)
    kinds = np.array([layout_kind(layout.kind) for layout in layouts])
    options = Options(
        table=np.array(owner),
        kind=kinds,
        units=np.array(
            [
                layout.width // unit_of[table] if kind == STRIPS else 0
                for layout, table, kind in zip(layouts, owner, kinds, strict=True)
            ]
        ),
        count=np.array(
            [
                w.tables[table].dim / layout.width if kind == STRIPS else float(_items(layout))
                for layout, table, kind in zip(layouts, owner, kinds, strict=True)
            ]
        ),
        work=np.concatenate(items["work"]),
        send=np.concatenate(items["send"]),
        memory=np.concatenate(items["memory"]),
        receive=np.array([cost.receive for cost in shared]),
        bisection=np.array([cost.bisection for cost in shared]),
    )
    fixed = model.fixed_memory()
    problem = Problem(
        options=options,
        strips=_strips(model, known, unit_of, options),
        tables=len(w.tables),
        ranks=t.ranks,
        group=model.row_group.ranks,
        memory_limit=t.hbm_bytes - sum(fixed.values()),
        allowed=allowed,
        pinned=pinned,
    )
    return Candidates(
        model=model, problem=problem, layouts=tuple(layouts), unit_columns=unit_of, fixed_memory=fixed
    )


def row_blocks(rows: int, ways: int) -> tuple[IntArray, IntArray]:
    """First row and rows of each block; TorchRec's rule: ⌈rows/ways⌉ each, the last ones shorter or empty."""
    block = -(-rows // ways)
    first = np.minimum(np.arange(ways) * block, rows)
    return first, np.minimum(first + block, rows) - first


def heaviest_item(model: CostModel, table: TableSpec, kind: ShardingType, widths: FloatArray) -> ShardCost:
    """Cost of the most read row block at each width, with the memory of the longest."""
    if model.row_ways(kind) == 1:
        zeros = np.zeros_like(widths)
        return model.shard(table, kind, first_row=zeros, rows=zeros + table.rows, width=widths)
    first, rows = row_blocks(table.rows, model.row_ways(kind))
    hottest = int(np.argmax(table.id_share(first.astype(float), (first + rows).astype(float)) + 1e-12 * rows))
    cost = [
        model.shard(
            table,
            kind,
            first_row=np.full_like(widths, float(first[block])),
            rows=np.full_like(widths, float(rows[block])),
            width=widths,
        )
        for block in sorted({hottest, 0}, reverse=True)
    ]
    return replace(cost[0], weights=cost[-1].weights, state=cost[-1].state)


def _price(model: CostModel, known: Known, index: int, kind: ShardingType, widths: FloatArray) -> ShardCost:
    """`heaviest_item`, looked up where another row group asked before."""
    table = model.workload.tables[index]
    if layout_kind(kind) == GROUP:
        return heaviest_item(model, table, kind, widths)
    key = (index, kind, widths.tobytes())
    if key not in known:
        known[key] = heaviest_item(model, table, kind, widths)
    return known[key]


def _strips(model: CostModel, known: Known, unit_of: tuple[int, ...], options: Options) -> Strips:
    w = model.workload
    units = np.array([table.dim // unit for table, unit in zip(w.tables, unit_of, strict=True)])
    costs = {name: np.zeros((len(units), int(units.max()) + 1)) for name in ("work", "send", "memory")}
    fixed, per_piece = [], []
    for index, (table, unit) in enumerate(zip(w.tables, unit_of, strict=True)):
        widths = unit * np.arange(1.0, units[index] + 1)
        cost = _price(model, known, index, ShardingType.COLUMN_WISE, widths)
        for name, column in costs.items():
            column[index, 1 : units[index] + 1] = getattr(cost, name)
        one = model.shared(table, ShardingType.COLUMN_WISE, 1.0)
        two = model.shared(table, ShardingType.COLUMN_WISE, 2.0)
        piece = SharedCost(receive=two.receive - one.receive, bisection=two.bisection - one.bisection)
        per_piece.append(piece)
        fixed.append(
            SharedCost(receive=one.receive - piece.receive, bisection=one.bisection - piece.bisection)
        )
    strip = options.kind == STRIPS
    narrower = strip & (options.units < units[options.table])
    whole = strip & (options.units == units[options.table])
    return Strips(
        units=units,
        divisible=np.bincount(options.table, narrower, len(units)) > 0,
        whole=np.bincount(options.table, whole, len(units)) > 0,
        **costs,
        receive=np.array([cost.receive for cost in per_piece]),
        bisection=np.array([cost.bisection for cost in per_piece]),
        fixed_receive=np.array([cost.receive for cost in fixed]),
        fixed_bisection=np.array([cost.bisection for cost in fixed]),
    )


def _items(layout: Layout) -> int:
    """Items that the solver places: one group holds all columns of a table-column-wise table."""
    if layout_kind(layout.kind) == EVERY or layout.kind is ShardingType.TABLE_COLUMN_WISE:
        return 1
    return layout.shards


def _rank_mask(name: str, ranks: tuple[int, ...], world: int) -> BoolArray:
    if not ranks or min(ranks) < 0 or max(ranks) >= world:
        raise PlanInputError(f"table {name}: constraint ranks={ranks} must name ranks of 0..{world - 1}")
    mask = np.zeros(world, dtype=bool)
    mask[list(ranks)] = True
    return mask


def _pinned_places(
    table: TableSpec, pinned: tuple[int, ...], layout: Layout, group: int, world: int
) -> IntArray:
    if not pinned or min(pinned) < 0 or max(pinned) >= world or len(set(pinned)) < len(pinned):
        raise PlanInputError(
            f"table {table.name}: pinned={pinned} must name different ranks of 0..{world - 1}"
        )
    kind = layout_kind(layout.kind)
    if kind == EVERY:
        raise PlanInputError(
            f"table {table.name}: {layout.kind.value} lies on every rank, it cannot be pinned"
        )
    places = np.array(pinned, dtype=np.int64)
    return places // group if kind == GROUP else places
