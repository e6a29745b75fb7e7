"""`ManagedRecord`: admissions and evictions of managed tables, as files of the run's folder.

    managed.csv               rows in use and counts of all ranks since the process began, a line per table
    evicted_ids.<table>.csv   each evicted id, with the step

Ids are as the batches have them: hashed to 62 bits if the column has `ids: hash`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple, final

from torch import Tensor

from rowwise.tables.ids.managed.embeddings import ManagedEmbeddings
from rowwise.tables.ids.managed.piece import ManagedCounters
from rowwise.train.run_folder import Cell, RunFolder, evicted_ids_name

Evictions = list[tuple[int, str, Tensor]]  # step, table, ids


class RankRecord(NamedTuple):
    """The counts of a rank, and the ids evicted since the last gather."""

    counters: dict[str, ManagedCounters]
    evictions: Evictions


@final
class ManagedRecord:
    """Collects counts and evicted ids of this rank; `write_evictions` and `counter_rows` merge those of all ranks."""

    def __init__(self, modules: Sequence[ManagedEmbeddings]) -> None:
        self._modules = modules
        self._evictions: Evictions = []
        for module in modules:
            module.keeps_evicted = True

    def record_step(self, step: int) -> None:
        for module in self._modules:
            self._evictions += [(step, table, ids_N) for table, ids_N in module.take_evicted().items()]

    def take(self) -> RankRecord:
        """The current counts, and the evictions since the last call."""
        counters = {table: counts for module in self._modules for table, counts in module.counters.items()}
        record = RankRecord(counters, list(self._evictions))
        self._evictions.clear()
        return record


def write_evictions(folder: RunFolder, ranks: Sequence[RankRecord]) -> None:
    """Append the evicted ids, sorted by step."""
    by_table: dict[str, list[tuple[int, Tensor]]] = {}
    for rank in ranks:
        for step, table, ids_N in rank.evictions:
            by_table.setdefault(table, []).append((step, ids_N))
    for table, evictions in by_table.items():
        evictions.sort(key=lambda eviction: eviction[0])
        lines: list[dict[str, Cell]] = [
            {"step": step, "id": id_} for step, ids_N in evictions for id_ in ids_N.tolist()
        ]
        folder.append(evicted_ids_name(table), lines)


def counter_rows(step: int, ranks: Sequence[RankRecord]) -> list[dict[str, Cell]]:
    """The lines of managed.csv after a step."""
    sums: dict[str, ManagedCounters] = {}
    for rank in ranks:
        for table, counters in rank.counters.items():
            sums[table] = sums.get(table, ManagedCounters()) + counters
    return [{"step": step, "table": table, **asdict(counters)} for table, counters in sums.items()]
