"""Ways to place a table, regular and odd, as one list: what is true of sharding is true of each of them.

Valid for tables of at least 8 rows and any number of column blocks, on any topology; where there are too few ranks or
blocks for what a name says, the nearest that there is.
"""

from collections.abc import Callable, Iterable, Sequence

from rowwise.parallel.plan import Tile, column_block
from rowwise.planning.planner.layouts import (
    Range,
    column_wise,
    grid,
    replicated,
    row_wise,
    table_row_wise,
    table_wise,
)
from rowwise.tables.spec import Table, Topology


def rectangles(table: Table, topology: Topology, parts: Iterable[tuple[Range, Range]]) -> tuple[Tile, ...]:
    """A tile for each rectangle that is not empty, dealt to the ranks in turn."""
    full = [(rows, cols) for rows, cols in parts if rows[0] < rows[1] and cols[0] < cols[1]]
    return tuple(
        Tile(table=table.name, rank=i % topology.world, rows=rows, cols=cols) for i, (rows, cols) in enumerate(full)
    )


def third(table: Table) -> int:
    """Columns up to the end of the first third of the blocks; with two blocks, of the first."""
    block = column_block(table)
    return (-(-table.dim // block) + 1) // 3 * block


def interleaved_rows(table: Table, topology: Topology) -> tuple[Tile, ...]:
    """Several runs of rows on each rank, with others' rows between them."""
    return row_wise(table, list(range(topology.world)) * (8 // min(topology.world, 8)))


def uneven_rows(table: Table, topology: Topology) -> tuple[Tile, ...]:
    """One row, most rows, two rows."""
    cuts = ((0, 1), (1, table.rows - 2), (table.rows - 2, table.rows))
    return rectangles(table, topology, [(rows, (0, table.dim)) for rows in cuts])


def beside(table: Table, topology: Topology) -> tuple[Tile, ...]:
    """Some columns of all rows on one rank, and the others cut by rows."""
    left, half = third(table), table.rows // 2
    right = (left, table.dim)
    return rectangles(table, topology, [((0, table.rows), (0, left)), ((0, half), right), ((half, table.rows), right)])


def pinwheel(table: Table, topology: Topology) -> tuple[Tile, ...]:
    """Four rectangles around a fifth: no cut goes through the whole table."""
    rows, dim, a = table.rows, table.dim, third(table)
    b = max(a, dim - a) // column_block(table) * column_block(table)
    parts = [((0, 3), (0, b)), ((0, 5), (b, dim)), ((5, rows), (a, dim)), ((3, rows), (0, a)), ((3, 5), (a, b))]
    return rectangles(table, topology, parts)


def stacked(table: Table, topology: Topology) -> tuple[Tile, ...]:
    """The first rows on one rank, the others by columns on all."""
    head = Tile(table=table.name, rank=0, rows=(0, 3), cols=(0, table.dim))
    tail = column_wise(table, range(topology.world))
    return head, *(Tile(table=t.table, rank=t.rank, rows=(3, table.rows), cols=t.cols) for t in tail)


def everyone(topology: Topology) -> Sequence[int]:
    return range(topology.world)


def last_host(topology: Topology) -> int:
    return topology.hosts - 1


CASES: dict[str, Callable[[Table, Topology], tuple[Tile, ...]]] = {
    "table-wise": lambda table, topology: table_wise(table, 0),
    "row-wise": lambda table, topology: row_wise(table, everyone(topology)),
    "column-wise": lambda table, topology: column_wise(table, everyone(topology)),
    "table-row-wise": lambda table, topology: table_row_wise(table, topology, last_host(topology)),
    "table-column-wise": lambda table, topology: column_wise(table, topology.ranks_of(last_host(topology))),
    "grid": lambda table, topology: grid(table, topology, range(topology.hosts)),
    "replicated": lambda table, topology: replicated(table, everyone(topology)),
    "all on the last rank": lambda table, topology: table_wise(table, topology.world - 1),
    "rows, ranks reversed": lambda table, topology: row_wise(table, everyone(topology)[::-1]),
    "columns, ranks reversed": lambda table, topology: column_wise(table, everyone(topology)[::-1]),
    "grid, hosts reversed": lambda table, topology: grid(table, topology, range(topology.hosts)[::-1]),
    "rows on every other rank": lambda table, topology: row_wise(table, everyone(topology)[::2]),
    "two row tiles on a rank": lambda table, topology: row_wise(table, [topology.world - 1] * 2),
    "two column tiles on a rank": lambda table, topology: column_wise(table, [topology.world - 1] * 2),
    "interleaved rows": interleaved_rows,
    "uneven rows": uneven_rows,
    "columns beside rows": beside,
    "columns below rows": stacked,
    "pinwheel": pinwheel,
}
