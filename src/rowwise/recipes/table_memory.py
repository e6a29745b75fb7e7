"""Whether the tables of a run fit into the memory of its hosts, and what would make them fit where they do not.

Asked before rows are read and before memory is taken. Counts rows, optimizer state and the copy that a checkpoint in
the background makes; what batches and the dense model take comes on top. Where the free memory is unknown, nothing is
refused here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, log10
from typing import Literal, NamedTuple

import torch
from msgspec import structs

from rowwise.comm.seam import Comm
from rowwise.comm.status import all_gather_uneven
from rowwise.errors import TableMemoryError
from rowwise.perf.host_memory import free_bytes
from rowwise.plan import Plan
from rowwise.planner.fixes import with_row_state
from rowwise.quantity import of_bytes
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.first_rank import on_first_rank
from rowwise.recipes.id_maps import tables_as_stored
from rowwise.spec import RowType, Table, Topology, state_width

Purpose = Literal["train", "resume", "use"]  # what can still be changed depends on it
FLOAT_bytes = 4
MOST_WAYS = 3
SPARE = 0.9  # of the free memory that a way out may fill: batches and the dense model need some, too
DIM_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMemory:
    """Tables, where they are to live, and what is free there."""

    tables: tuple[Table, ...]
    plan: Plan
    topology: Topology
    free_H: tuple[int | None, ...]
    background: bool = False  # checkpoints copy what they save
    purpose: Purpose = "train"
    mapped: frozenset[str] = frozenset()  # tables whose rows follow from an id map

    def rows_bytes(self, host: int) -> int:
        return _held(self, host, lambda table: table.rows * table.row_bytes)

    def state_bytes(self, host: int) -> int:
        return _held(self, host, lambda table: table.rows * state_width(table) * FLOAT_bytes)

    def needed_bytes(self, host: int) -> int:
        return (self.rows_bytes(host) + self.state_bytes(host)) * (2 if self.background else 1)

    def with_tables(self, change: Callable[[Table], Table]) -> "TableMemory":
        return replace(self, tables=tuple(map(change, self.tables)))


class MemoryRemedy(NamedTuple):
    """A change after which the tables fit."""

    words: str
    needed_bytes: float  # on the host that was short


def check_memory(
    resolved: ResolvedRecipe, tables: Sequence[Table], plan: Plan, comm: Comm, purpose: Purpose = "train"
) -> None:
    """Refuse tables for which there is no memory; called by all ranks."""
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
        mapped=frozenset(t.name for one in resolved.tables if one.id_map is not None for t in tables_as_stored(one)),
    )
    on_first_rank(comm, lambda: raise_if_too_large(asked))


def raise_if_too_large(asked: TableMemory) -> None:
    """One line that says what is needed, what there is, and the three smallest changes that would do."""
    short_H = [0 if free is None else asked.needed_bytes(host) - free for host, free in enumerate(asked.free_H)]
    host = max(range(len(short_H)), key=short_H.__getitem__)
    free = asked.free_H[host]
    if free is None or short_H[host] <= 0:
        return
    largest = max(asked.tables, key=lambda table: table.rows * (table.row_bytes + state_width(table) * FLOAT_bytes))
    where = "here" if asked.topology.hosts == 1 else f"on host {host}"
    copies = ", twice as save.background copies them" if asked.background else ""
    parts = f"{of_bytes(asked.rows_bytes(host))} of rows and {of_bytes(asked.state_bytes(host))} of optimizer state"
    most = f"the largest is {largest.name!r} with {largest.rows:,} x {largest.dim}"
    need = f"the tables need {of_bytes(asked.needed_bytes(host))} of memory {where} ({parts}{copies}; {most})"
    ways = [f"{way.words} ({of_bytes(way.needed_bytes)})" for way in memory_remedies(asked, host)]
    if asked.purpose == "use":
        ways = [f"a machine with {of_bytes(asked.needed_bytes(host))} free", *(f"a run with {way}" for way in ways)]
    want = "; or ".join(ways[:MOST_WAYS]) or "a machine with more memory, or fewer tables"
    raise TableMemoryError(f"{need}, and {of_bytes(free)} are free: want {want}")


def memory_remedies(asked: TableMemory, host: int) -> list[MemoryRemedy]:
    """One of each kind: what costs nothing, then the least change first."""
    free = asked.free_H[host]
    assert free is not None
    room = int(free * SPARE)
    kinds = (_fewer_rows, _narrower_rows, _compressed, _more_hosts)
    found = (max(kind(asked, host, room), key=lambda way: way.needed_bytes, default=None) for kind in kinds)
    changes = sorted((way for way in found if way is not None), key=lambda way: -way.needed_bytes)
    return [*_foreground(asked, host, room), *changes]


def _foreground(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    if asked.background:
        yield from _fitting(replace(asked, background=False), host, room, "save.background=false")


def _fewer_rows(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    """As many as fit, if no table has more; in two digits."""
    if asked.purpose == "resume":  # the rows are there
        return

    def cut(rows: int) -> TableMemory:
        return asked.with_tables(lambda t: t if t.name in asked.mapped else structs.replace(t, rows=min(t.rows, rows)))

    low, high = 0, max(table.rows for table in asked.tables)  # the first fits or is none, the second does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cut(middle).needed_bytes(host) <= room else (low, middle)
    most = _rounded_down(low)
    larger = [t.name for t in asked.tables if t.rows > most and t.name not in asked.mapped]
    if most and larger:
        words = f"at most {most:,} rows in each table" if len(larger) > 1 else f"tables.each.{larger[0]}.rows={most}"
        yield from _fitting(cut(most), host, room, words)


def _narrower_rows(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    for row_type in (RowType.FP16, RowType.INT8):
        fewer_bits = asked.with_tables(lambda table, to=row_type: _stored_as(table, to))
        yield from _fitting(fewer_bits, host, room, f"tables.all.row_type={row_type}")
        if asked.purpose != "resume":
            both = fewer_bits.with_tables(with_row_state)
            yield from _fitting(both, host, room, f"{row_type} rows with row-wise optimizer state")
    if asked.purpose == "resume":  # dims and optimizers are those of the run
        return
    yield from _fitting(asked.with_tables(with_row_state), host, room, "row-wise optimizer state")
    widest = max(table.dim for table in asked.tables)
    for dim in range((widest - 1) // DIM_STEP * DIM_STEP, 0, -DIM_STEP):
        narrow = asked.with_tables(lambda table, to=dim: structs.replace(table, dim=min(table.dim, to)))
        found = list(_fitting(narrow, host, room, f"tables.all.dim={dim}"))
        if found:
            yield from found
            return


def _compressed(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    if asked.purpose == "resume":
        return
    budget = _rounded_down(int(asked.rows_bytes(host) * room / asked.needed_bytes(host)))
    words = f"`rowwise compress` with --budget {of_bytes(budget).replace(' ', '').replace(',', '')}"
    if budget >= 1000:
        yield MemoryRemedy(
            f"{words}, run where the whole tables fit", asked.needed_bytes(host) * budget / asked.rows_bytes(host)
        )


def _more_hosts(asked: TableMemory, host: int, room: int) -> Iterator[MemoryRemedy]:
    """Ranks of the same host share its memory."""
    hosts = asked.topology.hosts
    if asked.purpose == "use" or not room:
        return
    total = sum(map(asked.needed_bytes, range(hosts)))
    count = max(ceil(total / room), hosts + 1)
    yield MemoryRemedy(f"ranks on {count:,} hosts like this one, by torchrun", total / count)


def _fitting(asked: TableMemory, host: int, room: int, words: str) -> Iterator[MemoryRemedy]:
    size = asked.needed_bytes(host)
    if size <= room:
        yield MemoryRemedy(words, size)


def _stored_as(table: Table, row_type: RowType) -> Table:
    """The table in a smaller row type, where that is smaller."""
    narrow = structs.replace(table, row_type=row_type)
    return narrow if narrow.row_bytes < table.row_bytes else table


def _rounded_down(number: int) -> int:
    unit = 10 ** max(floor(log10(number)) - 1, 0) if number else 1
    return number // unit * unit


def _held(asked: TableMemory, host: int, size_of: Callable[[Table], int]) -> int:
    """The sum over the tiles of a host; a table that was changed is cut in proportion."""
    times = _times(asked.plan, asked.topology.ranks_of(host))
    return ceil(sum(size_of(table) * times.get(table.name, 0) for table in asked.tables))


def _times(plan: Plan, ranks: range) -> dict[str, Fraction]:
    """How often some ranks hold each table: more than once for copies, less for some of its rows or columns."""
    cells: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    for tile in plan.tiles:
        cells[tile.table] += (tile.rows[1] - tile.rows[0]) * (tile.cols[1] - tile.cols[0]) * (tile.rank in ranks)
        size[tile.table] = max(size[tile.table], tile.rows[1] * tile.cols[1])
    return {name: Fraction(cells[name], size[name]) for name in cells}
