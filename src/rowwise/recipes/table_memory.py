"""Checks that the tables of a run fit into the memory of its hosts, and suggests remedies if they do not.

Runs before tables are allocated. Counts rows, optimizer state, the copy that background checkpoints make, and caches of
tables on disk, but not batches or the dense model. Hosts whose free memory is unknown are not checked.
"""

import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, log10
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from msgspec import structs

from rowwise.base.errors import TableMemoryError
from rowwise.base.quantity import format_bytes
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import all_gather_uneven
from rowwise.parallel.plan import Plan, Tile, tiles_by_table
from rowwise.planning.perf.host_memory import free_bytes, is_in_memory
from rowwise.planning.planner.fixes import with_row_state
from rowwise.recipes.id_maps import stored_tables_of
from rowwise.recipes.placement import piece_of, table_bytes
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.retrieval import decoded_bytes
from rowwise.tables.spec import RowType, Table, Topology, state_bytes
from rowwise.tables.store.sizes import cache_bytes, disk_bytes

Purpose = Literal["train", "resume", "use"]  # decides which changes are still possible
MAX_REMEDIES = 3  # in the message
USABLE = 0.9  # fraction of the free memory for suggested tables; batches and the dense model need the rest
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
    limited: bool = False  # `free_H` is the recipe's budget, not the free memory
    disk_free_H: tuple[int, ...] = ()  # free bytes on the file system for tables on disk
    pictures_bytes: int = 0  # decoded pictures of items, per rank; not under a budget, which is for tables

    def rows_bytes(self, host: int) -> int:
        return self._in_memory(host, lambda table: table.rows * table.row_bytes)

    def state_bytes(self, host: int) -> int:
        return self._in_memory(host, lambda table: table.rows * state_bytes(table))

    def cache_bytes(self, host: int) -> int:
        return sum(cache_bytes(piece, tile.cache_rows) for piece, tile in self._on_disk(host))

    def disk_bytes(self, host: int) -> int:
        return sum(disk_bytes(piece) for piece, _ in self._on_disk(host))

    def _in_memory(self, host: int, size_of: Callable[[Table], int]) -> int:
        """Sum of sizes over the tiles of a host; a changed table is divided in the same proportions."""
        ranks, tiles, total = self.topology.ranks_of(host), tiles_by_table(self.plan), Fraction()
        for table in self.tables:
            resident = [tile for tile in tiles[table.name] if tile.tier != "disk"]
            cells = [(t.rows[1] - t.rows[0]) * (t.cols[1] - t.cols[0]) for t in resident if t.rank in ranks]
            if cells:
                total += Fraction(size_of(table) * sum(cells), max(t.rows[1] * t.cols[1] for t in resident))
        return ceil(total)

    def _on_disk(self, host: int) -> Iterator[tuple[Table, Tile]]:
        tables, ranks = {table.name: table for table in self.tables}, self.topology.ranks_of(host)
        tiles = (tile for tile in self.plan.tiles if tile.tier == "disk" and tile.rank in ranks)
        return ((piece_of(tables[tile.table], tile), tile) for tile in tiles)

    def needed_bytes(self, host: int) -> int:
        tables = (self.rows_bytes(host) + self.state_bytes(host)) * self.copies + self.cache_bytes(host)
        return tables + self.pictures_bytes * self.topology.devices

    @property
    def copies(self) -> int:
        return 2 if self.background else 1

    @property
    def is_short(self) -> bool:
        return any(free is not None and self.needed_bytes(host) > free for host, free in enumerate(self.free_H))

    @property
    def rank_budget_bytes(self) -> int:
        """Memory budget of a rank for tables, if the plan may put some on disk."""
        min_free = min(free for free in self.free_H if free is not None)
        budget = int(min_free * (1.0 if self.limited else USABLE)) - self.pictures_bytes * self.topology.devices
        return max(0, budget) // self.copies // self.topology.devices

    def with_tables(self, change: Callable[[Table], Table]) -> "TableMemory":
        return replace(self, tables=tuple(map(change, self.tables)))


class MemoryRemedy(NamedTuple):
    """A change that makes the tables fit, and the memory they then need."""

    change: str  # in words
    needed_bytes: float  # on the host that lacks memory


