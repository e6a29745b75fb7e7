"""Where tables lie now, as a placement of a new problem: the start of re-planning, and what it costs to leave it.

A table whose tiles are one of our layouts starts as it stands; where that cut is no option of the new problem (nobody
would make it any more), it becomes one, so keeping a plan can be compared with changing it. A table that was cut in
another way starts with the option that leaves most of its bytes where they are.

Known limits: several homes for a piece of which many ranks have a part (only one of those with the largest part counts
as its home).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from rowwise.perf.access import Curves, Floats
from rowwise.perf.memory import FLOAT_bytes, memory_bytes
from rowwise.plan import Plan, Tile
from rowwise.planner.infer_layout import Units, infer_layout
from rowwise.planner.kinds import PlacementKind, tiles_of
from rowwise.planner.layouts import Layout
from rowwise.planner.native import Homes
from rowwise.planner.options import TableArrays
from rowwise.planner.problem import NO_UNIT, Index, Pieces, Placement, PlacementProblem
from rowwise.spec import Table, Topology, state_slots

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TableWeight:
    """Bytes of a table's rectangles: columns, and state once a row, of which each piece has one."""

    table: Table
    column_bytes: float
    once_bytes: int

    @classmethod
    def of(cls, table: Table) -> "TableWeight":
        """Rows and optimizer state."""
        widths = [slot.width for slot in state_slots(table).values()]
        wide = sum(width == table.dim for width in widths)
        return cls(table, table.row_bytes / table.dim + FLOAT_bytes * wide, FLOAT_bytes * (len(widths) - wide))

    def __call__(self, rows: Span, cols: Span) -> int:
        return ceil((rows[1] - rows[0]) * ((cols[1] - cols[0]) * self.column_bytes + self.once_bytes))


def overlap(a: Span, b: Span) -> Span | None:
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, end) if begin < end else None


def moved_bytes(old: Plan, new: Plan, tables: Sequence[Table]) -> int:
    """Bytes of rows and optimizer state that come to ranks which do not have them, of tables that both plans have."""
    before: dict[str, list[Tile]] = defaultdict(list)
    for tile in old.tiles:
        before[tile.table].append(tile)
    moved = 0
    for table in tables:
        weight = TableWeight.of(table)
        for tile in new.tiles_of(table.name) if table.name in before else ():
            here = [was for was in before[table.name] if was.rank == tile.rank]
            both = [(overlap(tile.rows, was.rows), overlap(tile.cols, was.cols)) for was in here]
            moved += weight(tile.rows, tile.cols) - sum(weight(rows, cols) for rows, cols in both if rows and cols)
    return moved


@dataclass(frozen=True, slots=True)
class CurrentPlacement:
    """A plan in force, seen from a new question."""

    problem: PlacementProblem  # with the cuts of the plan in force
    start: Placement
    homes: Homes
    leave_N: Floats  # bytes that come from elsewhere, of each piece at its home
    whole_N: Floats  # anywhere else
    stored_bytes: float  # by the plan in force, of tables that are still there
    recut: tuple[str, ...]  # tables that start cut in another way than they are

    def moved_bytes(self, placement: Placement) -> float:
        """That go to another rank, at most."""
        taken = placement.unit_N != NO_UNIT
        moved = np.where(placement.unit_N == self.homes.unit_N, self.leave_N, self.whole_N)
        return float(moved[taken].sum())


def current_placement(problem: PlacementProblem, old: Plan) -> CurrentPlacement:
    """The plan in force as a start."""
    tiles = _tiles_by_item(problem, old)
    found = [_recognised(problem, item, tiles[item]) for item in range(len(problem.members))]
    problem = _widened(problem, found)
    homes = _Homes(problem, tiles)
    choice_I = np.zeros(len(problem.members), dtype=np.int32)
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    recut: list[str] = []
    for item, one in enumerate(found):
        option = None if one is None else _option_of(problem, item, one[0])
        if option is None or one is None:
            option = homes.nearest(item)
            units: Sequence[int] = homes.unit_N[list(problem.pieces_of(option))].tolist()
            recut += [problem.question.workloads[t].table.name for t in problem.members[item]] if tiles[item] else []
        else:
            units = one[1]
        choice_I[item] = option
        unit_N[list(problem.pieces_of(option))] = units
    return CurrentPlacement(
        problem=problem,
        start=Placement(choice_I, unit_N),
        homes=Homes(homes.unit_N, homes.once_N - homes.leave_N),
        leave_N=homes.leave_N,
        whole_N=homes.whole_N,
        stored_bytes=homes.stored_bytes,
        recut=tuple(recut),
    )


