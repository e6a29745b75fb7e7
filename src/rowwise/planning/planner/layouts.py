"""Layouts: each way to place one table, as a pure function that gives tiles and a record of its properties.

A new layout is a function and a record in `LAYOUTS`: search, bounds, explanations and cost models read the record's
fields, and everything that checks or runs plans sees tiles only. Cuts are as even as possible: of columns between the
blocks that have to stay together, of rows between the buckets of managed tables. A table with fewer rows (or blocks)
than ranks uses the first of the ranks. Which ranks are best is decided elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rowwise.parallel.plan import Tile, column_block
from rowwise.tables.spec import Table, Topology, VectorExchange

Range = tuple[int, int]
UnitKind = Literal["rank", "host", "all"]
UNIT_KINDS: tuple[UnitKind, ...] = ("rank", "host", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Properties of a way to place a table."""

    name: str
    unit_kind: UnitKind  # a piece goes to one rank, to the ranks of a host, or to all ranks
    exchange: VectorExchange
    tiles: Callable[[Table, Topology, Sequence[int]], tuple[Tile, ...]]  # table, topology, ranks or hosts of its pieces
    pieces: Literal["columns", "rows"] | None = None  # the dimension that is cut; None if the table is one piece
    spreads_rows: bool = False  # rows are cut over the ranks of a unit
    tiered: bool = False  # whether rows may be below device memory

    @property
    def cuts_columns(self) -> bool:
        return self.pieces == "columns"

    @property
    def cuts_rows(self) -> bool:
        return self.pieces == "rows" or self.spreads_rows

    @property
    def is_replicated(self) -> bool:
        return self.exchange == "replicated"

    @property
    def is_whole(self) -> bool:
        return not (self.cuts_columns or self.cuts_rows or self.is_replicated)

    @property
    def keeps_rows(self) -> bool:
        """Whether each row is on one rank, as managed tables need it."""
        return not (self.cuts_columns or self.is_replicated)

    @property
    def words(self) -> str:
        return self.name.replace("_", "-")

    def __reduce__(self) -> tuple[Callable[[str], "Layout"], tuple[str]]:
        """Pickles by name, as lambdas cannot be pickled."""
        return layout_named, (self.name,)

    def differs_on(self, topology: Topology) -> bool:
        """Whether its units differ from those of every other kind."""
        if self.unit_kind == "host":
            return 1 < topology.devices < topology.world
        return self.unit_kind == "rank" or topology.world > 1

    def unit_ranks(self, topology: Topology) -> int:
        return {"rank": 1, "host": topology.devices, "all": topology.world}[self.unit_kind]

    def units(self, topology: Topology) -> range:
        """Units that a piece may go to: ranks come first, then hosts, then all ranks as one."""
        world, hosts = topology.world, topology.hosts
        begins = (0, world, world + hosts, world + hosts + 1)
        number = UNIT_KINDS.index(self.unit_kind)
        return range(begins[number], begins[number + 1])


def table_wise(table: Table, rank: int) -> tuple[Tile, ...]:
    return row_wise(table, [rank])


def row_wise(table: Table, ranks: Sequence[int]) -> tuple[Tile, ...]:
    """Rows sharded over ranks, for tables larger than a device; partial pools are reduced across ranks."""
    return _row_tiles(table, ranks, (0, table.dim))


def column_wise(table: Table, ranks: Sequence[int]) -> tuple[Tile, ...]:
    """Columns sharded over ranks, each of which looks up all ids: no partial sums, but narrow rows.

    On the ranks of one host, TorchRec calls it table-column-wise.
    """
    pieces = zip(ranks, _column_ranges(table, len(ranks)), strict=False)
    return tuple(tile for rank, cols in pieces for tile in _row_tiles(table, [rank], cols))


def table_row_wise(table: Table, topology: Topology, host: int) -> tuple[Tile, ...]:
    """The table on one host, its rows sharded over devices; partial pools are reduced inside the host."""
    return row_wise(table, topology.ranks_of(host))


def grid(table: Table, topology: Topology, hosts: Sequence[int]) -> tuple[Tile, ...]:
    """Columns sharded over hosts, and rows over the devices of each: reductions inside hosts only."""
    pieces = zip(hosts, _column_ranges(table, len(hosts)), strict=False)
    return tuple(tile for host, cols in pieces for tile in _row_tiles(table, topology.ranks_of(host), cols))


def replicated(table: Table, ranks: Sequence[int]) -> tuple[Tile, ...]:
    """A replica on each rank: ids and vectors stay local, gradients are all-reduced."""
    return tuple(tile for rank in ranks for tile in table_wise(table, rank))


def _row_tiles(table: Table, ranks: Sequence[int], cols: Range) -> tuple[Tile, ...]:
    multiple = table.row_multiple
    pieces = zip(ranks, _even_ranges(table.rows // multiple, len(ranks)), strict=False)
    return tuple(
        Tile(table=table.name, rank=rank, rows=(begin * multiple, end * multiple), cols=cols)
        for rank, (begin, end) in pieces
    )


def _column_ranges(table: Table, parts: int) -> list[Range]:
    block = column_block(table)
    # The last block may be narrower than the others. It is in the last piece, which never has fewer blocks than others,
    # so widths are as even as blocks allow.
    return [(begin * block, min(end * block, table.dim)) for begin, end in _even_ranges(-(-table.dim // block), parts)]


def _even_ranges(count: int, parts: int) -> list[Range]:
    """range(count) in `parts` runs (at most `count`), whose lengths differ by at most 1."""
    parts = min(parts, count)
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


TABLE_WISE = Layout(
    name="table_wise",
    unit_kind="rank",
    exchange="all_to_all",
    tiles=lambda table, topology, ranks: table_wise(table, ranks[0]),
    tiered=True,
)
COLUMN_WISE = Layout(
    name="column_wise",
    unit_kind="rank",
    exchange="all_to_all",
    tiles=lambda table, topology, ranks: column_wise(table, ranks),
    pieces="columns",
    tiered=True,
)
TABLE_ROW_WISE = Layout(
    name="table_row_wise",
    unit_kind="host",
    exchange="hierarchical",
    tiles=lambda table, topology, hosts: table_row_wise(table, topology, hosts[0]),
    spreads_rows=True,
    tiered=True,
)
GRID = Layout(
    name="grid",
    unit_kind="host",
    exchange="hierarchical",
    tiles=grid,
    pieces="columns",
    spreads_rows=True,
    tiered=True,
)
ROW_WISE = Layout(
    name="row_wise",
    unit_kind="all",
    exchange="all_to_all_sum",
    tiles=lambda table, topology, _: row_wise(table, range(topology.world)),
    spreads_rows=True,
    tiered=True,
)
REPLICATED = Layout(
    name="replicated",
    unit_kind="all",
    exchange="replicated",
    tiles=lambda table, topology, _: replicated(table, range(topology.world)),
)
# From the least cut to the most. Where two make the same tiles (of tables with few rows), `infer_kind` gives the first.
LAYOUTS = (TABLE_WISE, COLUMN_WISE, TABLE_ROW_WISE, GRID, ROW_WISE, REPLICATED)
NAMES = tuple(layout.name for layout in LAYOUTS)


def layout_named(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)