def measure_memory(
    resolved: ResolvedRecipe, comm: Comm, purpose: Purpose = "train", disk: Path = Path()
) -> TableMemory:
    """The memory of all hosts, with all tables on the first rank; a collective."""
    free, tables = free_bytes(), resolved.stored_tables
    local = torch.tensor([-1 if free is None else free, _free_of_disk(disk)])
    free_W2: list[list[int]] = [sizes.tolist() for sizes in all_gather_uneven(comm, local, "memory")]
    free_HW2 = [[free_W2[rank] for rank in comm.topology.ranks_of(host)] for host in range(comm.topology.hosts)]
    memory = TableMemory(
        tables=tuple(tables),
        plan=single_rank_plan(tables, comm.topology.world),
        topology=comm.topology,
        free_H=tuple(min((size for size, _ in sizes if size >= 0), default=None) for sizes in free_HW2),
        background=resolved.recipe.save.background and purpose != "use",
        purpose=purpose,
        mapped=frozenset(s.name for t in resolved.trained_tables if t.id_map is not None for s in stored_tables_of(t)),
        disk_free_H=tuple(min(size for _, size in sizes) for sizes in free_HW2),
        pictures_bytes=decoded_bytes(resolved.recipe.model, tables),
    )
    limit = (
        resolved.recipe.memory_bytes if resolved.recipe.train.device == "cpu" else None
    )  # otherwise the budget of a GPU
    if limit is None or any(free is not None and free < limit for free in memory.free_H):
        return memory
    return replace(memory, free_H=(limit,) * comm.topology.hosts, limited=True, pictures_bytes=0)


def find_memory_notes(memory: TableMemory, budget_bytes: int | None, disk: Path | None) -> tuple[str, ...]:
    """Warnings about a budget above the free memory, and about tables on disk on a tmpfs.

    Args:
        memory: as measured.
        budget_bytes: the recipe's `memory`.
        disk: the folder of tables on disk, if any.
    """
    notes: list[str] = []
    min_free = min((size for size in memory.free_H if size is not None), default=None)
    if budget_bytes is not None and min_free is not None and not memory.limited:
        free = format_bytes(min_free)
        notes.append(f"memory={format_bytes(budget_bytes)}: only {free} are free, which limits the tables")
    if disk is not None and is_in_memory(disk):
        notes.append(f"{disk} is a tmpfs, so its tables are in memory: expected --set disk=FOLDER on a disk")
    return tuple(notes)


def _free_of_disk(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(existing).free


def single_rank_plan(tables: Sequence[Table], world: int = 1) -> Plan:
    """A plan of whole tables, all on rank 0."""
    return Plan(world=world, tiles=tuple(Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, t.dim)) for t in tables))


def raise_if_short(memory: TableMemory, disk: str = "", disk_remedy: str = "") -> None:
    """Raise if a host lacks memory, with its needed and free memory, and the smallest changes that make the tables fit.

    `disk`: why rows on disk do not help; `disk_remedy`: a change with which they would.
    """
    short_H = [0 if free is None else memory.needed_bytes(host) - free for host, free in enumerate(memory.free_H)]
    host = max(range(len(short_H)), key=short_H.__getitem__)
    free = memory.free_H[host]
    if free is None or short_H[host] <= 0:
        return
    largest = max(memory.tables, key=table_bytes)
    where = "here" if memory.topology.hosts == 1 else f"on host {host}"
    copies = ", twice as save.background copies them" if memory.background else ""
    rows, state = format_bytes(memory.rows_bytes(host)), format_bytes(memory.state_bytes(host))
    caches = memory.cache_bytes(host)
    cached = f", and {format_bytes(caches)} for caches and indices of tables on disk" if caches else ""
    pictures = memory.pictures_bytes * memory.topology.devices
    cached += f", and {format_bytes(pictures)} for decoded pictures" if pictures else ""
    sizes = f"{rows} of rows and {state} of optimizer state{copies}{cached}"
    size_of_largest = f"the largest is {largest.name!r} with {largest.rows:,} x {largest.dim}"
    needed = format_bytes(memory.needed_bytes(host))
    problem = f"the tables need {needed} of memory {where} ({sizes}; {size_of_largest})"
    remedies = [f"{remedy.change} ({format_bytes(remedy.needed_bytes)})" for remedy in find_remedies(memory, host)]
    if memory.purpose == "use":
        remedies = [f"a machine with {needed} free", *(f"a run with {remedy}" for remedy in remedies)]
    smaller_caches = "smaller `cache_rows` in the plan" if caches else ""  # only of a plan file: searched plans fit
    remedies = [*filter(None, (disk_remedy, smaller_caches)), *remedies]
    expected = "; or ".join(remedies[:MAX_REMEDIES]) or "a machine with more memory, or fewer tables"
    limit = f"memory is {format_bytes(free)}" if memory.limited else f"{format_bytes(free)} are free"
    raise TableMemoryError(f"{problem}, and {limit}{disk}", expected)


