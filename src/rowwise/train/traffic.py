"""Counts the ids that batches look up in each table: their number, distinct ids, and skew.

The recorder adds one batch per line, and at most `MAX_IDS` ids per feature count, so the cost is negligible; rarer ids
are missed. Each rank counts its part of a batch, and the sums are added. An id on two ranks counts as two distinct ids
in `rows`, but as one in `repeats`, which planners use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, final

import msgspec
import torch
from torch import Tensor

from rowwise.base.errors import StateError
from rowwise.parallel.shard.embeddings import AnyEmbeddings
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import IdTables
from rowwise.tables.spec import Table, Value, state_bytes
from rowwise.train.repeats import IdSample
from rowwise.train.run_folder import Cell

MAX_IDS = 1 << 13  # of a feature in a batch
MAX_COUNTED = 1 << 16  # of a feature in a batch, for `repeats`
IDS, COUNTS = "traffic/ids", "traffic/counts"  # names of tensors that concatenate all tables
IdMaps = Mapping[AnyEmbeddings, IdTables]
NO_ID_MAPS: IdMaps = {}
NUMBERS = ("samples", "ids", "looked_at", "different", "in_top")  # counters of a table
TOP = 100  # `in_top` counts the ids among the most common hundredth of distinct ids


@dataclass(slots=True)
class _TableSums:
    samples: int = 0
    ids: int = 0
    looked_at: int = 0
    different: int = 0
    in_top: int = 0
    repeats: IdSample = field(default_factory=IdSample)


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class SavedTraffic(Value, frozen=True):
    """The traffic of a table in a checkpoint; older versions have no ids of `repeats`."""

    samples: Count
    ids: Count
    looked_at: Count
    different: Count
    in_top: Count
    counted: Count = 0
    level: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    kept: Count = 0


@final
@dataclass(slots=True)
class TableTraffic:
    """Sums over the counted batches, by table."""

    _sums: dict[str, _TableSums] = field(default_factory=dict)

    def add(self, tables: Sequence[AnyEmbeddings], batch: Batch, id_maps: IdMaps = NO_ID_MAPS) -> None:
        """Count a batch. `id_maps`: for tables behind an id map, the module that maps their ids."""
        for module in tables:
            sparse = (id_maps[module].map_batch(batch.sparse) if module in id_maps else batch.sparse).expanded()
            for table in module.tables:
                sums = self._sums.setdefault(table.name, _TableSums())
                sums.samples += sparse.batch_size
                for ids_N in map(sparse.ids_of, table.feature_names):
                    sums.ids += len(ids_N)
                    counts = ids_N[:MAX_IDS].unique(return_counts=True)[1].sort(descending=True).values
                    sums.looked_at += min(len(ids_N), MAX_IDS)
                    sums.different += len(counts)
                    sums.in_top += int(counts[: -(-len(counts) // TOP)].sum())
                    sums.repeats.add(rows_of_ids(ids_N[:MAX_COUNTED], table))

    def rows(self, tables: Sequence[AnyEmbeddings]) -> list[dict[str, Cell]]:
        """The lines of tables.csv."""
        return [self._row(table) for module in tables for table in module.tables]

    def pooling(self, name: str) -> float | None:
        """Mean ids per sample, over all features of a table; None before the first batch."""
        sums = self._sums.get(name, _TableSums())
        return sums.ids / sums.samples if sums.samples else None

    def repeats(self, name: str) -> IdSample:
        """A sample of the table's ids, with their counts."""
        return self._sums.get(name, _TableSums()).repeats

    def state(self) -> dict[str, dict[str, int]]:
        """The numbers, for a checkpoint."""
        state: dict[str, dict[str, int]] = {}
        for name, sums in self._sums.items():
            ids = sums.repeats
            state[name] = {key: getattr(sums, key) for key in NUMBERS}
            state[name] |= {"counted": ids.looked_at, "level": ids.level, "kept": len(ids.ids_D)}
        return state

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint: ids and counts of all tables, in the order of `state`."""
        samples = [IdSample(), *(sums.repeats for sums in self._sums.values())]
        return {IDS: torch.cat([ids.ids_D for ids in samples]), COUNTS: torch.cat([ids.counts_D for ids in samples])}

    def restore(self, state: Mapping[str, Mapping[str, int]], tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state` and `tensors`; a checkpoint of an older version has no tensors."""
        self._sums = {}
        for name, sums in state.items():
            numbers = sums["samples"], sums["ids"], sums["looked_at"], sums["different"], sums["in_top"]
            self._sums[name] = _TableSums(*numbers)
        if IDS not in tensors or COUNTS not in tensors:
            return
        sizes = [sums["kept"] for sums in state.values()]
        if any(x.dtype != torch.int64 or x.shape != (sum(sizes),) for x in (tensors[IDS], tensors[COUNTS])):
            raise StateError("traffic/ids and traffic/counts", f"{sum(sizes)} int64 numbers each, as their state says")
        parts = zip(state.items(), tensors[IDS].split(sizes), tensors[COUNTS].split(sizes), strict=True)
        for (name, sums), ids_D, counts_D in parts:
            self._sums[name].repeats = IdSample(sums["counted"], sums["level"], ids_D, counts_D)

    def merge(self, state: Mapping[str, Mapping[str, int]], tensors: Mapping[str, Tensor]) -> None:
        """Add the counts of another rank, as its `state` and `tensors` returned them."""
        other = TableTraffic()
        other.restore(state, tensors)
        for name, remote in other._sums.items():
            local = self._sums.setdefault(name, _TableSums())
            for key in NUMBERS:
                setattr(local, key, getattr(local, key) + getattr(remote, key))
            local.repeats.merge(remote.repeats)

    def _row(self, table: Table) -> dict[str, Cell]:
        sums = self._sums.get(table.name, _TableSums())
        ids_per_sample = self.pooling(table.name) or 0.0
        return {
            "table": table.name,
            "rows": table.rows,
            "dim": table.dim,
            "row_type": str(table.row_type),
            "optimizer": table.optimizer.__struct_config__.tag,
            "features": " ".join(table.feature_names),
            "bytes": table.rows * table.row_bytes,
            "state_bytes": state_bytes(table) * table.rows + 8,  # 8: the number of updates
            "ids_per_sample": ids_per_sample,
            "unique_share": sums.different / max(sums.looked_at, 1),
            "top_share": sums.in_top / max(sums.looked_at, 1),
            "traffic_bytes": ids_per_sample * table.row_bytes,
        }


def rows_of_ids(ids_N: Tensor, table: Table) -> Tensor:
    """The rows of ids; ids outside of the table, which only some tables accept, share its last row."""
    last = table.rows - 1
    return ids_N.masked_fill((ids_N < 0) | (ids_N > last), last)