def _tiles_by_item(problem: PlacementProblem, old: Plan) -> list[dict[int, list[Tile]]]:
    """Of each item: the tiles of those of its tables that are not new."""
    numbers = {w.table.name: t for t, w in enumerate(problem.question.workloads)}
    tiles: dict[int, list[Tile]] = defaultdict(list)
    for tile in old.tiles:
        if tile.table in numbers:
            tiles[numbers[tile.table]].append(tile)
    return [{t: sorted(tiles[t]) for t in members if t in tiles} for members in problem.members]


def _recognised(
    problem: PlacementProblem, item: int, tiles: dict[int, list[Tile]]
) -> tuple[PlacementKind, Units] | None:
    """The kind and the units that all tables of an item have, if these are allowed."""
    workloads, topology = problem.question.workloads, problem.topology
    found = {infer_layout(workloads[t].table, tiles[t], topology, problem.kinds) for t in tiles}
    if len(found) != 1 or len(tiles) != len(problem.members[item]):
        return None
    one = found.pop()
    if one is None:
        return None
    kind, units = one
    layouts = [problem.question.constraints.layouts_of(workloads[t].table.name) for t in tiles]
    allowed_U = _allowed(problem, item)
    enough = all(workloads[t].table.rows >= kind.row_parts(topology) for t in tiles)
    ok = enough and all(kind.layout.name in some for some in layouts)
    if allowed_U is not None:
        ok = ok and bool(allowed_U[list(units)].all())
    return one if ok else None


def _allowed(problem: PlacementProblem, item: int) -> NDArray[np.bool_] | None:
    """The units that an item may be on; none: all."""
    rule = int(problem.rule_I[item])
    return problem.allowed_RU[rule].astype(bool) if rule >= 0 else None


def _option_of(problem: PlacementProblem, item: int, kind: PlacementKind) -> int | None:
    options = range(int(problem.item_begin[item]), int(problem.item_begin[item + 1]))
    return next((option for option in options if problem.kind_of(option) == kind), None)


def _widened(problem: PlacementProblem, found: Sequence[tuple[PlacementKind, Units] | None]) -> PlacementProblem:
    """With an option for each item's present kind."""
    missing = [(i, one[0]) for i, one in enumerate(found) if one and _option_of(problem, i, one[0]) is None]
    if not missing:
        return problem
    question = problem.question
    columns, curves = TableArrays.of(question), Curves.of(question.workloads, question.batch)
    kinds = [*problem.kinds, *sorted({kind for _, kind in missing} - set(problem.kinds), key=str)]
    parts = [problem.pieces]
    for item, kind in missing:
        made = []
        for table in problem.members[item]:
            shards = columns.shards(kind, np.array([table]), question)
            made.append(
                Pieces(
                    load_NK=question.model.loads(shards, curves),
                    link_N=question.model.links_s(shards, curves),
                    bytes_NM=memory_bytes(shards, curves, question.buffers),
                )
            )
        parts.append(sum(made[1:], made[0]))
    # Options stay sorted by item; a new one is its item's last.
    item_O = np.concatenate([problem.item_of_O, [item for item, _ in missing]])
    kind_O = np.concatenate([problem.option_kind, [kinds.index(kind) for _, kind in missing]])
    begins = np.concatenate([problem.option_begin, problem.option_begin[-1] + np.cumsum([k.parts for _, k in missing])])
    order = np.argsort(item_O, kind="stable")
    index_N = np.concatenate([np.arange(begins[o], begins[o + 1]) for o in order])
    sizes = np.diff(begins)[order]
    return replace(
        problem,
        kinds=tuple(kinds),
        item_begin=np.concatenate([[0], np.cumsum(np.bincount(item_O))]).astype(np.int32),
        option_kind=kind_O[order].astype(np.int32),
        option_begin=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        pieces=Pieces.concatenate(parts).take(index_N),
    )


