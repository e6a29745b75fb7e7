"""Layouts: ways to place one table, each a small pure function that gives tiles.

Their own file because a new layout is a new function here and nothing else: what checks plans and what runs them
sees tiles only. Cuts are as even as they can be, columns between the blocks that have to stay together; a table with
fewer rows (or blocks) than ranks takes the first of the ranks. Gives up: any say in which ranks are best.
"""

from collections.abc import Sequence

from rowwise.plan import Tile, column_block
from rowwise.spec import Table, Topology

Span = tuple[int, int]


def table_wise(table: Table, rank: int) -> tuple[Tile, ...]:
    """The whole table on one rank."""
    return row_wise(table, [rank])


def row_wise(table: Table, ranks: Sequence[int]) -> tuple[Tile, ...]:
    """Some of the rows on each rank: for tables that are larger than a device, at the price of adding up pools."""
    return _rows(table, ranks, (0, table.dim))


def column_wise(table: Table, ranks: Sequence[int]) -> tuple[Tile, ...]:
    """Some of the columns on each rank, all of which look every id up: nothing to add up, but narrow rows."""
    pieces = zip(ranks, _columns(table, len(ranks)), strict=False)
    return tuple(tile for rank, cols in pieces for tile in _rows(table, [rank], cols))


def table_row_wise(table: Table, topology: Topology, host: int) -> tuple[Tile, ...]:
    """The table on one host, some of the rows on each device: pools are added up inside the host."""
    return row_wise(table, topology.ranks_of(host))


def table_column_wise(table: Table, topology: Topology, host: int) -> tuple[Tile, ...]:
    """The table on one host, some of the columns on each device."""
    return column_wise(table, topology.ranks_of(host))


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
