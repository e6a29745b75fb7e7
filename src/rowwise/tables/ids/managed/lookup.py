"""`LocalIds`: the rows of ids of managed tables, all of whose buckets are on this rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from rowwise.base.errors import RowwiseError
from rowwise.tables.ids.managed.piece import ManagedPiece, find_buckets
from rowwise.tables.spec import Table

Evicted = Callable[[str, Tensor], None]  # called with a table's name and the ids that lost their rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBuckets:
    """A managed table and this rank's pieces of it."""

    table: Table
    pieces: Sequence[ManagedPiece]

    def answer(self, ids_N: Tensor, counts_N: Tensor | None, evicted: Evicted) -> Tensor:
        """The rows of ids that this rank owns; with counts, the map observes the ids first."""
        if len(self.pieces) == 1:
            masks = [slice(None)]
        else:
            bucket_N = find_buckets(ids_N, self.table.buckets)
            masks = [(bucket_N >= p.buckets.start) & (bucket_N < p.buckets.stop) for p in self.pieces]
        rows_N = torch.empty_like(ids_N)
        for piece, mask in zip(self.pieces, masks, strict=True):
            own_N = ids_N[mask].contiguous()
            if counts_N is not None:
                evicted(self.table.name, piece.observe(own_N, counts_N[mask].contiguous()))
            rows_N[mask] = piece.find(own_N)
        return rows_N


@dataclass(frozen=True, slots=True, kw_only=True)
class IdCounts:
    """Distinct ids of a table, ascending, and how often each occurs."""

    ids_U: Tensor
    counts_U: Tensor


@final
class LocalIds:
    """Rows of ids without other ranks."""

    def __init__(self, tables: Sequence[LocalBuckets], evicted: Evicted) -> None:
        self._tables, self._evicted = tables, evicted

    def find(
        self, ids_T: Sequence[IdCounts] | None, error: RowwiseError | None = None, *, observe: bool
    ) -> list[Tensor]:
        """The rows of the ids of each table. `observe`: the ids change the map. With an error `ids_T` is None."""
        if error is not None:
            raise error
        assert ids_T is not None
        return [
            table.answer(ids.ids_U, ids.counts_U if observe else None, self._evicted)
            for table, ids in zip(self._tables, ids_T, strict=True)
        ]
