"""A plan for hundreds of ranks, carried out for one of them on a machine that could never hold it.

`rehearse` runs one step, forward, backward and update, with the code that trains: real ids are routed, looked up and
updated by the real kernels. Two things are not real. The other ranks are not there: `comm.rehearse` says what arrives
instead. And rows are pages that were never written, which read as zero and take no memory: a step costs memory for
the rows that it changes, whatever the tables have.

Known limits: what numbers come out, batches that differ between ranks (so all of them change the same rows), and time,
as nothing travels.
"""

import mmap
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.comm.call import CollectiveCall
from rowwise.comm.rehearse import rehearsal_comm
from rowwise.ops.layout import FeatureRow, TablePiece
from rowwise.ops.lookup import StagedGradients
from rowwise.plan import Plan, Tier
from rowwise.shard.embeddings import ShardedEmbeddings
from rowwise.spec import Link, Table, Topology, Wire, state_width

FLOAT_bytes, KiB = 4, 1024
# Without it Linux gives no more addresses than it has memory. Python has a name for it from 3.13 on.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)


class RehearsedRank(NamedTuple):
    """The topology and rank of a rehearsal."""

    topology: Topology
    rank: int


class TableVisits(NamedTuple):
    """The ids that a step looks up in a rank's part of a table, and the rows that it changes."""

    ids: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The calls and bytes of one step of one rank."""

    calls: tuple[CollectiveCall, ...]  # its collectives, in order: sizes to and from each rank of a group, in elements
    sent_bytes: Counter[tuple[str, str, Link]]  # by purpose, collective and link, as `Comm.sent` has them
    visited: dict[str, TableVisits]  # by table, of those that this rank has a part of
    pooled_shape: tuple[int, ...]  # what the model gets: all pooled features side by side,
    sequence_shapes: dict[str, tuple[int, ...]]  # and each sequence
    held_bytes: Counter[Tier]  # rows and optimizer state of this rank, which were not allocated
    peak_bytes: int  # the most memory that this process has had so far, for whatever it did

    def total_bytes(self, link: Link | None = None) -> int:
        """What this rank sends over a kind of link, or over all."""
        return sum(n for (*_, over), n in self.sent_bytes.items() if link in (None, over))


def rehearse(
    tables: Sequence[Table],
    plan: Plan,
    seat: RehearsedRank,
    batch: Jagged,
    *,
    wire: Wire | None = None,
    elastic: bool = False,
) -> Rehearsal:
    """One step of a rank, where each rank has this batch, and every gradient that a model gives is 1.

    Rows may live in any tier: here they live nowhere.
    """
    comm, calls = rehearsal_comm(*seat)
    module = ShardedEmbeddings(tables, plan, comm, wire=wire, elastic=elastic, device="meta")
    for arena in module.arenas:
        arena.rows = zero_pages(arena.rows.nbytes)
        arena.state = zero_pages(arena.state.nbytes).view(torch.float32)
    vectors = module(batch)
    outs = [vectors.matrix_BS, *vectors.sequences.values()]
    torch.stack([out.sum() for out in outs]).sum().backward()
    visited: dict[str, TableVisits] = {}
    for staged in module.staged:
        for name, ids, rows in _visits(staged):
            before = visited.get(name, TableVisits())
            visited[name] = TableVisits(before.ids + ids, before.rows + rows)
    module.update()
    return Rehearsal(
        calls=tuple(calls),
        sent_bytes=Counter(comm.sent.counts),
        visited=visited,
        pooled_shape=tuple(vectors.matrix_BS.shape),
        sequence_shapes={name: tuple(rows.shape) for name, rows in vectors.sequences.items()},
        held_bytes=held_bytes(tables, plan, seat.rank),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KiB,
    )


def zero_pages(size_bytes: int) -> Tensor:
    """Bytes that are zero, as many as addresses reach: only those that are written take memory, 4 KiB at a time."""
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        pages = mmap.mmap(-1, size_bytes, flags=kind)
    except OSError as error:
        why = "want /proc/sys/vm/overcommit_memory 0 or 1, and no limit on addresses (ulimit -v)"
        raise MemoryError(f"{size_bytes / 1e9:.1f} GB of addresses without memory: {error}; {why}") from None
    pages.madvise(mmap.MADV_NOHUGEPAGE)  # or a row that is written takes 2 MiB
    return torch.frombuffer(pages, dtype=torch.uint8)


def held_bytes(tables: Sequence[Table], plan: Plan, rank: int) -> Counter[Tier]:
    """Rows and optimizer state of a rank, by tier; what is cached of them is not counted twice."""
    known = {table.name: table for table in tables}
    found: Counter[Tier] = Counter()
    for tile in plan.tiles_on(rank):
        part = TablePiece.cut(known[tile.table], tile.rows, tile.cols, ()).table
        found[tile.tier] += part.rows * (part.row_bytes + FLOAT_bytes * state_width(part))
    return found


def _visits(staged: StagedGradients) -> Iterator[tuple[str, int, int]]:
    """For each piece of a table: its table, the ids that came for it, and how many of them differ."""
    call, batch = staged.call, staged.call.jagged.batch_size
    ids_T: dict[int, list[Tensor]] = {}
    for feature in FeatureRow.read(call.features_FC):
        begin, end = call.offsets[[feature.source * batch, (feature.source + 1) * batch]].tolist()
        ids_T.setdefault(feature.table, []).append(call.jagged.values_N[begin:end])
    for index, parts in ids_T.items():
        ids_N = torch.cat(parts)
        yield call.group.tables[index].name, len(ids_N), len(ids_N.unique())
