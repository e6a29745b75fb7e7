"""Layouts: ways to place one table, each a small pure function that gives tiles, and a record of what it does.

A new layout is a function and a record in `LAYOUTS`, and nothing else: the search, bounds, explanations and cost
models read the record's fields, and what checks plans and what runs them sees tiles only. Cuts are as even as they can
be, columns between the blocks that have to stay together; a table with fewer rows (or blocks) than ranks takes the
first of the ranks. Known limits: any say in which ranks are best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rowwise.plan import Tile, column_block
from rowwise.spec import Table, Topology, VectorExchange

Span = tuple[int, int]
UnitSpan = Literal["rank", "host", "all"]
SPANS: tuple[UnitSpan, ...] = ("rank", "host", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The properties of a layout that planning reads."""

    name: str
    span: UnitSpan  # what a piece goes to: a rank, the ranks of a host, or all ranks
    exchange: VectorExchange
    tiles: Callable[[Table, Topology, Sequence[int]], tuple[Tile, ...]]  # of the numbers of ranks or hosts that have it
    pieces: Literal["columns", "rows"] | None = None  # what is cut into pieces that go to units; None: it is one piece
    spreads_rows: bool = False  # over the ranks of a unit
    tiered: tuple[int, ...] = ()  # numbers of pieces that are tried with rows below device memory

    @property
    def cuts_columns(self) -> bool:
        """Whether ranks have some of the columns."""
        return self.pieces == "columns"

    @property
    def cuts_rows(self) -> bool:
        """Whether ranks have some of the rows."""
        return self.pieces == "rows" or self.spreads_rows

    @property
    def is_copied(self) -> bool:
        """Whether every rank has all of it."""
        return self.exchange == "all_reduce"

    @property
    def is_whole(self) -> bool:
        """Whether one rank has all of it."""
        return not (self.cuts_columns or self.cuts_rows or self.is_copied)

    @property
    def words(self) -> str:
        """The name, in a sentence."""
        return self.name.replace("_", "-")

    def __reduce__(self) -> tuple[Callable[[str], "Layout"], tuple[str]]:
        """To other processes by name: functions without a name cannot be pickled."""
        return layout_named, (self.name,)

    def differs_on(self, topology: Topology) -> bool:
        """Whether its units are not those of another span."""
        if self.span == "host":
            return 1 < topology.devices < topology.world
        return self.span == "rank" or topology.world > 1

    def unit_ranks(self, topology: Topology) -> int:
        return {"rank": 1, "host": topology.devices, "all": topology.world}[self.span]

    def units(self, topology: Topology) -> range:
        """Where a piece may go. Units are numbered ranks first, then hosts, then all ranks as one."""
        world, hosts = topology.world, topology.hosts
        begins = (0, world, world + hosts, world + hosts + 1)
        number = SPANS.index(self.span)
        return range(begins[number], begins[number + 1])


def table_wise(table: Table, rank: int) -> tuple[Tile, ...]:
    """The whole table on one rank."""
    return row_wise(table, [rank])


def row_wise(table: Table, ranks: Sequence[int]) -> tuple[Tile, ...]:
    """Some of the rows on each rank: for tables that are larger than a device, at the price of adding up pools."""
    return _rows(table, ranks, (0, table.dim))


def column_wise(table: Table, ranks: Sequence[int]) -> tuple[Tile, ...]:
    """Some of the columns on each rank, all of which look every id up: nothing to add up, but narrow rows.

    On the ranks of one host it is what others call table-column-wise.
    """
    pieces = zip(ranks, _columns(table, len(ranks)), strict=False)
    return tuple(tile for rank, cols in pieces for tile in _rows(table, [rank], cols))


def table_row_wise(table: Table, topology: Topology, host: int) -> tuple[Tile, ...]:
    """The table on one host, some of the rows on each device: pools are added up inside the host."""
    return row_wise(table, topology.ranks_of(host))


def grid(table: Table, topology: Topology, hosts: Sequence[int]) -> tuple[Tile, ...]:
    """Some of the columns on each host, of those some of the rows on each device: added up inside hosts only."""
    pieces = zip(hosts, _columns(table, len(hosts)), strict=False)
    return tuple(tile for host, cols in pieces for tile in _rows(table, topology.ranks_of(host), cols))


def replicated(table: Table, ranks: Sequence[int]) -> tuple[Tile, ...]:
    """A copy on each rank, which have to be all ranks of the plan: no ids or rows travel, but gradients do."""
    return tuple(tile for rank in ranks for tile in table_wise(table, rank))


def _rows(table: Table, ranks: Sequence[int], cols: Span) -> tuple[Tile, ...]:
    pieces = zip(ranks, _even(table.rows, len(ranks)), strict=False)
    return tuple(Tile(table=table.name, rank=rank, rows=rows, cols=cols) for rank, rows in pieces)


def _columns(table: Table, parts: int) -> list[Span]:
    block = column_block(table)
    # The last block may be a part of one; it is in the last piece, which is never among the shorter ones.
    return [(begin * block, min(end * block, table.dim)) for begin, end in _even(-(-table.dim // block), parts)]


def _even(count: int, parts: int) -> list[Span]:
    """0 .. count in as many runs as are asked for, or as can be; lengths differ by one at most."""
    parts = min(parts, count)
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


TABLE_WISE = Layout(
    name="table_wise",
    span="rank",
    exchange="all_to_all",
    tiles=lambda table, topology, ranks: table_wise(table, ranks[0]),
    tiered=(1,),
)
COLUMN_WISE = Layout(
    name="column_wise",
    span="rank",
    exchange="all_to_all",
    tiles=lambda table, topology, ranks: column_wise(table, ranks),
    pieces="columns",
    tiered=(2, 4),
)
TABLE_ROW_WISE = Layout(
    name="table_row_wise",
    span="host",
    exchange="two_level",
    tiles=lambda table, topology, hosts: table_row_wise(table, topology, hosts[0]),
    spreads_rows=True,
    tiered=(1,),
)
GRID = Layout(name="grid", span="host", exchange="two_level", tiles=grid, pieces="columns", spreads_rows=True)
ROW_WISE = Layout(
    name="row_wise",
    span="all",
    exchange="reduce_scatter",
    tiles=lambda table, topology, _: row_wise(table, range(topology.world)),
    spreads_rows=True,
    tiered=(1,),
)
REPLICATED = Layout(
    name="replicated",
    span="all",
    exchange="all_reduce",
    tiles=lambda table, topology, _: replicated(table, range(topology.world)),
)
# From the least split to the most. Where two make the same tiles (of tables with few rows), they are of the first.
LAYOUTS = (TABLE_WISE, COLUMN_WISE, TABLE_ROW_WISE, GRID, ROW_WISE, REPLICATED)
NAMES = tuple(layout.name for layout in LAYOUTS)


def layout_named(name: str) -> Layout:
    """A layout by its name, which is one of `NAMES`."""
    return next(layout for layout in LAYOUTS if layout.name == name)
