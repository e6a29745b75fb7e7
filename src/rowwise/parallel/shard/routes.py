"""`Routes`: which ids go to which rank, which vectors come back, and into which output columns; all from the plan.

A pure function of tables, plan and topology: every rank computes the routes of all ranks, so routes are never sent. No
code here knows a layout by name. It reads rectangles: vectors of column ranges are put side by side, vectors of row
ranges are added up. A tile whose rows another tile of its table cuts becomes several pieces, one per row range.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from msgspec import structs

from rowwise.parallel.plan import Plan, Tile, tiles_by_table
from rowwise.tables.row_optimizers import needs_full_rows
from rowwise.tables.spec import Pooling, Table, Topology
from rowwise.tables.store.policy import WAYS


class ExchangePath(StrEnum):
    """How a piece's vectors reach the ranks of the samples; `spec.VectorExchange` names them in forecasts."""

    ALL_TO_ALL = "all_to_all"  # pooled vectors in one all-to-all; also the rows of sequence tables
    HIERARCHICAL = "hierarchical"  # pooled vectors, reduce-scattered inside the one host that holds the table's rows
    PER_ID = "per_id"  # one vector per id; the rank of the samples pools them in the order of the ids


class FeatureSlice(NamedTuple):
    """The ids of a feature that fall into one row range of its table: the unit that is sent to a rank."""

    feature: str
    table: int
    range: int
    all_rows: bool  # the range is all rows of the table

    @property
    def name(self) -> str:
        """The feature's name in the batch that the owner of the rows looks up."""
        return self.feature if self.all_rows else f"{self.feature} range {self.range}"


class RankPiece(NamedTuple):
    """The part of a tile that lies in one row range. Row ranges are bounded by all row cuts of the table's tiles."""

    tile: Tile
    table: int
    range: int
    all_rows: bool  # the range is all rows of the table

    @property
    def width(self) -> int:
        return self.tile.cols[1] - self.tile.cols[0]

    def slices(self, table: Table) -> list[FeatureSlice]:
        """The slices whose ids look this piece up: one per feature of the table."""
        return [FeatureSlice(feature, self.table, self.range, self.all_rows) for feature in table.feature_names]


class PieceGroup(NamedTuple):
    """The pieces of a rank with the same exchange path and the same kind of update; one arena holds them."""

    path: ExchangePath
    needs_full_rows: bool  # the update needs statistics of full rows, some columns of which other ranks hold
    pieces: tuple[RankPiece, ...]


class ColumnSegment(NamedTuple):
    """`width` columns from `source` of rank `rank`'s block go to column `target` of the output.

    Row range 0 overwrites the output's columns, later ranges are added to them.
    """

    rank: int
    source: int
    target: int
    width: int
    range: int


