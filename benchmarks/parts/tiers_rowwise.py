"""rowwise's side of `tiers.py`: a DLRM whose tables are in memory, or on disk behind a cache."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss

from parts.batches import bags_of, tables_of
from parts.dlrm import DENSE
from parts.tiers_work import EPS, LR, START, STATE, Size, chunks, frequent_rows, ids_of
from parts.timer import timed_s
from rowwise import DLRM, Embeddings, Jagged, Plan, RowWiseAdagrad, Table
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.plan import Tile
from rowwise.parallel.shard.apply import shard
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.recipes.placement import fill_caches
from rowwise.tables.spec import Constant
from rowwise.tables.store.disk import DiskRows
from rowwise.tables.store.policy import WAYS
from rowwise.tables.store.row_store import SlotIds

BOTTOM, TOP = (512, 256), (512, 256, 1)
CHUNK = 1 << 16  # rows that are written at a time
PASSES = 8  # halves of the cache that are warmed again, as frequent rows were counted more often
WARM_PART = 16  # of the cache, pinned at a time


def plan_of(size: Size, tables: list[Table]) -> Plan:
    """All tables on disk, with caches that take the budget."""
    tiles = [
        Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, t.dim), tier="disk", cache_rows=WAYS) for t in tables
    ]
    return fill_caches(Plan(world=1, tiles=tuple(tiles)), tables, size.budget_bytes)


class Rowwise:
    """The model, its optimizers, and steps by number."""

    def __init__(self, size: Size, folder: Path | None) -> None:
        optimizer, init = RowWiseAdagrad(lr=LR, eps=EPS, initial=STATE), Constant(value=START)
        self.size, tables = size, tables_of([size.rows] * size.tables, size.dim, optimizer=optimizer, init=init)
        torch.manual_seed(0)
        meta = "cpu" if folder is None else "meta"
        self.model: nn.Module = DLRM(Embeddings(tables, device=meta), DENSE, (*BOTTOM, size.dim), TOP)
        self.plan = plan_of(size, tables) if folder else None
        if self.plan is not None:
            shard(self.model, self.plan, solo(), disk=folder)
        self.tables = self.model.embeddings
        self.names = tuple(t.name for t in tables)
        dense = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(dense, lr=1e-3, fused=True)
        self.pooled_BS: Tensor | None = None
        # Rows are read ahead for the very object that is looked up.
        self._following: tuple[int, tuple[Tensor, Jagged, Tensor]] = -1, self.batch(0)

    @property
    def disk(self) -> DiskRows:
        assert isinstance(self.tables, ShardedEmbeddings)
        (arena,) = self.tables.arenas
        assert isinstance(arena.store, DiskRows)
        return arena.store

    def batch(self, step: int) -> tuple[Tensor, Jagged, Tensor]:
        generator = torch.Generator().manual_seed(step)
        dense_BF = torch.randn(self.size.batch, DENSE, generator=generator)
        labels_BK = (dense_BF[:, :1] > 0).float()
        return dense_BF, self._jagged(ids_of(self.size, step)), labels_BK

    def train(self, step: int) -> float:
        """One training step, dense layers included, as a trainer does it; seconds."""
        number, batch = self._following
        if number != step:
            batch = self.batch(step)
        following = self.batch(step + 1)
        self._following = step + 1, following
        return timed_s(lambda: self._train(*batch, following[1]))

    def _train(self, dense_BF: Tensor, sparse: Jagged, labels_BK: Tensor, following: Jagged) -> None:
        if isinstance(self.tables, ShardedEmbeddings):
            self.tables.prefetch(following)
        loss = log_loss(self.model(dense_BF, sparse), labels_BK)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.tables.update()

    def look_up(self, ids_TB: Tensor) -> Tensor:
        self.pooled_BS = self.tables(self._jagged(ids_TB.flatten())).matrix_BS
        return self.pooled_BS

    def update(self, ids_TB: Tensor, grad_BS: Tensor) -> None:
        assert self.pooled_BS is not None
        self.pooled_BS.backward(grad_BS)
        self.tables.update()

    def end_step(self, ids_TB: Tensor) -> None:
        pass

    def fill(self) -> None:
        """Write all rows to the disk, with the cache as full of frequent rows as a long run leaves it.

        The frequent rows are made first, while no row has to be read.
        """
        assert self.plan is not None
        for number, table in enumerate(self.disk.tables):
            slots = len(table.row_memory) - table.overflow
            warm = min(slots - slots // WAYS, table.rows)
            for last in [warm, warm, *(warm >> n for n in range(1, PASSES))]:
                for begin, end in chunks(last, max(WAYS, slots // WARM_PART)):
                    rows_N = torch.from_numpy(frequent_rows(self.size, last - end, last - begin))
                    ids = SlotIds(rows_N, torch.tensor([0, len(rows_N)]), [number])
                    with self.disk.pin(ids, changes=False, counts=True):
                        pass
            for begin, end in chunks(table.rows, CHUNK):
                rows_U = torch.arange(begin, end)
                stored, state = table.initial(rows_U)
                self.disk.write(number, rows_U, stored, state)

    def counts(self) -> dict[str, int]:
        """Since the run began, of all tables."""
        found = [self.disk.counters(number) for number in range(len(self.disk.tables))]
        names = ("hits", "misses", "evictions", "writes")
        sums = {name: sum(getattr(one, name) for one in found) for name in names}
        return sums | {"reads": self.disk.use().reads}

    def _jagged(self, ids_N: Tensor) -> Jagged:
        return bags_of(self.names, ids_N)
