"""Newer rows of a table: lookups by a later version of a model read them in place of the rows of an earlier one.

The rows of the earlier version stay as they are, so both versions can be looked up in one block of memory. Newer rows
are behind the table's own ones, in room that `Tiles.reserve` has left.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from rowwise.ops.layout import FeatureDescriptor

NO_ID = -(1 << 63)  # added to an id, it gives a negative number


class NewerRowsOfTable(NamedTuple):
    """Which rows of a table are newer."""

    base: int  # first byte of the table in the arena
    rows: int  # of the table, without the room
    ids_C: Tensor  # each id once, in any order
    places_C: Tensor  # the row behind the table's own ones that each id has, counted from the table's first row


@final
class NewerRows:
    """Ids of tables, and the places of their newer rows."""

    def __init__(self, tables: Sequence[NewerRowsOfTable]) -> None:
        rows_T = torch.tensor([0, *(table.rows for table in tables)], dtype=torch.int64)
        self._firsts = rows_T.cumsum(0)[:-1].tolist()  # an id plus that of its table is its key
        self._tables = {table.base: number for number, table in enumerate(tables)}
        self._rows = [table.rows for table in tables]
        keys_C = torch.cat([table.ids_C.long() + first for table, first in zip(tables, self._firsts, strict=True)])
        self._keys_C, order_C = keys_C.sort()
        self._places_C = torch.cat([table.places_C for table in tables])[order_C]
        self._by_source = functools.lru_cache(maxsize=64)(self._make_by_source)

    def __len__(self) -> int:
        return len(self._keys_C)

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """The ids of a batch, where rows are newer their places; raises for an id outside its table."""
        if not len(self) or not len(values_N):
            return values_N
        counts_S = offsets[::batch].diff()
        by_source = self._by_source(features_FC.numpy().tobytes(), len(counts_S))
        first_N, least_N, rows_N = by_source.repeat_interleave(counts_S, 1, output_size=len(values_N))
        if bool(((values_N < least_N) | (values_N >= rows_N)).any()):
            raise RuntimeError("rowwise: an id is outside its table")
        keys_N = values_N + first_N
        at_N = torch.searchsorted(self._keys_C, keys_N).clamp_(max=len(self) - 1)
        return torch.where(self._keys_C[at_N] == keys_N, self._places_C[at_N], values_N.long())

    def _make_by_source(self, features: bytes, sources: int) -> Tensor:
        """For each feature of a batch: what makes an id a key, and the limits of ids; no table looks up some."""
        by_source = torch.tensor([[NO_ID], [NO_ID], [-(NO_ID + 1)]]).repeat(1, sources)
        descriptors = torch.frombuffer(bytearray(features), dtype=torch.int64).view(-1, len(FeatureDescriptor._fields))
        for feature in FeatureDescriptor.read(descriptors):
            number = self._tables[feature.base]
            by_source[:, feature.source] = torch.tensor([self._firsts[number], 0, self._rows[number]])
        return by_source
