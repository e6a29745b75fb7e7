"""`ManagedPiece`: the map from ids to rows of whole buckets of a managed table, those that an arena has.

[Note: Managed tables]
An id belongs to a bucket, by the high bits of its hash, so a piece of whole buckets needs no other piece. The
state of the map is a few numbers per row, kept beside the optimizer state: `id`, `used` (the step of the last use),
`count`; and for admission by occurrences `candidate` and `seen`. Everything else (the hash index, the order of
eviction) is rebuilt from it. The clock is `step` of the optimizer state, the number of updates.

The map changes once a step, by the ids of all samples of the step and how often each occurs: first all ids that have a
row are marked as used, then new ids come in, bucket by bucket, the most frequent first and equally frequent ones by
hash. So it depends neither on the order of samples nor on how they are distributed over batches and ranks. A row that
is used in the step is never evicted in it, so staged gradients never reach the row of another id.

A candidate for admission waits in the slot of its bucket that its hash selects. A colliding id subtracts its
occurrences from the candidate's, and replaces the candidate when none are left.
"""

from dataclasses import dataclass
from typing import NoReturn, final

import numpy as np
import torch
from torch import Tensor

from rowwise.base.errors import StateError, TableMemoryError
from rowwise.tables.ids.managed import native
from rowwise.tables.ids.managed.native import NativeManaged, NativeRowState, library
from rowwise.tables.managed import ID
from rowwise.tables.ops.arena import Arena

WORD_max = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedCounters:
    """Counts of a managed table since the process began; `in_use` is the current number."""

    rows: int = 0  # rows that ids can get
    in_use: int = 0
    ids: int = 0  # occurrences in training
    admitted: int = 0  # ids that got a row
    evicted: int = 0  # ids that lost their row to another id
    rejected: int = 0  # ids that were not admitted, counted once a step
    overflowed: int = 0  # ids whose bucket was full of rows of the same step
    expired: int = 0  # ids that lost their row by `ttl_steps`

    def __add__(self, other: "ManagedCounters") -> "ManagedCounters":
        return ManagedCounters(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@final
class ManagedPiece:
    """The ids of one piece of an arena; see [Note: Managed tables]."""

    def __init__(self, arena: Arena, index: int) -> None:
        self._arena, self._index = arena, index
        piece = arena.pieces[index]
        managed = piece.full_table.managed
        assert managed is not None
        self.table, self._policy = piece.full_table, managed
        multiple = self.table.row_multiple
        self.first_row, self.rows = piece.first_row, piece.table.rows
        self.buckets = range(self.first_row // multiple, (self.first_row + self.rows) // multiple)
        self._map: int | None = None
        self._version = -1
        self._ids = 0
        self._closed = dict.fromkeys(native.COUNTERS, 0)  # counters of maps before this one

    def __del__(self) -> None:
        self._close()

    def __reduce__(self) -> NoReturn:
        raise StateError(f"the map of table {self.table.name!r} cannot be copied or pickled", hint="copy its module")

    def find(self, ids_N: Tensor) -> Tensor:
        """The rows of ids of these buckets, numbered as in the full table; for unknown ids the first of the bucket."""
        rows_N = torch.empty_like(ids_N)
        library.managed_find(self._open(), ids_N, len(ids_N), rows_N)
        return rows_N + self.first_row

    def observe(self, ids_N: Tensor, counts_N: Tensor) -> Tensor:
        """Change the map by the ids of a step and their occurrences; returns the ids that lost their rows."""
        handle, step = self._open(), int(self._arena.steps_T[self._index])
        if library.managed_observe(handle, ids_N, counts_N, len(ids_N), step) != native.OK:
            raise TableMemoryError(f"table {self.table.name!r}: no memory for the new ids of a step", "smaller batches")
        self._ids += int(counts_N.sum())
        self._arena.reset_rows(self._index, self._list(native.RESET))
        self._arena.mark_rows(self._index, self._list(native.CHANGED))
        return self._list(native.EVICTED)

    @property
    def counters(self) -> ManagedCounters:
        self._open()
        counts = {name: n + self._closed[name] for name, n in self._counts().items()}
        return ManagedCounters(rows=self.rows - len(self.buckets), ids=self._ids, **counts)

    def _counts(self) -> dict[str, int]:
        numbers = np.zeros(len(native.COUNTERS), np.int64)
        library.managed_counters(self._map, numbers)
        return dict(zip(native.COUNTERS, numbers.tolist(), strict=True))

    def _list(self, which: int) -> Tensor:
        numbers_U = torch.empty(library.managed_list(self._map, which, None), dtype=torch.int64)
        library.managed_list(self._map, which, numbers_U)
        return numbers_U

    def _open(self) -> int:
        """The native map; rebuilt after code other than the policy has written the ids, such as a checkpoint."""
        if self._map is not None and self._version == self._arena.row_ids_version:
            return self._map
        self._close()
        self._version = self._arena.row_ids_version
        state = self._arena.row_ids[self._index]
        policy, multiple = self._policy, self.table.row_multiple
        settings = NativeManaged(
            rows=self.rows,
            bucket_rows=multiple,
            bucket_bits=self.table.buckets.bit_length() - 1,
            first_bucket=self.buckets.start,
            least_used=policy.evict == "lfu",
            admit=policy.admit,
            threshold=min(WORD_max, int(policy.probability * (1 << 64))),
            seed=policy.seed,
            ttl=policy.ttl_steps or 0,
        )
        self._check_buckets(state[ID])
        self._map = library.managed_open(settings, NativeRowState(**state))
        if self._map is None:
            raise TableMemoryError(f"table {self.table.name!r}: no memory for the index of its ids", "fewer rows")
        return self._map

    def _check_buckets(self, id_R: Tensor) -> None:
        """Raise for ids of another bucket than their row's, which no lookup would find."""
        rows_U = (id_R != -1).nonzero().flatten()
        bucket_U = find_buckets(id_R[rows_U], self.table.buckets)
        multiple = self.table.row_multiple
        if bool((bucket_U != (rows_U + self.first_row) // multiple).any()) or bool((rows_U % multiple == 0).any()):
            raise StateError(
                f"table {self.table.name!r}: ids are in rows of other buckets", "a checkpoint of this table"
            )
        if len(id_R[rows_U].unique()) != len(rows_U):
            raise StateError(f"table {self.table.name!r}: two rows have the same id", "a checkpoint of this table")

    def _close(self) -> None:
        if getattr(self, "_map", None) is None:
            return
        for name, number in self._counts().items():
            self._closed[name] += number if name != "in_use" else 0
        library.managed_close(self._map)
        self._map = None


def find_buckets(ids_N: Tensor, buckets: int) -> Tensor:
    """The bucket of each id."""
    ids_N = ids_N.contiguous()
    buckets_N = torch.empty_like(ids_N)
    library.managed_buckets(ids_N, len(ids_N), buckets.bit_length() - 1, buckets_N)
    return buckets_N
