"""Lookups of each table by the batches: ids, distinct ids, and skew.

One batch in many is looked at, and at most some ten thousand ids of a feature, so it costs next to nothing; gives up:
what is rarer than that is not seen. Ranks look at their own parts of a batch, and their sums are added up. In `rows`
an id that comes on two ranks is different twice; in `repeats`, from which planners learn, it is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, final

import msgspec
import torch
from torch import Tensor

from rowwise.batch import Batch, Jagged
from rowwise.errors import StateError
from rowwise.hashing.embeddings import MappedEmbeddings
from rowwise.shard.embeddings import AnyEmbeddings
from rowwise.spec import Table, Value, state_width
from rowwise.train.repeats import IdSample
from rowwise.train.run_folder import Cell

MOST_IDS = 1 << 13  # of a feature in a batch
MOST_COUNTED = 1 << 16  # the same, for `repeats`
IDS, COUNTS = "traffic/ids", "traffic/counts"  # of all tables, one after the other
Around = Mapping[AnyEmbeddings, MappedEmbeddings]
NOTHING: Around = {}
TOP = 100  # a hundredth of the different ids


@dataclass(slots=True)
class _TableSums:
    samples: int = 0
    ids: int = 0
    looked_at: int = 0
    different: int = 0
    in_top: int = 0


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class SavedTraffic(Value, frozen=True):
    """The traffic of a table in a checkpoint; older versions counted no ids."""

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
    """Sums over the batches that were looked at, by table."""

    _sums: dict[str, _TableSums] = field(default_factory=dict)
    _repeats: dict[str, IdSample] = field(default_factory=dict)

    def add(self, tables: Sequence[AnyEmbeddings], batch: Batch, around: Around = NOTHING) -> None:
        """Look at a batch; `around` some of the modules is what makes rows of its ids."""
        for module in tables:
            sparse = (around[module].map_batch(batch.sparse) if module in around else batch.sparse).expanded()
            for table in module.tables:
                sums = self._sums.setdefault(table.name, _TableSums())
                repeats = self._repeats.setdefault(table.name, IdSample())
                sums.samples += sparse.batch_size
                for ids_N in _ids(sparse, table.feature_names):
                    sums.ids += len(ids_N)
                    counts = ids_N[:MOST_IDS].unique(return_counts=True)[1].sort(descending=True).values
                    sums.looked_at += min(len(ids_N), MOST_IDS)
                    sums.different += len(counts)
                    sums.in_top += int(counts[: -(-len(counts) // TOP)].sum())
                    repeats.add(_rows_of(ids_N[:MOST_COUNTED], table))

    def rows(self, tables: Sequence[AnyEmbeddings]) -> list[dict[str, Cell]]:
        """The lines of tables.csv."""
        return [self._row(table) for module in tables for table in module.tables]

    def pooling(self, name: str) -> float | None:
        """Ids of a sample, over all features of a table; None where no sample was looked at."""
        sums = self._sums.get(name, _TableSums())
        return sums.ids / sums.samples if sums.samples else None

    def repeats(self, name: str) -> IdSample:
        """Frequencies of a table's ids."""
        return self._repeats.get(name, IdSample())

    def state(self) -> dict[str, dict[str, int]]:
        """The numbers, for a checkpoint."""
        found: dict[str, dict[str, int]] = {}
        for name, sums in self._sums.items():
            seen = self._repeats.get(name, IdSample())
            found[name] = asdict(sums) | {"counted": seen.looked_at, "level": seen.level, "kept": len(seen.ids_D)}
        return found

    def tensors(self) -> dict[str, Tensor]:
        """The counted ids as tensors for a checkpoint, in the order of `state`."""
        found = [self._repeats.get(name, IdSample()) for name in self._sums]
        none = torch.empty(0, dtype=torch.int64)
        return {
            IDS: torch.cat([none, *(one.ids_D for one in found)]),
            COUNTS: torch.cat([none, *(one.counts_D for one in found)]),
        }

    def restore(self, state: Mapping[str, Mapping[str, int]], tensors: Mapping[str, Tensor]) -> None:
        """Count on from what `state` and `tensors` gave; a checkpoint of an older version has counted no ids."""
        names = _TableSums.__slots__
        self._sums = {name: _TableSums(**{key: sums[key] for key in names}) for name, sums in state.items()}
        self._repeats = {}
        if IDS not in tensors or COUNTS not in tensors:
            return
        sizes = [sums["kept"] for sums in state.values()]
        if any(x.dtype != torch.int64 or x.shape != (sum(sizes),) for x in (tensors[IDS], tensors[COUNTS])):
            raise StateError(f"the ids that were counted are not {sum(sizes)}, as the state of traffic says")
        parts = zip(state.items(), tensors[IDS].split(sizes), tensors[COUNTS].split(sizes), strict=True)
        for (name, sums), ids_D, counts_D in parts:
            self._repeats[name] = IdSample(sums["counted"], sums["level"], ids_D, counts_D)

    def merge(self, state: Mapping[str, Mapping[str, int]], tensors: Mapping[str, Tensor]) -> None:
        """Add what another rank's `state` and `tensors` gave."""
        other = TableTraffic()
        other.restore(state, tensors)
        for name, theirs in other._sums.items():
            mine, more = asdict(self._sums.get(name, _TableSums())), asdict(theirs)
            self._sums[name] = _TableSums(**{key: count + more[key] for key, count in mine.items()})
            self._repeats.setdefault(name, IdSample()).merge(other.repeats(name))

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
            "state_bytes": 4 * state_width(table) * table.rows + 8,  # and the count of its updates
            "ids_per_sample": ids_per_sample,
            "unique_share": sums.different / max(sums.looked_at, 1),
            "top_share": sums.in_top / max(sums.looked_at, 1),
            "traffic_bytes": ids_per_sample * table.row_bytes,
        }


def _rows_of(ids_N: Tensor, table: Table) -> Tensor:
    """The rows that ids ask for: those outside of a table, if it takes them, for its last."""
    last = table.rows - 1
    return ids_N.masked_fill((ids_N < 0) | (ids_N > last), last)


def _ids(sparse: Jagged, features: Sequence[str]) -> list[Tensor]:
    """The ids of each of these features."""
    size = sparse.batch_size
    ends_F = sparse.lengths_FB.view(len(sparse.features), size).sum(1, dtype=torch.int64).cumsum(0).tolist()
    begins_F = [0, *ends_F[:-1]]
    places = (sparse.features.index(feature) for feature in features)
    return [sparse.values_N[begins_F[f] : ends_F[f]] for f in places]