def find_remedies(memory: TableMemory, host: int) -> list[MemoryRemedy]:
    """The smallest change of each kind: save.background=false first, the others by decreasing memory."""
    free = memory.free_H[host]
    assert free is not None
    budget = int(free * USABLE)

    def smallest(kind: Callable[[TableMemory, int, int], Iterator[MemoryRemedy]]) -> list[MemoryRemedy]:
        fitting = [remedy for remedy in kind(memory, host, budget) if remedy.needed_bytes <= budget]
        return sorted(fitting, key=_least_change)[:1]

    others = [r for kind in (_fewer_rows, _narrower_rows, _compressed_bytes, _more_hosts) for r in smallest(kind)]
    return [*smallest(_without_background), *sorted(others, key=_least_change)]


def _least_change(remedy: MemoryRemedy) -> float:
    return -remedy.needed_bytes


def _without_background(memory: TableMemory, host: int, _budget: int) -> Iterator[MemoryRemedy]:
    if memory.background:
        yield MemoryRemedy("save.background=false", replace(memory, background=False).needed_bytes(host))


def _fewer_rows(memory: TableMemory, host: int, budget: int) -> Iterator[MemoryRemedy]:
    """A limit on rows for all tables, rounded down to two digits."""
    if memory.purpose == "resume":  # a checkpoint fixes the rows
        return

    def size(rows: int) -> int:
        mapped = memory.mapped
        return memory.with_tables(lambda t: t if t.name in mapped else _limit_rows(t, rows)).needed_bytes(host)

    max_rows = _round_down(bisect_right(range(1, max(table.rows for table in memory.tables)), budget, key=size))
    larger = [t.name for t in memory.tables if t.rows > max_rows and t.name not in memory.mapped]
    if max_rows and larger:
        change = (
            f"at most {max_rows:,} rows in each table"
            if len(larger) > 1
            else f"tables.each.{larger[0]}.rows={max_rows}"
        )
        yield MemoryRemedy(change, size(max_rows))


def _limit_rows(table: Table, rows: int) -> Table:
    return structs.replace(table, rows=min(table.rows, rows if table.managed is None else max(2, rows)))


def _narrower_rows(memory: TableMemory, host: int, _budget: int) -> Iterator[MemoryRemedy]:
    fixed = memory.purpose == "resume"  # a checkpoint fixes dims and optimizers
    for row_type in (RowType.FP16, RowType.INT8):
        fewer_bits = memory.with_tables(lambda table, to=row_type: _narrow_row_type(table, to))
        yield MemoryRemedy(f"tables.all.row_type={row_type}", fewer_bits.needed_bytes(host))
        if not fixed:
            both = fewer_bits.with_tables(with_row_state)
            yield MemoryRemedy(f"{row_type} rows with row-wise optimizer state", both.needed_bytes(host))
    if fixed:
        return
    yield MemoryRemedy("row-wise optimizer state", memory.with_tables(with_row_state).needed_bytes(host))
    widest = max(table.dim for table in memory.tables)
    for dim in range((widest - 1) // DIM_STEP * DIM_STEP, 0, -DIM_STEP):
        narrow = memory.with_tables(lambda table, to=dim: structs.replace(table, dim=min(table.dim, to)))
        yield MemoryRemedy(f"tables.all.dim={dim}", narrow.needed_bytes(host))


def _compressed_bytes(memory: TableMemory, host: int, budget: int) -> Iterator[MemoryRemedy]:
    if memory.purpose == "resume" or any(table.managed for table in memory.tables):
        return
    rows_budget = _round_down(int(memory.rows_bytes(host) * budget / memory.needed_bytes(host)))
    option = f"--budget {format_bytes(rows_budget).replace(' ', '').replace(',', '')}"
    change = f"`rowwise compress` with {option}, run where the whole tables fit"
    if rows_budget >= 1000:
        yield MemoryRemedy(change, memory.needed_bytes(host) * rows_budget / memory.rows_bytes(host))


def _more_hosts(memory: TableMemory, _host: int, budget: int) -> Iterator[MemoryRemedy]:
    """More hosts, not more ranks: ranks of one host share its memory."""
    hosts = memory.topology.hosts
    if memory.purpose == "use" or not budget:
        return
    total = sum(map(memory.needed_bytes, range(hosts)))
    count = max(ceil(total / budget), hosts + 1)
    yield MemoryRemedy(f"ranks on {count:,} hosts like this one, by torchrun", total / count)


def _narrow_row_type(table: Table, row_type: RowType) -> Table:
    """The table with the row type, if its rows become smaller."""
    narrow = structs.replace(table, row_type=row_type)
    return narrow if narrow.row_bytes < table.row_bytes else table


def _round_down(number: int) -> int:
    """Round down to two significant digits."""
    unit = 10 ** max(floor(log10(number)) - 1, 0) if number else 1
    return number // unit * unit
