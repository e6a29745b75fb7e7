"""Checks that the tables of a run fit into the memory of its hosts, and suggests changes if they do not.

Runs before memory is allocated. Counts rows, optimizer state and the copy that background checkpoints make, not
batches or the dense model. Hosts whose free memory is unknown are not checked.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, log10
from typing import Literal, NamedTuple

import torch
from msgspec import structs

from rowwise.comm.interface import Comm
from rowwise.comm.status import all_gather_uneven
from rowwise.errors import TableMemoryError
from rowwise.perf.host_memory import free_bytes
from rowwise.plan import Plan
from rowwise.planner.fixes import with_row_state
from rowwise.quantity import format_bytes
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.first_rank import on_first_rank
from rowwise.recipes.id_maps import stored_tables_of
from rowwise.spec import RowType, Table, Topology, state_width

Purpose = Literal["train", "resume", "use"]  # decides which changes are still possible
FLOAT_bytes = 4
MOST_WAYS = 3
SPARE = 0.9  # of the free memory that suggested tables may fill; batches and the dense model need the rest
DIM_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMemory:
    """Tables, their plan, and the free memory of each host."""

    tables: tuple[Table, ...]
    plan: Plan
    topology: Topology
    free_H: tuple[int | None, ...]
    background: bool = False  # checkpoints copy tables before writing
    purpose: Purpose = "train"
    mapped: frozenset[str] = frozenset()  # tables whose number of rows is set by an id map

    def rows_bytes(self, host: int) -> int:
        return _bytes_on_host(self, host, lambda table: table.rows * table.row_bytes)

    def state_bytes(self, host: int) -> int:
        return _bytes_on_host(self, host, lambda table: table.rows * state_width(table) * FLOAT_bytes)

    def needed_bytes(self, host: int) -> int:
        return (self.rows_bytes(host) + self.state_bytes(host)) * (2 if self.background else 1)

    def with_tables(self, change: Callable[[Table], Table]) -> "TableMemory":
        return replace(self, tables=tuple(map(change, self.tables)))


class MemoryRemedy(NamedTuple):
    """A change that makes the tables fit, in words."""

    words: str
    needed_bytes: float  # on the host that lacked memory


def check_memory(
    resolved: ResolvedRecipe, tables: Sequence[Table], plan: Plan, comm: Comm, purpose: Purpose = "train"
) -> None:
    """Raise TableMemoryError if a host lacks memory for its tables; a collective."""
    free = free_bytes()
    free_W = [int(size) for size in all_gather_uneven(comm, torch.tensor([-1 if free is None else free]), "memory")]
    free_HW = [[free_W[rank] for rank in comm.topology.ranks_of(host)] for host in range(comm.topology.hosts)]
    asked = TableMemory(
        tables=tuple(tables),
        plan=plan,
        topology=comm.topology,
        free_H=tuple(min((size for size in sizes if size >= 0), default=None) for sizes in free_HW),
        background=resolved.recipe.save.background and purpose != "use",
        purpose=purpose,
        mapped=frozenset(t.name for one in resolved.tables if one.id_map is not None for t in stored_tables_of(one)),
    )
    on_first_rank(comm, lambda: raise_if_short(asked))


def raise_if_short(asked: TableMemory) -> None:
    """Raise with the needed and the free memory, and the smallest changes that make the tables fit."""
    short_H = [0 if free is None else asked.needed_bytes(host) - free for host, free in enumerate(asked.free_H)]
    host = max(range(len(short_H)), key=short_H.__getitem__)
    free = asked.free_H[host]
    if free is None or short_H[host] <= 0:
        return
    largest = max(asked.tables, key=lambda table: table.rows * (table.row_bytes + state_width(table) * FLOAT_bytes))
    where = "here" if asked.topology.hosts == 1 else f"on host {host}"
    copies = ", twice as save.background copies them" if asked.background else ""
    parts = (
        f"{format_bytes(asked.rows_bytes(host))} of rows and {format_bytes(asked.state_bytes(host))} of optimizer state"
    )
    most = f"the largest is {largest.name!r} with {largest.rows:,} x {largest.dim}"
    need = f"the tables need {format_bytes(asked.needed_bytes(host))} of memory {where} ({parts}{copies}; {most})"
    ways = [f"{way.words} ({format_bytes(way.needed_bytes)})" for way in find_remedies(asked, host)]
    if asked.purpose == "use":
        ways = [f"a machine with {format_bytes(asked.needed_bytes(host))} free", *(f"a run with {way}" for way in ways)]
    want = "; or ".join(ways[:MOST_WAYS]) or "a machine with more memory, or fewer tables"
    raise TableMemoryError(f"{need}, and {format_bytes(free)} are free: want {want}")


def find_remedies(asked: TableMemory, host: int) -> list[MemoryRemedy]:
    """The least change of each kind: first without background checkpoints, then by falling memory."""
    free = asked.free_H[host]
    assert free is not None
    room = int(free * SPARE)
    kinds = (_fewer_rows, _narrower_rows, _compressed_bytes, _more_hosts)
    found = (max(kind(asked, host, room), key=lambda way: way.needed_bytes, default=None) for kind in kinds)
    changes = sorted((way for way in found if way is not None), key=lambda way: -way.needed_bytes)
    return [*_foreground(asked, host, room), *changes]


def _foreground(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    if asked.background:
        yield from _if_fits(replace(asked, background=False), host, room, "save.background=false")


def _fewer_rows(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    """A limit on rows for all tables, rounded down to two digits."""
    if asked.purpose == "resume":  # a checkpoint fixes the rows
        return

    def cut(rows: int) -> TableMemory:
        return asked.with_tables(lambda t: t if t.name in asked.mapped else structs.replace(t, rows=min(t.rows, rows)))

    low, high = 0, max(table.rows for table in asked.tables)  # invariant: low rows fit (or low is 0), high rows do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cut(middle).needed_bytes(host) <= room else (low, middle)
    most = _round_down(low)
    larger = [t.name for t in asked.tables if t.rows > most and t.name not in asked.mapped]
    if most and larger:
        words = f"at most {most:,} rows in each table" if len(larger) > 1 else f"tables.each.{larger[0]}.rows={most}"
        yield from _if_fits(cut(most), host, room, words)


def _narrower_rows(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    for row_type in (RowType.FP16, RowType.INT8):
        fewer_bits = asked.with_tables(lambda table, to=row_type: _narrow_row_type(table, to))
        yield from _if_fits(fewer_bits, host, room, f"tables.all.row_type={row_type}")
        if asked.purpose != "resume":
            both = fewer_bits.with_tables(with_row_state)
            yield from _if_fits(both, host, room, f"{row_type} rows with row-wise optimizer state")
    if asked.purpose == "resume":  # a checkpoint fixes dims and optimizers
        return
    yield from _if_fits(asked.with_tables(with_row_state), host, room, "row-wise optimizer state")
    widest = max(table.dim for table in asked.tables)
    for dim in range((widest - 1) // DIM_STEP * DIM_STEP, 0, -DIM_STEP):
        narrow = asked.with_tables(lambda table, to=dim: structs.replace(table, dim=min(table.dim, to)))
        found = list(_if_fits(narrow, host, room, f"tables.all.dim={dim}"))
        if found:
            yield from found
            return


def _compressed_bytes(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    if asked.purpose == "resume":
        return
    budget = _round_down(int(asked.rows_bytes(host) * room / asked.needed_bytes(host)))
    words = f"`rowwise compress` with --budget {format_bytes(budget).replace(' ', '').replace(',', '')}"
    if budget >= 1000:
        yield MemoryRemedy(
            f"{words}, run where the whole tables fit", asked.needed_bytes(host) * budget / asked.rows_bytes(host)
        )


def _more_hosts(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    """More hosts, not more ranks: ranks of one host share its memory."""
    hosts = asked.topology.hosts
    if asked.purpose == "use" or not room:
        return
    total = sum(map(asked.needed_bytes, range(hosts)))
    count = max(ceil(total / room), hosts + 1)
    yield MemoryRemedy(f"ranks on {count:,} hosts like this one, by torchrun", total / count)


def _if_fits(asked: TableMemory, host: int, room: int, words: str) -> Iterator[MemoryRemedy]:
    size = asked.needed_bytes(host)
    if size <= room:
        yield MemoryRemedy(words, size)


def _narrow_row_type(table: Table, row_type: RowType) -> Table:
    """The table with the row type, if its rows become smaller."""
    narrow = structs.replace(table, row_type=row_type)
    return narrow if narrow.row_bytes < table.row_bytes else table


def _round_down(number: int) -> int:
    """The number with all digits but the first two set to 0."""
    unit = 10 ** max(floor(log10(number)) - 1, 0) if number else 1
    return number // unit * unit


def _bytes_on_host(asked: TableMemory, host: int, size_of: Callable[[Table], int]) -> int:
    """The sum of sizes over the tiles of a host; a changed table is cut in the same proportions."""
    times = _copies_on_ranks(asked.plan, asked.topology.ranks_of(host))
    return ceil(sum(size_of(table) * times.get(table.name, 0) for table in asked.tables))


def _copies_on_ranks(plan: Plan, ranks: range) -> dict[str, Fraction]:
    """The share of each table on some ranks: above 1 for replicas, below 1 for shards."""
    cells: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    for tile in plan.tiles:
        cells[tile.table] += (tile.rows[1] - tile.rows[0]) * (tile.cols[1] - tile.cols[0]) * (tile.rank in ranks)
        size[tile.table] = max(size[tile.table], tile.rows[1] * tile.cols[1])
    return {name: Fraction(cells[name], size[name]) for name in cells}
