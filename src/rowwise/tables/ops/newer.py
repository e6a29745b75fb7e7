"""Newer rows of a table: lookups by a later version of a model read them in place of the rows of an earlier one.

The rows of the earlier version stay as they are, so both versions can be looked up in one block of memory. Newer rows
are in the spare rows behind a table's own, which `Embeddings.reserve` allocates.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from rowwise.tables.ops.layout import FeatureDescriptor


class RowPlaces(Protocol):
    """Translates row numbers to places in the memory of their tables."""

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """The places of the rows of a batch; raises RuntimeError for an id outside its table."""
        ...


class NewerRowsOfTable(NamedTuple):
    """Which rows of a table are newer."""

    base: int  # first byte of the table in the arena
    rows: int  # of the table, without spare rows
    ids_C: Tensor  # each id once, ascending
    places_C: Tensor  # spare row with the newer row of each id, counted from the table's first row


@final
class NewerRows:
    """Ids of tables, and the places of their newer rows."""

    def __init__(self, tables: Sequence[NewerRowsOfTable]) -> None:
        self._tables = {table.base: (table.rows, len(table.ids_C), number) for number, table in enumerate(tables)}
        self._firsts = list(accumulate((len(table.ids_C) for table in tables), initial=0))
        self._ids_C, self._places_C = (torch.cat(x) for x in ([t.ids_C for t in tables], [t.places_C for t in tables]))
        self._features: dict[bytes, Tensor] = {}  # memo of `_make_features`; a model has few orders of features

    def __len__(self) -> int:
        return len(self._ids_C)

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """The ids of a batch, with places instead where rows are newer; raises for an id outside its table."""
        key = features_FC.numpy().tobytes()
        features = self._features.get(key)
        if features is None:
            features = self._features[key] = self._make_features(key)
        if self._ids_C.device != values_N.device:
            self._ids_C, self._places_C = self._ids_C.to(values_N.device), self._places_C.to(values_N.device)
        return torch.ops.rowwise.find_newer(values_N, offsets, features, self._ids_C, self._places_C, batch)

    def _make_features(self, features: bytes) -> Tensor:
        """For each feature: its index in the batch, its table's rows, and its table's range of `ids_C`."""
        numbers = torch.frombuffer(bytearray(features), dtype=torch.int64) if features else torch.empty(0).long()
        descriptors = numbers.view(-1, len(FeatureDescriptor._fields))
        ranges: list[tuple[int, int, int, int]] = []
        for feature in FeatureDescriptor.read(descriptors):
            rows, count, number = self._tables[feature.base]
            ranges.append((feature.source, rows, self._firsts[number], self._firsts[number] + count))
        return torch.tensor(ranges, dtype=torch.int64).view(-1, 4)