class PerIdPiece(NamedTuple):
    """Per-id vectors that a rank sends for one of its slices: `width` columns of the feature, from column `first`."""

    rank: int
    slice: int  # index into slices_W[rank]
    feature: str
    first: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The routes of all ranks, computed alike on each; a rank without tiles has no slices and no groups."""

    tables: tuple[Table, ...]
    topology: Topology
    cuts: Mapping[str, tuple[int, ...]]  # by feature: first row of each row range of its table, then the row count
    replicated: tuple[Table, ...]  # every rank holds all of the table
    slices_W: tuple[tuple[FeatureSlice, ...], ...]  # the ids sent to each rank
    groups_W: tuple[tuple[PieceGroup, ...], ...]  # the pieces that each rank holds
    columns: Mapping[str, slice]  # output columns of each pooled feature
    elastic: bool

    @property
    def world(self) -> int:
        return len(self.groups_W)

    @property
    def per_id_tables(self) -> tuple[Table, ...]:
        """Tables on the `per_id` path, which the rank of the samples pools."""
        groups = [group for w in range(self.world) for group in self.groups_on(w, ExchangePath.PER_ID)]
        return tuple(self.tables[k] for k in sorted({piece.table for group in groups for piece in group.pieces}))

    @property
    def exchanged_tables(self) -> tuple[Table, ...]:
        """Tables whose vectors travel: all that are not replicated."""
        return tuple(table for table in self.tables if table not in self.replicated)

    @property
    def column_owners(self) -> dict[tuple[int, tuple[int, int]], list[Tile]]:
        """The pieces of each (table, row range) whose update needs full rows, of all ranks, in column order."""
        groups = [group for groups in self.groups_W for group in groups if group.needs_full_rows]
        owners: dict[tuple[int, tuple[int, int]], list[Tile]] = {}
        for piece in sorted((piece for group in groups for piece in group.pieces), key=lambda x: x.tile.cols):
            owners.setdefault((piece.table, piece.tile.rows), []).append(piece.tile)
        return owners

    @property
    def width(self) -> int:
        """Columns of the pooled output."""
        return max((columns.stop for columns in self.columns.values()), default=0)

    def groups_on(self, rank: int, path: ExchangePath) -> list[PieceGroup]:
        """The groups of a rank that take this path."""
        return [group for group in self.groups_W[rank] if group.path is path]

    def pooled_pieces(self, rank: int, path: ExchangePath) -> list[tuple[RankPiece, str]]:
        """(piece, feature) for each pooled vector that a rank sends a sample, in the order of its columns."""
        return [
            (piece, feature)
            for group in self.groups_on(rank, path)
            for piece in group.pieces
            if self.tables[piece.table].pooling is not Pooling.SEQUENCE
            for feature in self.tables[piece.table].feature_names
        ]

    def host_pieces(self, host: int) -> list[tuple[RankPiece, str]]:
        """(piece, feature) for each pooled vector of a host's summed block, in the order of its columns."""
        devices = self.topology.devices
        # Ranks of a host with other rows of the same columns add to the same vector, which has one entry.
        by_columns = {
            (piece.table, feature, piece.tile.cols): RankPiece(piece.tile, piece.table, 0, False)
            for rank in range(host * devices, (host + 1) * devices)
            for piece, feature in self.pooled_pieces(rank, ExchangePath.HIERARCHICAL)
        }
        ordered = sorted(by_columns.items(), key=lambda item: (item[0][0], self.columns[item[0][1]].start, item[0][2]))
        return [(piece, key[1]) for key, piece in ordered]

    def per_id_pieces(self, rank: int, path: ExchangePath) -> list[PerIdPiece]:
        """The per-id vectors that a rank sends: of sequences (path `all_to_all`), or of bags (path `per_id`)."""
        per_id: list[PerIdPiece] = []
        for group in self.groups_on(rank, path):
            for piece in group.pieces:
                table = self.tables[piece.table]
                if (table.pooling is Pooling.SEQUENCE) != (path is ExchangePath.ALL_TO_ALL):
                    continue
                for piece_slice in piece.slices(table):
                    number = self.slices_W[rank].index(piece_slice)
                    per_id.append(PerIdPiece(rank, number, piece_slice.feature, piece.tile.cols[0], piece.width))
        return per_id

    def column_segments(self, rank: int, pooled: Sequence[tuple[RankPiece, str]]) -> list[ColumnSegment]:
        """Where each column of a rank's or a host's block goes in the output, neighbouring columns as one segment."""
        segments: list[ColumnSegment] = []
        source = 0
        for piece, feature in pooled:
            target = self.columns[feature].start + piece.tile.cols[0]
            last = segments[-1] if segments else None
            joins = last and last.range == piece.range and last.target + last.width == target
            if last and joins:  # adjacent in the block and in the output: one copy instead of two
                segments[-1] = last._replace(width=last.width + piece.width)
            else:
                segments.append(ColumnSegment(rank, source, target, piece.width, piece.range))
            source += piece.width
        return segments


def make_routes(tables: Sequence[Table], plan: Plan, topology: Topology, *, elastic: bool = False) -> Routes:
    """The routes of a plan. `elastic`: row-cut bags take the `per_id` path, as sums must not depend on the plan."""
    plan.validate(tables)
    tiles_T = {name: sorted(tiles) for name, tiles in tiles_by_table(plan).items()}
    replicated = tuple(table for table in tables if _is_replicated(tiles_T[table.name], table, plan.world))
    cut = {t.name: tuple(sorted({0, t.rows}.union(*(tile.rows for tile in tiles_T[t.name])))) for t in tables}
    pieces_W: list[dict[tuple[ExchangePath, bool], list[RankPiece]]] = [{} for _ in range(plan.world)]
    slices_W: list[dict[FeatureSlice, None]] = [{} for _ in range(plan.world)]
    replicated_names = {table.name for table in replicated}
    for index, table in enumerate(tables):
        if table.name in replicated_names:
            continue
        tiles, cuts = tiles_T[table.name], cut[table.name]
        path = _exchange_path(tiles, table, cuts, topology, elastic=elastic)
        pieces = list(_cut_into_pieces(tiles, index, cuts))
        needs_full_rows = _needs_full_rows(plan, tiles, table)
        if needs_full_rows:
            pieces = _merge_columns_of_rank(pieces, table, alike=path is ExchangePath.HIERARCHICAL)
        for piece in pieces:
            key = path, needs_full_rows and piece.width < table.dim
            pieces_W[piece.tile.rank].setdefault(key, []).append(piece)
            slices_W[piece.tile.rank].update(dict.fromkeys(piece.slices(table)))
    return Routes(
        tables=tuple(tables),
        topology=topology,
        cuts={feature: cut[table.name] for table in tables for feature in table.feature_names},
        replicated=replicated,
        slices_W=tuple(tuple(slices) for slices in slices_W),
        groups_W=tuple(
            tuple(PieceGroup(*key, tuple(pieces)) for key, pieces in sorted(by_key.items())) for by_key in pieces_W
        ),
        columns=pooled_columns(tables),
        elastic=elastic,
    )