class _Homes:
    """For each piece of each option: the rank with most of its bytes, and the bytes that would have to move there."""

    def __init__(self, problem: PlacementProblem, tiles: Sequence[dict[int, list[Tile]]]) -> None:
        pieces = len(problem.pieces.link_N)
        self._problem = problem
        self._options = list(zip(problem.item_begin[:-1].tolist(), problem.item_begin[1:].tolist(), strict=True))
        self._begin = problem.option_begin.tolist()
        self.unit_N: Index = np.zeros(pieces, dtype=np.int32)
        self.leave_N, self.whole_N, self.once_N = np.zeros(pieces), np.zeros(pieces), np.zeros(pieces)
        self.stored_bytes = 0
        for item, members in enumerate(tiles):
            weighed = [(TableWeight.of(problem.question.workloads[t].table), some) for t, some in members.items()]
            self.stored_bytes += sum(weight(tile.rows, tile.cols) for weight, some in weighed for tile in some)
            self._fill(item, weighed)

    def _fill(self, item: int, members: Sequence[tuple[TableWeight, list[Tile]]]) -> None:
        problem, allowed_U = self._problem, _allowed(self._problem, item)
        known: dict[tuple[Layout, int], list[_PieceBytes]] = {}  # tiers of a layout have the same rectangles
        for option in range(*self._options[item]):
            kind = problem.kinds[problem.option_kind[option]]
            at = (kind.layout, kind.parts)
            if at not in known:
                known[at] = [_PieceBytes() for _ in range(kind.parts)]
                for weight, tiles in members:
                    _count(known[at], kind, weight, tiles, problem.topology)
            copies = problem.topology.world if kind.layout.is_copied else 1
            for piece, held in enumerate(known[at], start=self._begin[option]):
                units = [unit for unit in held.by_unit if allowed_U is None or allowed_U[unit]]
                best = max(units, key=held.by_unit.__getitem__, default=-1)
                self.unit_N[piece] = _any_unit(kind, problem.topology, allowed_U) if best < 0 else best
                self.once_N[piece] = held.once
                self.whole_N[piece] = copies * held.once
                self.leave_N[piece] = max(0, copies * held.once - (held.by_unit[best] if best >= 0 else 0))

    def nearest(self, item: int) -> int:
        """The option that leaves most where it is; of equals the one that stores least."""

        def away(option: int) -> tuple[float, float]:
            pieces = slice(self._begin[option], self._begin[option + 1])
            return float(self.leave_N[pieces].sum()), float(self.whole_N[pieces].sum())

        return min(range(*self._options[item]), key=away)


@dataclass(slots=True)
class _PieceBytes:
    """Bytes of a piece, counted once if there are copies, and the bytes that units already hold."""

    once: int = 0
    by_unit: dict[int, int] = field(default_factory=dict)


def _any_unit(kind: PlacementKind, topology: Topology, allowed_U: NDArray[np.bool_] | None) -> int:
    begin = kind.layout.units(topology).start
    return begin if allowed_U is None else begin + int(allowed_U[begin:].argmax())


def _count(
    pieces: list[_PieceBytes], kind: PlacementKind, weight: TableWeight, tiles: Sequence[Tile], topology: Topology
) -> None:
    """Adds a table's bytes to its item's pieces."""
    world, devices = topology.world, topology.devices
    # As if all pieces were on the first unit: a part's rank is then its number inside the unit.
    first = kind.layout.units(topology).start
    parts = tiles_of(kind, weight.table, [first] * kind.parts, topology)
    each = len(parts) // kind.parts
    for number, part in enumerate(parts):
        held = pieces[number // each]
        if not kind.layout.is_copied or number == 0:
            held.once += weight(part.rows, part.cols)
        for tile in tiles:
            unit = tile.rank
            if kind.span == "host":
                unit = world + tile.rank // devices if tile.rank % devices == part.rank else -1
            elif kind.span == "all":
                unit = first if tile.rank == part.rank else -1
            rows, cols = overlap(part.rows, tile.rows), overlap(part.cols, tile.cols)
            if unit >= 0 and rows is not None and cols is not None:
                held.by_unit[unit] = held.by_unit.get(unit, 0) + weight(rows, cols)
