"""Counts the rows that the first training rows look up: `pin` in a recipe.

The counts choose the rows that tables on disk pin ([Note: Pinned rows] in `tables/store/disk.py`), and their fitted
curves are the access statistics of RecShard's planning method. They affect no result. A resumed run counts the same
rows again.

Known limits: rows that training adds to a batch, such as negatives, are not counted; popularity that drifts later is
not seen.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from rowwise.planning.perf.access import Access, Workload
from rowwise.recipes.access import fit_access
from rowwise.recipes.resolved import ResolvedRecipe, make_batcher
from rowwise.tables.ids.make import IdTables
from rowwise.tables.spec import Table
from rowwise.tables.store.row_store import HotRows
from rowwise.train.repeats import IdSample
from rowwise.train.step import embeddings_of
from rowwise.train.traffic import rows_of_ids

MIN_COUNT = 2  # a row that was looked up once is not known to be hotter than any other
MIN_PENDING = 1 << 20  # rows that are counted together


class CountedRows(NamedTuple):
    """Access statistics of a model's tables, and their rows by how often they were looked up."""

    workloads: tuple[Workload, ...]
    hot_rows: HotRows


@final
class ExactCounts:
    """Exact counts of a table's rows."""

    def __init__(self) -> None:
        self.total = 0
        self.rows_U, self.counts_U = torch.empty(2, 0, dtype=torch.int64)
        self._pending: list[Tensor] = []
        self._pending_rows = 0

    def add(self, rows_N: Tensor) -> None:
        self.total += len(rows_N)
        self._pending.append(rows_N)
        self._pending_rows += len(rows_N)
        if self._pending_rows > max(MIN_PENDING, len(self.rows_U)):
            self.merge()

    def merge(self) -> None:
        """Count what `add` has collected."""
        rows_V, counts_V = torch.cat([self.rows_U[:0], *self._pending]).unique(return_counts=True)
        rows_U, index_N = torch.cat([self.rows_U, rows_V]).unique(return_inverse=True)
        self.counts_U = torch.zeros_like(rows_U).index_add_(0, index_N, torch.cat([self.counts_U, counts_V]))
        self.rows_U = rows_U
        self._pending.clear()
        self._pending_rows = 0

    def hottest(self) -> Tensor:
        """Rows in falling order of their counts; equal ones in ascending order."""
        often_U = self.counts_U >= MIN_COUNT
        return self.rows_U[often_U][self.counts_U[often_U].argsort(descending=True, stable=True)]

    def access(self, table: Table, samples: int, batch: int) -> Access:
        sample = IdSample()
        sample.merge(IdSample(self.total, 0, self.rows_U, self.counts_U))
        return fit_access(sample, table.rows, self.total / max(samples, 1), batch)


def count_rows(resolved: ResolvedRecipe, model: nn.Module, samples: int) -> CountedRows:
    """Read the first `samples` training rows of the first epoch, or all of them, in whole batches."""
    modules = embeddings_of(model)
    id_maps = {module.stored: module for module in model.modules() if isinstance(module, IdTables)}
    tables = [table for module in modules for table in module.tables]
    counts = {table.name: ExactCounts() for table in tables}
    counted = 0
    for batch in make_batcher(resolved, resolved.rows.train, quarantine=""):
        for module in modules:
            sparse = (id_maps[module].map_batch(batch.sparse) if module in id_maps else batch.sparse).expanded()
            for table in module.tables:
                for ids_N in map(sparse.ids_of, table.feature_names):
                    counts[table.name].add(rows_of_ids(ids_N.long(), table))
        counted += batch.sparse.batch_size
        if counted >= samples:
            break
    for table_counts in counts.values():
        table_counts.merge()
    step_samples = resolved.recipe.train.batch * resolved.recipe.train.accumulate
    workloads = (Workload(table=t, access=counts[t.name].access(t, counted, step_samples)) for t in tables)
    return CountedRows(tuple(workloads), {name: rows.hottest() for name, rows in counts.items()})
