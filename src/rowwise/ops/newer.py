"""Newer rows of a table: lookups by a later version of a model read them in place of the rows of an earlier one.

The rows of the earlier version stay as they are, so both versions can be looked up in one block of memory. Newer rows
are behind the table's own ones, in room that `Embeddings.reserve` has left.

On a GPU the host waits for nothing: ids outside their table are found before (`to_device`), or have place -1.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from rowwise.ops.layout import FeatureDescriptor


class RowPlaces(Protocol):
    """Where rows are in the memory of their tables."""

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """The places of the rows of a batch; raises RuntimeError for an id outside its table."""
        ...


class NewerRowsOfTable(NamedTuple):
    """Which rows of a table are newer."""

    base: int  # first byte of the table in the arena
    rows: int  # of the table, without the room
    ids_C: Tensor  # each id once, ascending
    places_C: Tensor  # the row behind the table's own ones that each id has, counted from the table's first row


@final
class NewerRows:
    """Ids of tables, and the places of their newer rows."""

    def __init__(self, tables: Sequence[NewerRowsOfTable]) -> None:
        self._tables = {table.base: (table.rows, len(table.ids_C), number) for number, table in enumerate(tables)}
        self._firsts = list(accumulate((len(table.ids_C) for table in tables), initial=0))
        self._ids_C, self._places_C = (torch.cat(x) for x in ([t.ids_C for t in tables], [t.places_C for t in tables]))
        begins = accumulate((table.rows for table in tables), initial=0)
        self._begins = dict(zip((table.base for table in tables), begins, strict=False))  # keys number all tables' rows
        self._features: dict[bytes, Tensor] = {}  # by those of batches, of which a model has few
        self._on_device: dict[tuple[torch.device, bytes, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._ids_C)

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """The ids of a batch, where rows are newer their places; raises for an id outside its table."""
        key = features_FC.numpy().tobytes()
        if values_N.device.type != "cpu":
            return self.find_on_device(features_FC, values_N, offsets, batch)
        features = self._features.get(key)
        if features is None:
            features = self._features[key] = self._make_features(key)
        if self._ids_C.device != values_N.device:
            self._ids_C, self._places_C = self._ids_C.to(values_N.device), self._places_C.to(values_N.device)
        return torch.ops.rowwise.find_newer(values_N, offsets, features, self._ids_C, self._places_C, batch)

    def find_on_device(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """The same in a few calls of torch; an id outside its table has place -1."""
        places_N = values_N.long()
        if not batch or not len(values_N):
            return places_N
        bounds_F1 = offsets[::batch].contiguous()
        tables_S2, keys_C, places_C = self._tensors_on(values_N.device, features_FC, len(bounds_F1))
        source_N = torch.searchsorted(bounds_F1, torch.arange(len(values_N), device=values_N.device), right=True) - 1
        rows_N, begin_N = tables_S2[source_N].unbind(1)
        outside_N = (rows_N > 0) & ((places_N < 0) | (places_N >= rows_N))
        if len(keys_C):
            key_N = torch.where((rows_N > 0) & ~outside_N, begin_N + places_N, -1)
            at_N = torch.searchsorted(keys_C, key_N).clamp(max=len(keys_C) - 1)
            places_N = torch.where(keys_C[at_N] == key_N, places_C[at_N], places_N)
        return torch.where(outside_N, -1, places_N)

    def _tensors_on(self, device: torch.device, features_FC: Tensor, bounds: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and first key of the table of each feature of a batch (0 rows: none is here), all keys, their places."""
        name = device, features_FC.numpy().tobytes(), bounds
        if name not in self._on_device:
            tables_S2 = torch.zeros(bounds, 2, dtype=torch.int64)
            for feature in FeatureDescriptor.read(features_FC):
                rows = self._tables[feature.base][0]
                tables_S2[feature.source] = torch.tensor([rows, self._begins[feature.base]])
            known = next((found[1:] for (one, _, _), found in self._on_device.items() if one == device), None)
            if known is None:
                counts = [count for _, count, _ in self._tables.values()]
                begin_C = torch.tensor(list(self._begins.values())).repeat_interleave(torch.tensor(counts))
                known = ((self._ids_C + begin_C).to(device), self._places_C.to(device))
            self._on_device[name] = (tables_S2.to(device), *known)
        return self._on_device[name]

    def _make_features(self, features: bytes) -> Tensor:
        """For each feature: its place in a batch, rows of its table, and where the ids of its table are."""
        numbers = torch.frombuffer(bytearray(features), dtype=torch.int64) if features else torch.empty(0).long()
        descriptors = numbers.view(-1, len(FeatureDescriptor._fields))
        found: list[tuple[int, int, int, int]] = []
        for feature in FeatureDescriptor.read(descriptors):
            rows, count, number = self._tables[feature.base]
            found.append((feature.source, rows, self._firsts[number], self._firsts[number] + count))
        return torch.tensor(found, dtype=torch.int64).view(-1, 4)
