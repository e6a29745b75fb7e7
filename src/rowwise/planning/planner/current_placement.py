"""The plan in force as a placement of a new problem: the start of re-planning, and how many bytes each change moves.

A table whose tiles match a layout starts where it is. If that cut is no option of the new problem, it becomes one, so
that keeping the plan can be compared with changing it. A table cut in another way starts with the option that leaves
most of its bytes where they are.

Known limit: a piece has one home, the unit with most of its bytes, even if other units have nearly as many.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from rowwise.parallel.plan import Plan, Tile, tiles_by_table
from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.memory import FLOAT_bytes
from rowwise.planning.planner.infer_layout import Units, infer_kind
from rowwise.planning.planner.kinds import PlacementKind, tiles_of
from rowwise.planning.planner.layouts import Layout
from rowwise.planning.planner.native import Homes
from rowwise.planning.planner.options import TableArrays, price_pieces
from rowwise.planning.planner.problem import NO_UNIT, Index, Pieces, Placement, PlacementProblem
from rowwise.tables.spec import Table, Topology, state_slots

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TableBytes:
    """Bytes of rectangles of a table: of columns, and of optimizer state that every piece of a row keeps once."""

    table: Table
    column_bytes: float  # of a column of a row, with its optimizer state
    row_state_bytes: int  # optimizer state of a row that is not per column

    @classmethod
    def of(cls, table: Table) -> "TableBytes":
        widths = [slot.width for slot in state_slots(table).values()]
        wide = sum(width == table.dim for width in widths)
        return cls(table, table.row_bytes / table.dim + FLOAT_bytes * wide, FLOAT_bytes * (len(widths) - wide))

    def __call__(self, rows: Range, cols: Range) -> int:
        return ceil((rows[1] - rows[0]) * ((cols[1] - cols[0]) * self.column_bytes + self.row_state_bytes))


def overlap(a: Range, b: Range) -> Range | None:
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, end) if begin < end else None


def moved_bytes(old: Plan, new: Plan, tables: Sequence[Table]) -> int:
    """Bytes of rows and optimizer state that ranks have to receive, of tables that both plans have."""
    before, after, moved = tiles_by_table(old), tiles_by_table(new), 0
    for table in tables:
        weight = TableBytes.of(table)
        for tile in after[table.name] if table.name in before else ():
            local = [t for t in before[table.name] if t.rank == tile.rank]
            both = [(overlap(tile.rows, t.rows), overlap(tile.cols, t.cols)) for t in local]
            moved += weight(tile.rows, tile.cols) - sum(weight(rows, cols) for rows, cols in both if rows and cols)
    return moved


@dataclass(frozen=True, slots=True)
class CurrentPlacement:
    """A plan in force as a placement of a new problem."""

    problem: PlacementProblem  # with the kinds of the plan in force among its options
    start: Placement
    homes: Homes
    home_bytes_N: Floats  # bytes that move if the piece goes to its home
    other_bytes_N: Floats  # bytes that move if it goes anywhere else
    stored_bytes: float  # by the plan in force, of tables that still exist
    recut: tuple[str, ...]  # tables that match no layout, which start with the nearest one

    def moved_bytes(self, placement: Placement) -> float:
        """Upper bound on the bytes that move to other ranks."""
        taken = placement.unit_N != NO_UNIT
        moved = np.where(placement.unit_N == self.homes.unit_N, self.home_bytes_N, self.other_bytes_N)
        return float(moved[taken].sum())


def placement_of_plan(problem: PlacementProblem, old: Plan) -> CurrentPlacement:
    """The plan in force as a start of the search."""
    tiles = _tiles_by_item(problem, old)
    inferred = [_infer_item_kind(problem, item, tiles[item]) for item in range(len(problem.members))]
    problem = _add_current_kinds(problem, inferred)
    homes = _HomeFinder(problem, tiles)
    choice_I = np.zeros(len(problem.members), dtype=np.int32)
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    recut: list[str] = []
    for item, kind_and_units in enumerate(inferred):
        option = None if kind_and_units is None else _find_option(problem, item, kind_and_units[0])
        if option is None or kind_and_units is None:
            option = homes.nearest(item)
            units: Sequence[int] = homes.unit_N[problem.pieces_of(option)].tolist()
            recut += [problem.request.workloads[t].table.name for t in problem.members[item]] if tiles[item] else []
        else:
            units = kind_and_units[1]
        choice_I[item] = option
        unit_N[problem.pieces_of(option)] = units
    return CurrentPlacement(
        problem=problem,
        start=Placement(choice_I, unit_N),
        homes=Homes(homes.unit_N, homes.size_N - homes.home_bytes_N),
        home_bytes_N=homes.home_bytes_N,
        other_bytes_N=homes.other_bytes_N,
        stored_bytes=homes.stored_bytes,
        recut=tuple(recut),
    )


def _tiles_by_item(problem: PlacementProblem, old: Plan) -> list[dict[int, list[Tile]]]:
    """For each item, the tiles of its tables in the old plan; new tables have none."""
    names, tiles = [w.table.name for w in problem.request.workloads], tiles_by_table(old)
    return [{t: sorted(tiles[names[t]]) for t in members if names[t] in tiles} for members in problem.members]


def _infer_item_kind(
    problem: PlacementProblem, item: int, tiles: dict[int, list[Tile]]
) -> tuple[PlacementKind, Units] | None:
    """The kind and units that all tables of an item share, if they do and constraints allow it."""
    workloads, topology = problem.request.workloads, problem.topology
    inferred = {infer_kind(workloads[t].table, tiles[t], topology, problem.kinds) for t in tiles}
    if len(inferred) != 1 or len(tiles) != len(problem.members[item]):
        return None
    kind_and_units = inferred.pop()
    if kind_and_units is None:
        return None
    kind, units = kind_and_units
    layouts = [problem.request.constraints.layouts_of(workloads[t].table.name) for t in tiles]
    enough = all(workloads[t].table.rows >= kind.row_parts(topology) for t in tiles)
    ok = enough and all(kind.layout.name in allowed for allowed in layouts)
    return kind_and_units if ok and problem.allowed_units(item)[list(units)].all() else None


def _find_option(problem: PlacementProblem, item: int, kind: PlacementKind) -> int | None:
    options = problem.options_of(item)
    return next((option for option in options if problem.kind_of(option) == kind), None)


def _add_current_kinds(
    problem: PlacementProblem, inferred: Sequence[tuple[PlacementKind, Units] | None]
) -> PlacementProblem:
    """The problem with an option for each item's current kind."""
    missing = [(i, pair[0]) for i, pair in enumerate(inferred) if pair and _find_option(problem, i, pair[0]) is None]
    if not missing:
        return problem
    request = problem.request
    columns, curves = TableArrays.of(request), Curves.of(request.workloads, request.batch)
    kinds = [*problem.kinds, *sorted({kind for _, kind in missing} - set(problem.kinds), key=str)]
    parts = [problem.pieces]
    for item, kind in missing:
        tables = np.array(problem.members[item])
        parts.append(price_pieces(request, columns, curves, kind, tables).sum_of(len(tables)))
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


