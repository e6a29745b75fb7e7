"""What follows from a plan alone: which ids go to which rank, what each rank makes of them, and where it belongs.

Pure: every rank works out the same for all ranks, so nothing about it is ever sent. Adding a layout changes nothing
here, as all of it is read from rectangles: columns that were cut are placed side by side, rows that were cut are added
up. Known limits: a tile whose rows another tile of its table cuts is held in several pieces.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from msgspec import structs

from rowwise.plan import Plan, Tile
from rowwise.row_optimizers import couples_columns
from rowwise.spec import Pooling, Table, Topology


class ExchangePath(StrEnum):
    """How the vectors of a piece reach the ranks of the samples."""

    ALL_TO_ALL = "all_to_all"  # pooled, in one exchange; also the vectors of sequences
    HIERARCHICAL = "hierarchical"  # pooled, and first added up inside the host that holds all of the table's rows
    PER_ID = "per_id"  # a vector for each id, which the requesting rank adds up in the order of the ids


class FeatureSlice(NamedTuple):
    """The ids of a feature that fall into one of its table's row ranges: what a rank is sent."""

    feature: str
    table: int
    range: int
    whole: bool  # the only range of its table

    @property
    def name(self) -> str:
        """Under which a batch holds them."""
        return self.feature if self.whole else f"{self.feature} range {self.range}"


class RankPiece(NamedTuple):
    """A tile, or as much of it as lies in one row range, on its rank."""

    tile: Tile
    table: int
    range: int
    whole: bool

    @property
    def width(self) -> int:
        return self.tile.cols[1] - self.tile.cols[0]

    def slices(self, table: Table) -> list[FeatureSlice]:
        """The ids it is looked up by."""
        return [FeatureSlice(feature, self.table, self.range, self.whole) for feature in table.feature_names]


class PieceGroup(NamedTuple):
    """The pieces of a rank that take the same path and are updated alike."""

    path: ExchangePath
    coupled: bool  # an update needs sums over columns that are elsewhere
    held: tuple[RankPiece, ...]


class ColumnRun(NamedTuple):
    """Columns of what rank `rank` sends, and where they belong in the output; `range` says whether to place or add."""

    rank: int
    source: int
    target: int
    width: int
    range: int


