"""`rehearse`: runs one rank of a plan for hundreds of ranks, on a machine that could never hold the tables.

It runs one step (forward, backward, update) with the code that trains: real ids are routed, looked up and updated by
the real kernels. Two things are not real. There are no other ranks: `comm.rehearse` makes up the data they would send.
And rows are unwritten pages, which read as zero and take no memory: only rows that the step changes do.

Not covered: the values that come out, batches that differ between ranks, and time, as nothing is sent.
"""

import mmap
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from rowwise.parallel.comm.call import CollectiveCall
from rowwise.parallel.comm.rehearse import rehearsal_comm
from rowwise.parallel.plan import Plan, Tier
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.tables.batch import Jagged
from rowwise.tables.ops.layout import FeatureDescriptor, TablePiece
from rowwise.tables.ops.lookup import StagedGradients
from rowwise.tables.spec import Link, Table, Topology, Wire, stored_bytes

KiB = 1024
# Without it Linux reserves no more addresses than it has memory. Python has a name for it from 3.13 on.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)


class RehearsedRank(NamedTuple):
    """A rank, and the topology of the world that it is rehearsed in."""

    topology: Topology
    rank: int


class TableVisits(NamedTuple):
    """Ids looked up in a rank's part of a table in one step, and the distinct rows among them."""

    ids: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The collectives, lookups and memory of one step of one rank."""

    calls: tuple[CollectiveCall, ...]  # in order, with the elements sent to and received from each rank
    sent_bytes: Counter[tuple[str, str, Link]]  # by purpose, collective and link, as in `Comm.sent`
    visited: dict[str, TableVisits]  # by table, of tables with a part on this rank
    pooled_shape: tuple[int, ...]  # shape of the model's matrix of pooled features
    sequence_shapes: dict[str, tuple[int, ...]]  # shape of the rows, by sequence feature
    held_bytes: Counter[Tier]  # rows and optimizer state of this rank; not allocated
    peak_bytes: int  # peak memory of this process since its start

    def total_bytes(self, link: Link | None = None) -> int:
        """Bytes that this rank sends over one kind of link, or over all."""
        return sum(n for (*_, over), n in self.sent_bytes.items() if link in (None, over))


def rehearse(
    tables: Sequence[Table],
    plan: Plan,
    rehearsed: RehearsedRank,
    batch: Jagged,
    *,
    wire: Wire | None = None,
    elastic: bool = False,
) -> Rehearsal:
    """Run one step of a rank. All ranks have this batch, and every gradient of the outputs is 1.

    Tiles may be in any memory tier, even one that training does not support: all are looked up as on the device.
    """
    comm, calls = rehearsal_comm(*rehearsed)
    resident = [structs.replace(tile, tier="device", cache_rows=0, pinned_rows=0) for tile in plan.tiles]
    resident_plan = structs.replace(plan, tiles=tuple(resident))
    module = ShardedEmbeddings(tables, resident_plan, comm, wire=wire, elastic=elastic, device="meta")
    for arena in module.arenas:
        arena.rows = zero_pages(arena.rows.nbytes)
        arena.state = zero_pages(arena.state.nbytes).view(torch.float32)
    module.device = batch.values_N.device
    vectors = module(batch)
    outs = [vectors.matrix_BS, *vectors.sequences.values()]
    torch.stack([out.sum() for out in outs]).sum().backward()
    visited: dict[str, TableVisits] = {}
    for staged in module.staged:
        for name, ids, rows in _count_visits(staged):
            before = visited.get(name, TableVisits())
            visited[name] = TableVisits(before.ids + ids, before.rows + rows)
    module.update()
    return Rehearsal(
        calls=tuple(calls),
        sent_bytes=Counter(comm.sent.counts),
        visited=visited,
        pooled_shape=tuple(vectors.matrix_BS.shape),
        sequence_shapes={name: tuple(rows.shape) for name, rows in vectors.sequences.items()},
        held_bytes=held_bytes(tables, plan, rehearsed.rank),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KiB,
    )


def zero_pages(size_bytes: int) -> Tensor:
    """Zero bytes on unreserved pages: only pages that are written take memory, 4 KiB each."""
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        pages = mmap.mmap(-1, size_bytes, flags=kind)
    except OSError as error:
        hint = "it takes /proc/sys/vm/overcommit_memory 0 or 1, and no limit on addresses (ulimit -v)"
        raise MemoryError(f"{size_bytes / 1e9:.1f} GB of addresses without memory: {error}; {hint}") from None
    pages.madvise(mmap.MADV_NOHUGEPAGE)  # huge pages would take 2 MiB per written row
    return torch.frombuffer(pages, dtype=torch.uint8)


def held_bytes(tables: Sequence[Table], plan: Plan, rank: int) -> Counter[Tier]:
    """Bytes of rows and optimizer state of a rank, by memory tier; cached rows are counted in their tier only."""
    known = {table.name: table for table in tables}
    sizes: Counter[Tier] = Counter()
    for tile in plan.tiles_on(rank):
        part = TablePiece.cut(known[tile.table], tile.rows, tile.cols, ()).table
        sizes[tile.tier] += stored_bytes(part)
    return sizes


def _count_visits(staged: StagedGradients) -> Iterator[tuple[str, int, int]]:
    """(table, ids, distinct ids) of each piece that was looked up."""
    call, batch = staged.call, staged.call.jagged.batch_size
    ids_T: dict[int, list[Tensor]] = {}
    for feature in FeatureDescriptor.read(call.features_FC):
        begin, end = call.offsets[[feature.source * batch, (feature.source + 1) * batch]].tolist()
        ids_T.setdefault(feature.table, []).append(call.jagged.values_N[begin:end])
    for index, parts in ids_T.items():
        ids_N = torch.cat(parts)
        yield call.group.tables[index].name, len(ids_N), len(ids_N.unique())