class _HomeFinder:
    """For each piece of each option: the unit with most of its bytes, and the bytes that would have to move there."""

    def __init__(self, problem: PlacementProblem, tiles: Sequence[dict[int, list[Tile]]]) -> None:
        pieces = len(problem.pieces.link_N)
        self._problem = problem
        self.unit_N: Index = np.zeros(pieces, dtype=np.int32)
        self.home_bytes_N, self.other_bytes_N, self.size_N = np.zeros(pieces), np.zeros(pieces), np.zeros(pieces)
        self.stored_bytes = 0
        for item, members in enumerate(tiles):
            weighed = [(TableBytes.of(problem.request.workloads[t].table), old) for t, old in members.items()]
            self.stored_bytes += sum(weight(tile.rows, tile.cols) for weight, old in weighed for tile in old)
            self._fill(item, weighed)

    def _fill(self, item: int, members: Sequence[tuple[TableBytes, list[Tile]]]) -> None:
        problem, allowed_U = self._problem, self._problem.allowed_units(item)
        known: dict[tuple[Layout, int], list[_PieceBytes]] = {}  # a layout has the same rectangles in each tier
        for option in problem.options_of(item):
            kind = problem.kind_of(option)
            key, first = (kind.layout, kind.parts), kind.layout.units(problem.topology).start
            if key not in known:
                known[key] = [_PieceBytes() for _ in range(kind.parts)]
                for weight, tiles in members:
                    _add_bytes(known[key], kind, weight, tiles, problem.topology)
            replicas = problem.topology.world if kind.layout.is_replicated else 1
            for piece, piece_bytes in zip(problem.pieces_of(option), known[key], strict=True):
                units = [unit for unit in piece_bytes.by_unit if allowed_U[unit]]
                best = max(units, key=piece_bytes.by_unit.__getitem__, default=-1)
                self.unit_N[piece] = first + int(allowed_U[first:].argmax()) if best < 0 else best
                self.size_N[piece] = piece_bytes.size
                self.other_bytes_N[piece] = replicas * piece_bytes.size
                self.home_bytes_N[piece] = max(
                    0, replicas * piece_bytes.size - (piece_bytes.by_unit[best] if best >= 0 else 0)
                )

    def nearest(self, item: int) -> int:
        """The option that moves fewest bytes; ties go to the one that stores least."""

        def moved(option: int) -> tuple[float, float]:
            pieces = self._problem.pieces_of(option)
            return float(self.home_bytes_N[pieces].sum()), float(self.other_bytes_N[pieces].sum())

        return min(self._problem.options_of(item), key=moved)


@dataclass(slots=True)
class _PieceBytes:
    """Bytes of a piece (of one replica), and the part of them that each unit holds already."""

    size: int = 0
    by_unit: dict[int, int] = field(default_factory=dict)


def _add_bytes(
    pieces: list[_PieceBytes], kind: PlacementKind, weight: TableBytes, tiles: Sequence[Tile], topology: Topology
) -> None:
    """Adds a table's bytes to the pieces of its item."""
    world, devices = topology.world, topology.devices
    # Tiles as if all pieces were on the first unit: a tile's rank is then its place inside any unit.
    first = kind.layout.units(topology).start
    parts = tiles_of(kind, weight.table, [first] * kind.parts, topology)
    tiles_of_piece = len(parts) // kind.parts
    for number, part in enumerate(parts):
        piece_bytes = pieces[number // tiles_of_piece]
        if not kind.layout.is_replicated or number == 0:
            piece_bytes.size += weight(part.rows, part.cols)
        for tile in tiles:
            unit = tile.rank
            if kind.unit_kind == "host":
                unit = world + tile.rank // devices if tile.rank % devices == part.rank else -1
            elif kind.unit_kind == "all":
                unit = first if tile.rank == part.rank else -1
            rows, cols = overlap(part.rows, tile.rows), overlap(part.cols, tile.cols)
            if unit >= 0 and rows is not None and cols is not None:
                piece_bytes.by_unit[unit] = piece_bytes.by_unit.get(unit, 0) + weight(rows, cols)
