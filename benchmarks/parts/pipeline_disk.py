"""The process of `pipeline.py` in its section disk: the model of `tiers.py` with tables on disk, by depth.

A batch is new to the cache: each block has batches of its own.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from parts.pipeline_work import Block, time_block
from parts.tiers_rowwise import Rowwise
from parts.tiers_work import Size, random_reads_s
from rowwise import Batch

DEPTHS = (1, 2, 3)  # 1 reads a batch's rows when it looks them up
RATE_s, RATE_bytes = 2.0, 1 << 30  # of the random reads that the disk is measured by
SETTLE = 2  # blocks that are not counted


class DiskOrder(NamedTuple):
    size: Size
    blocks: int
    updates: int  # of a block
    folder: str


class DiskSide:
    """The model, and blocks of its steps on batches that no block had before."""

    def __init__(self, comm: Any, order: DiskOrder, folder: Path) -> None:
        self.comm, self.order, self.side = comm, order, Rowwise(order.size, folder)
        self.side.fill()
        self._next = 0

    def block(self, depth: int, run: Path | None = None) -> Block:
        """Seconds an update, of which those that it waited for the disk are sampled."""
        updates = self.order.updates
        batches = [self._batch(step) for step in range(self._next, self._next + updates)]
        self._next += updates
        how = {"batch": self.order.size.batch, "pipeline_depth": depth}
        return time_block(self.side.model, self.comm, batches, updates, run, self._waited_s, **how)

    def _batch(self, step: int) -> Batch:
        dense_BF, sparse, labels_BK = self.side.batch(step)
        return Batch(dense_BF=dense_BF, sparse=sparse, labels_BK=labels_BK)

    def _waited_s(self) -> float:
        counters = self.side.disk.use()
        return counters.read_wait_s + counters.write_wait_s


def on_disk(comm: Any, order: DiskOrder) -> list[dict]:
    """By depth, beside the time of a step's misses at the disk's own speed."""
    with tempfile.TemporaryDirectory(dir=order.folder) as folder:
        reads_s = random_reads_s(Path(folder), RATE_s, min(RATE_bytes, order.size.budget_bytes))
        side = DiskSide(comm, order, Path(folder))
        for _ in range(SETTLE):
            side.block(DEPTHS[-1])
        before = side.side.counts()
        blocks: dict[int, list[Block]] = {depth: [] for depth in DEPTHS}
        for _ in range(order.blocks):
            for depth, found in blocks.items():
                found.append(side.block(depth))
        updates = order.blocks * order.updates * len(DEPTHS)
        counts = {name: (count - before[name]) / updates for name, count in side.side.counts().items()}
        about = {"section": "disk", "transport": "one process", "link": "disk", **counts, "reads_s": reads_s}
        about |= {"limit_ms": counts["misses"] / reads_s * 1e3, "batch": order.size.batch}
        return [about | row_of(depth, sorted(found)) for depth, found in blocks.items()]


def row_of(depth: int, ordered: list[Block]) -> dict:
    low = ordered[len(ordered) // 5]
    noise = ordered[len(ordered) // 2].seconds / low.seconds - 1
    return {"side": f"depth {depth}", "ms": low.seconds * 1e3, "exposed_ms": low.sampled * 1e3, "noise": noise}