class SequencePiece(NamedTuple):
    """The vectors that a rank sends for the ids of a slice: columns `first` and following of a feature."""

    rank: int
    slice: int  # of that rank's
    feature: str
    first: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Where ids go and vectors come from. `parts_W` and `slices_W` are by rank; a rank without tiles has none."""

    tables: tuple[Table, ...]
    topology: Topology
    cuts: Mapping[str, tuple[int, ...]]  # of each feature: where the row ranges of its table begin, and the rows
    copied: tuple[Table, ...]  # held by every rank as a whole
    slices_W: tuple[tuple[FeatureSlice, ...], ...]
    parts_W: tuple[tuple[PieceGroup, ...], ...]
    columns: Mapping[str, slice]  # of pooled features in the output
    elastic: bool

    @property
    def world(self) -> int:
        return len(self.parts_W)

    @property
    def added_in_order(self) -> tuple[Table, ...]:
        """Tables whose bags the requesting rank adds up."""
        ranks = range(self.world)
        found = {held.table for w in ranks for part in self.parts(w, ExchangePath.PER_ID) for held in part.held}
        return tuple(self.tables[index] for index in sorted(found))

    @property
    def exchanged(self) -> tuple[Table, ...]:
        """Tables whose vectors travel."""
        return tuple(table for table in self.tables if table not in self.copied)

    @property
    def width(self) -> int:
        """Columns of the output."""
        return max((columns.stop for columns in self.columns.values()), default=0)

    def only(self, features: Collection[str]) -> "Routes":
        """Of a batch with these features alone, as if its tables had no others."""
        kept = {k: _with_features(table, features) for k, table in enumerate(self.tables)}
        numbers = {k: number for number, k in enumerate(k for k, table in kept.items() if table is not None)}
        tables = tuple(table for table in kept.values() if table is not None)
        copied = {table.name for table in self.copied}
        return replace(
            self,
            tables=tables,
            cuts={feature: cuts for feature, cuts in self.cuts.items() if feature in features},
            copied=tuple(table for table in tables if table.name in copied),
            slices_W=tuple(
                tuple(s._replace(table=numbers[s.table]) for s in slices if s.feature in features)
                for slices in self.slices_W
            ),
            parts_W=tuple(tuple(_only_tables(parts, numbers)) for parts in self.parts_W),
            columns=_columns(tables),
        )

    def streams(self, common: Collection[str]) -> tuple["Routes", ...]:
        """Of all features but these, and of these, if there are any: see [Note: Streams] in `ids.py`."""
        if not common:
            return (self,)
        features = [feature for table in self.tables for feature in table.feature_names]
        return self.only([feature for feature in features if feature not in common]), self.only(common)

    def parts(self, rank: int, path: ExchangePath) -> list[PieceGroup]:
        """Of a rank and a path."""
        return [part for part in self.parts_W[rank] if part.path is path]

    def pooled(self, rank: int, path: ExchangePath) -> Iterator[tuple[RankPiece, str]]:
        """The pooled vectors that a rank makes, in order."""
        for part in self.parts(rank, path):
            for held in part.held:
                if self.tables[held.table].pooling is not Pooling.SEQUENCE:
                    yield from ((held, feature) for feature in self.tables[held.table].feature_names)

    def pooled_width(self, rank: int, path: ExchangePath) -> int:
        """How many columns that are."""
        return sum(held.width for held, _ in self.pooled(rank, path))

    def runs(self, rank: int, path: ExchangePath) -> list[ColumnRun]:
        """Where the columns belong that a rank makes, in order."""
        return self._place(rank, self.pooled(rank, path))

    def host_columns(self, host: int) -> list[ColumnRun]:
        """Of a host, whatever its ranks hold of it: the columns that are added up there, and where they belong."""
        return self._place(host, iter(self.host_pieces(host)))

    def host_pieces(self, host: int) -> list[tuple[RankPiece, str]]:
        """The pooled vectors that are added up in a host, in order."""
        devices = self.topology.devices
        seen = {
            (held.table, feature, held.tile.cols): RankPiece(held.tile, held.table, 0, False)
            for rank in range(host * devices, (host + 1) * devices)
            for held, feature in self.pooled(rank, ExchangePath.HIERARCHICAL)
        }
        ordered = sorted(seen.items(), key=lambda item: (item[0][0], self.columns[item[0][1]].start, item[0][2]))
        return [(held, key[1]) for key, held in ordered]

    def sequences(self, rank: int, path: ExchangePath) -> list[SequencePiece]:
        """The vectors for each id that a rank sends, in order: of sequences, or of features pooled by who asked."""
        found: list[SequencePiece] = []
        for part in self.parts(rank, path):
            for held in part.held:
                table = self.tables[held.table]
                if (table.pooling is Pooling.SEQUENCE) != (path is ExchangePath.ALL_TO_ALL):
                    continue
                for asked in held.slices(table):
                    at = self.slices_W[rank].index(asked)
                    found.append(SequencePiece(rank, at, asked.feature, held.tile.cols[0], held.width))
        return found

    def _place(self, rank: int, pooled: Iterator[tuple[RankPiece, str]]) -> list[ColumnRun]:
        runs: list[ColumnRun] = []
        source = 0
        for held, feature in pooled:
            target = self.columns[feature].start + held.tile.cols[0]
            last = runs[-1] if runs else None
            joins = last and last.range == held.range and last.target + last.width == target
            if last and joins:  # neighbours here and there are one copy
                runs[-1] = last._replace(width=last.width + held.width)
            else:
                runs.append(ColumnRun(rank, source, target, held.width, held.range))
            source += held.width
        return runs


def make_routes(tables: Sequence[Table], plan: Plan, topology: Topology, *, elastic: bool = False) -> Routes:
    """Work a plan out. `elastic`: sums have to come out the same for any plan, so cut bags are added up in order."""
    plan.validate(tables)
    # By table first: thousands of tables have tens of thousands of tiles.
    tiles_T: dict[str, list[Tile]] = {table.name: [] for table in tables}
    for tile in sorted(plan.tiles):
        tiles_T[tile.table].append(tile)
    copied = tuple(table for table in tables if _is_copied(tiles_T[table.name], table, plan.world))
    cut = {table.name: _row_cuts(tiles_T[table.name], table) for table in tables}
    groups_W: list[dict[tuple[ExchangePath, bool], list[RankPiece]]] = [{} for _ in range(plan.world)]
    asked_W: list[dict[FeatureSlice, None]] = [{} for _ in range(plan.world)]
    away = {table.name for table in tables} - {table.name for table in copied}
    for index, table in enumerate(tables):
        if table.name not in away:
            continue
        tiles, cuts = tiles_T[table.name], cut[table.name]
        path, pieces = _path(tiles, table, cuts, topology, elastic=elastic), list(_pieces(tiles, index, cuts))
        coupled = _is_coupled(plan, tiles, table)
        for held in _whole_rows(pieces, table, alike=path is ExchangePath.HIERARCHICAL) if coupled else pieces:
            key = path, coupled and held.width < table.dim
            groups_W[held.tile.rank].setdefault(key, []).append(held)
            asked_W[held.tile.rank].update(dict.fromkeys(held.slices(table)))
    return Routes(
        tables=tuple(tables),
        topology=topology,
        cuts={feature: cut[table.name] for table in tables for feature in table.feature_names},
        copied=copied,
        slices_W=tuple(tuple(asked) for asked in asked_W),
        parts_W=tuple(
            tuple(PieceGroup(path, coupled, tuple(held)) for (path, coupled), held in sorted(groups.items()))
            for groups in groups_W
        ),
        columns=_columns(tables),
        elastic=elastic,
    )


def column_owners(plan: Plan, table: Table, rows: tuple[int, int]) -> list[Tile]:
    """The tiles that hold these rows, in column order: those who exchange what an update sums over columns."""
    tiles = [t for t in plan.tiles if t.table == table.name and t.rows[0] <= rows[0] and rows[1] <= t.rows[1]]
    return sorted(tiles, key=lambda tile: tile.cols)


def _columns(tables: Sequence[Table]) -> dict[str, slice]:
    columns: dict[str, slice] = {}
    at = 0
    for table in tables:
        for feature in table.feature_names if table.pooling is not Pooling.SEQUENCE else ():
            columns[feature] = slice(at, at + table.dim)
            at += table.dim
    return columns


def _whole_rows(pieces: Sequence[RankPiece], table: Table, *, alike: bool) -> list[RankPiece]:
    """Pieces whose rank has all columns of their rows as one, whose update needs nothing of other ranks.

    `alike`: all of them or none, as vectors that are added up have to have the same columns.
    """
    by_range: dict[int, list[RankPiece]] = {}
    for held in pieces:
        by_range.setdefault(held.range, []).append(held)
    single = {number for number, mine in by_range.items() if len({held.tile.rank for held in mine}) == 1}
    if alike and len(single) < len(by_range):
        return list(pieces)
    found: list[RankPiece] = []
    for number, mine in by_range.items():
        whole = structs.replace(mine[0].tile, cols=(0, table.dim))
        found += [mine[0]._replace(tile=whole)] if number in single else mine
    return found


def _with_features(table: Table, features: Collection[str]) -> Table | None:
    kept = tuple(feature for feature in table.feature_names if feature in features)
    return structs.replace(table, features=kept) if kept else None


def _only_tables(parts: Sequence[PieceGroup], numbers: Mapping[int, int]) -> Iterator[PieceGroup]:
    """The parts that hold some of these tables, which have other numbers now."""
    for part in parts:
        held = tuple(h._replace(table=numbers[h.table]) for h in part.held if h.table in numbers)
        if held:
            yield part._replace(held=held)


def _row_cuts(tiles: Sequence[Tile], table: Table) -> tuple[int, ...]:
    return tuple(sorted({0, table.rows} | {cut for tile in tiles for cut in tile.rows}))


def _is_copied(tiles: Sequence[Tile], table: Table, world: int) -> bool:
    return len(tiles) == world > 1 and all(
        tile.rows == (0, table.rows) and tile.cols == (0, table.dim) for tile in tiles
    )


def _is_coupled(plan: Plan, tiles: Sequence[Tile], table: Table) -> bool:
    cut = any(tile.cols != (0, table.dim) for tile in tiles)
    return cut and couples_columns(table.optimizer) and table.name not in plan.approximate


def _path(
    tiles: Sequence[Tile], table: Table, cuts: tuple[int, ...], topology: Topology, *, elastic: bool
) -> ExchangePath:
    if table.pooling is Pooling.SEQUENCE or len(cuts) == 2:
        return ExchangePath.ALL_TO_ALL
    if elastic:
        return ExchangePath.PER_ID
    columns = {tile.cols for tile in tiles}
    # What is added up has to have the same columns everywhere: rows and columns cut across each other.
    is_grid = len(tiles) == len({tile.rows for tile in tiles}) * len(columns)
    one_host = len({(tile.cols, topology.host_of(tile.rank)) for tile in tiles}) == len(columns)  # for each column
    inside = one_host and is_grid and topology.hosts > 1 and topology.devices > 1
    return ExchangePath.HIERARCHICAL if inside else ExchangePath.ALL_TO_ALL


def _pieces(tiles: Sequence[Tile], index: int, cuts: tuple[int, ...]) -> Iterator[RankPiece]:
    """What ranks hold of a table, cut where any tile of it is."""
    at = {cut: number for number, cut in enumerate(cuts)}
    for tile in tiles:
        for number in range(at[tile.rows[0]], at[tile.rows[1]]):
            piece = Tile(table=tile.table, rank=tile.rank, rows=(cuts[number], cuts[number + 1]), cols=tile.cols)
            yield RankPiece(piece, index, number, len(cuts) == 2)
