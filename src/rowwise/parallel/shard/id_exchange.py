"""`IdExchange`: asks the ranks that own buckets of managed tables for the rows of ids.

Three all-to-alls: numbers of ids, then distinct ids with their occurrences, then rows. They come before the first
lookup of a step, apart from the ids that `shard` routes: of a batch cut into virtual shards, an owner would see ids in
an order that depends on the number of ranks. Everything after it, `shard` included, sees row numbers only. A rank
without a valid batch reports it in the first message, and all ranks raise ([Note: Rank status] in
`parallel/comm/status.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, RowwiseError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import RankStatus, raise_if_any_failed
from rowwise.tables.ids.managed.lookup import Evicted, IdCounts, LocalBuckets
from rowwise.tables.ids.managed.piece import find_buckets


@final
class IdExchange:
    """The exchange of ids and rows for all managed tables of a module."""

    def __init__(
        self, comm: Comm, tables: Sequence[LocalBuckets], owner_TB: Sequence[Tensor], evicted: Evicted
    ) -> None:
        """`owner_TB`: the rank of each bucket of each table."""
        self._comm, self._tables, self._owner_TB, self._evicted = comm, tables, owner_TB, evicted

    def find(
        self, ids_T: Sequence[IdCounts] | None, error: RowwiseError | None = None, *, observe: bool
    ) -> list[Tensor]:
        """The rows of each table's ids; collective. `observe`: the ids change the map. `ids_T`: None with an error."""
        comm, world, tables = self._comm, len(self._comm.ranks), len(self._tables)
        sends = [
            _Send.of(rank_B, ids, world) for rank_B, ids in zip(self._owner_TB, ids_T or (), strict=ids_T is not None)
        ]
        # Step 1: headers, the status and the number of ids of each table.
        status = RankStatus(count=int(observe), failed=int(ids_T is None))
        sizes_WT = torch.tensor([send.sizes_W for send in sends], dtype=torch.int64).view(-1, world).T
        header_WC = torch.full((world, 1 + tables), status.pack(), dtype=torch.int64)
        header_WC[:, 1:] = sizes_WT if sends else 0
        received = comm.all_to_all(header_WC.flatten(), [1 + tables] * world, [1 + tables] * world, "counts").wait()
        headers_W = received.view(world, 1 + tables).tolist()
        statuses_W = [RankStatus.unpack(header[0]) for header in headers_W]
        raise_if_any_failed(comm, statuses_W, error, during="ids of managed tables")
        if len({status.count for status in statuses_W}) > 1:
            raise BatchError("some ranks train and others evaluate", "the same on all ranks")
        words = 2 if observe else 1  # step 2: ids, and their counts if observed; by rank, then by table
        sizes_W = [words * sum(header[1:]) for header in header_WC.tolist()]
        blocks = [x for w in range(world) for send in sends for x in send.blocks(w, counts=observe)]
        recv_sizes_W = [words * sum(header[1:]) for header in headers_W]
        words_N = comm.all_to_all(torch.cat(blocks), sizes_W, recv_sizes_W, "ids").wait()
        requests = iter(words_N.split([n for header in headers_W for n in header[1:] for _ in range(words)]))
        parts = [[[next(requests) for _ in range(words)] for _ in range(tables)] for _ in range(world)]
        rows_TW = [
            self._answer(table, [parts[w][t] for w in range(world)], observe=observe)
            for t, table in enumerate(self._tables)
        ]
        # Step 3: rows, in the order of the received ids.
        answers = torch.cat([rows_TW[t][w] for w in range(world) for t in range(tables)])
        reply_sizes_W = [sum(header[1:]) for header in header_WC.tolist()]
        rows_N = comm.all_to_all(answers, [sum(header[1:]) for header in headers_W], reply_sizes_W, "ids").wait()
        rows = iter(rows_N.split([n for w in range(world) for send in sends for n in (send.sizes_W[w],)]))
        rows_WT = [[next(rows) for _ in range(tables)] for _ in range(world)]
        return [send.restore([rows_WT[w][t] for w in range(world)]) for t, send in enumerate(sends)]

    def _answer(self, table: LocalBuckets, parts_W: Sequence[Sequence[Tensor]], *, observe: bool) -> Sequence[Tensor]:
        """The rows of each rank's requested ids."""
        ids_N = torch.cat([part[0] for part in parts_W])
        counts_N = torch.cat([part[1] for part in parts_W]) if observe else None
        rows_N = table.answer(ids_N, counts_N, self._evicted)
        return rows_N.split([len(part[0]) for part in parts_W])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Send:
    """The ids of a table in the order of the ranks that own them."""

    order_U: Tensor
    ids_W: Sequence[Tensor]
    counts_W: Sequence[Tensor]

    @classmethod
    def of(cls, rank_B: Tensor, ids: IdCounts, world: int) -> "_Send":
        rank_U = rank_B[find_buckets(ids.ids_U, len(rank_B))]
        order_U, sizes_W = rank_U.argsort(stable=True), rank_U.bincount(minlength=world).tolist()
        return cls(
            order_U=order_U, ids_W=ids.ids_U[order_U].split(sizes_W), counts_W=ids.counts_U[order_U].split(sizes_W)
        )

    @property
    def sizes_W(self) -> list[int]:
        return [len(ids) for ids in self.ids_W]

    def blocks(self, rank: int, *, counts: bool) -> list[Tensor]:
        return [self.ids_W[rank], *([self.counts_W[rank]] if counts else [])]

    def restore(self, rows_W: Sequence[Tensor]) -> Tensor:
        """The rows in the order of the ids."""
        rows_U = torch.empty_like(self.order_U)
        rows_U[self.order_U] = torch.cat(list(rows_W))
        return rows_U
