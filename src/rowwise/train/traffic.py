"""What the batches ask of each table: how many ids, how many different ones, how uneven.

Its own file because it only looks at ids. One batch in many is looked at, and at most some thousand ids of a table, so
it costs next to nothing; gives up: what is rarer than that is not seen. Ranks look at their own parts of a batch, and
their sums are added up: an id that comes on two ranks is different twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import final

import torch
from torch import Tensor

from rowwise.batch import Batch, Jagged
from rowwise.shard.embeddings import AnyEmbeddings
from rowwise.spec import Table, state_width
from rowwise.train.run_folder import Cell

MOST_IDS = 1 << 13
TOP = 100  # a hundredth of the different ids


@dataclass(slots=True)
class _Sums:
    samples: int = 0
    ids: int = 0
    looked_at: int = 0
    different: int = 0
    in_top: int = 0


@final
@dataclass(slots=True)
class Traffic:
    """Sums over the batches that were looked at, by table."""

    _sums: dict[str, _Sums] = field(default_factory=dict)

    def add(self, tables: Sequence[AnyEmbeddings], batch: Batch) -> None:
        """Look at a batch."""
        for module in tables:
            for table in module.tables:
                sums = self._sums.setdefault(table.name, _Sums())
                sums.samples += batch.sparse.batch_size
                for ids_N in _ids(batch.sparse, table.feature_names):
                    sums.ids += len(ids_N)
                    counts = ids_N[:MOST_IDS].unique(return_counts=True)[1].sort(descending=True).values
                    sums.looked_at += min(len(ids_N), MOST_IDS)
                    sums.different += len(counts)
                    sums.in_top += int(counts[: -(-len(counts) // TOP)].sum())

    def rows(self, tables: Sequence[AnyEmbeddings]) -> list[dict[str, Cell]]:
        """The lines of tables.csv."""
        return [self._row(table) for module in tables for table in module.tables]

    def state(self) -> dict[str, dict[str, int]]:
        """The sums, for a checkpoint."""
        return {name: asdict(sums) for name, sums in self._sums.items()}

    def restore(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Count on from what `state` gave."""
        self._sums = {name: _Sums(**sums) for name, sums in state.items()}

    def merge(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Add what another rank's `state` gave."""
        for name, theirs in state.items():
            mine = asdict(self._sums.get(name, _Sums()))
            self._sums[name] = _Sums(**{key: count + theirs[key] for key, count in mine.items()})

    def _row(self, table: Table) -> dict[str, Cell]:
        sums = self._sums.get(table.name, _Sums())
        ids_per_sample = sums.ids / max(sums.samples, 1)
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


def _ids(sparse: Jagged, features: Sequence[str]) -> list[Tensor]:
    """The ids of each of these features."""
    size = sparse.batch_size
    ends_F = sparse.lengths_FB.view(len(sparse.features), size).sum(1, dtype=torch.int64).cumsum(0).tolist()
    begins_F = [0, *ends_F[:-1]]
    places = (sparse.features.index(feature) for feature in features)
    return [sparse.values_N[begins_F[f] : ends_F[f]] for f in places]