def pooled_columns(tables: Sequence[Table]) -> dict[str, slice]:
    """The output columns of each pooled feature."""
    columns: dict[str, slice] = {}
    at = 0
    for table in tables:
        for feature in table.feature_names if table.pooling is not Pooling.SEQUENCE else ():
            columns[feature] = slice(at, at + table.dim)
            at += table.dim
    return columns


def _merge_columns_of_rank(pieces: Sequence[RankPiece], table: Table, *, alike: bool) -> list[RankPiece]:
    """Merge the column pieces of a row range where one rank holds all of them: its update needs no other rank.

    `alike`: merge all row ranges or none, as blocks summed in a host must have equal columns.
    """
    by_range: dict[int, list[RankPiece]] = {}
    for piece in pieces:
        by_range.setdefault(piece.range, []).append(piece)
    single = {number for number, parts in by_range.items() if len({part.tile.rank for part in parts}) == 1}
    if alike and len(single) < len(by_range):
        return list(pieces)
    merged: list[RankPiece] = []
    for number, parts in by_range.items():
        full_width = structs.replace(parts[0].tile, cols=(0, table.dim))
        merged += [parts[0]._replace(tile=full_width)] if number in single else parts
    return merged


def _is_replicated(tiles: Sequence[Tile], table: Table, world: int) -> bool:
    return len(tiles) == world > 1 and all(
        tile.rows == (0, table.rows) and tile.cols == (0, table.dim) for tile in tiles
    )


def _needs_full_rows(plan: Plan, tiles: Sequence[Tile], table: Table) -> bool:
    cut = any(tile.cols != (0, table.dim) for tile in tiles)
    return cut and needs_full_rows(table.optimizer) and table.name not in plan.approximate


def _exchange_path(
    tiles: Sequence[Tile], table: Table, cuts: tuple[int, ...], topology: Topology, *, elastic: bool
) -> ExchangePath:
    if table.pooling is Pooling.SEQUENCE or len(cuts) == 2:
        return ExchangePath.ALL_TO_ALL
    if elastic:
        return ExchangePath.PER_ID
    columns = {tile.cols for tile in tiles}
    # A host adds up blocks of equal columns only, so every row range must be cut at the same columns.
    is_grid = len(tiles) == len({tile.rows for tile in tiles}) * len(columns)
    # For each column range, one host holds all its rows: its sums are complete before they cross the network.
    one_host = len({(tile.cols, topology.host_of(tile.rank)) for tile in tiles}) == len(columns)
    # With one host or one device per host, adding up first saves no byte.
    saves = topology.hosts > 1 and topology.devices > 1
    return ExchangePath.HIERARCHICAL if one_host and is_grid and saves else ExchangePath.ALL_TO_ALL


def _cut_into_pieces(tiles: Sequence[Tile], index: int, cuts: tuple[int, ...]) -> Iterator[RankPiece]:
    """Each tile, cut at every row where any tile of its table begins or ends."""
    range_at = {cut: number for number, cut in enumerate(cuts)}
    for tile in tiles:
        for number in range(range_at[tile.rows[0]], range_at[tile.rows[1]]):
            rows = cuts[number], cuts[number + 1]
            share = Fraction(rows[1] - rows[0], tile.rows[1] - tile.rows[0])
            cached = ceil(tile.cache_rows * share)
            pinned = max(0, min(int(tile.pinned_rows * share), cached - WAYS))
            piece = structs.replace(tile, rows=rows, cache_rows=cached, pinned_rows=pinned)
            yield RankPiece(piece, index, number, len(cuts) == 2)
