"""The tables of `tiers.py`, their ids, and what every side does with a batch.

Rows and optimizer state are the same constants on all sides, so a file is filled without drawing rows, and rows differ
after their first update. A step looks a batch up and applies a gradient that its number gives: row-wise Adagrad, with
duplicate ids of a batch merged.
"""

import mmap
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from parts.ops_work import Work, ids_for, scatter
from parts.timer import timed_s

SKEW = 1.05  # of Zipf's law, in `ops_work.ids_for`
START, LR, EPS, STATE = 0.01, 0.05, 1e-8, 0.25  # of all rows; STATE: of row-wise Adagrad
FLOAT_bytes = 4
BLOCK_bytes, IN_FLIGHT = 4096, 32
Numbers = np.ndarray


class Size(NamedTuple):
    """Tables of one size, and the memory that they may take."""

    rows: int
    budget_bytes: int
    batch: int = 4096
    dim: int = 64
    tables: int = 8

    @classmethod
    def of(cls, gigabytes: float, budget_gigabytes: float, **more: int) -> "Size":
        """Tables whose rows and state take so many gigabytes together."""
        row_bytes = (cls._field_defaults | more)["dim"] * FLOAT_bytes + FLOAT_bytes
        tables = (cls._field_defaults | more)["tables"]
        return cls(int(gigabytes * 1e9 / row_bytes / tables), int(budget_gigabytes * 1e9), **more)

    def in_memory(self) -> "Size":
        """Tables that take the budget, so that all rows are in memory."""
        return self._replace(rows=self.budget_bytes // (self.tables * (self.dim + 1) * FLOAT_bytes))


def ids_of(size: Size, step: int) -> Tensor:
    """The ids of a batch, table after table; rows of any frequency are anywhere in a table."""
    return ids_for([size.rows] * size.tables, Work(size.dim, size.batch, 1, "zipf", 1, ""), step)


def ids_by_table(size: Size, step: int) -> Tensor:
    return ids_of(size, step).view(size.tables, size.batch)


def frequent_rows(size: Size, first: int, last: int) -> Numbers:
    """The rows of these ranks of frequency, the most frequent one first."""
    return (np.arange(first, last) * scatter(size.rows) + size.rows // 3) % size.rows


def gradient_of(size: Size, step: int) -> Tensor:
    """[B, tables * dim]."""
    return torch.randn(size.batch, size.tables * size.dim, generator=torch.Generator().manual_seed(step)) * 0.1


class RowsSide(Protocol):
    """Tables of some library or other, and what is done with a batch of rows."""

    def look_up(self, ids_TB: Tensor) -> Tensor:
        """The rows of one id of each table for each sample, side by side: [B, tables * dim]."""
        ...

    def update(self, ids_TB: Tensor, grad_BS: Tensor) -> None:
        """Change the rows of the batch that was looked up."""
        ...

    def end_step(self, ids_TB: Tensor) -> None:
        """What makes room for the next step."""
        ...


def adagrad(weights_UD: Tensor, state_U: Tensor, grad_UD: Tensor) -> tuple[Tensor, Tensor]:
    """Row-wise Adagrad of distinct rows, as peers compute it."""
    state_U = state_U + grad_UD.square().mean(1)
    return weights_UD - (LR / (state_U.sqrt() + EPS)).unsqueeze(1) * grad_UD, state_U


def time_rows(side: RowsSide, size: Size, step: int) -> tuple[float, float]:
    """Seconds of a step's lookup and update, and of its end."""
    ids_TB, grad_BS = ids_by_table(size, step), gradient_of(size, step)

    def change() -> None:
        side.look_up(ids_TB)
        side.update(ids_TB, grad_BS)

    return timed_s(change), timed_s(lambda: side.end_step(ids_TB))


def best_mean(times_s: list[float], run: int) -> float:
    """The least mean of so many steps in a row: what comes once in a while, as large writes do, counts."""
    run = min(run, len(times_s))
    sums = np.convolve(times_s, np.ones(run), "valid")
    return float(sums.min()) / run


def random_reads_s(folder: Path, seconds: float, file_bytes: int) -> float:
    """Random direct reads of a block a second, by threads, from a file without a name."""
    chunk = mmap.mmap(-1, 8 << 20)
    chunk.write(random.Random(0).randbytes(len(chunk)))
    with _unnamed(folder) as file:
        for at in range(0, file_bytes, len(chunk)):
            os.pwritev(file, [chunk], at)
        os.fsync(file)
        begin_s = time.monotonic()

        def read_on(seed: int) -> int:
            buffer, draw, count = mmap.mmap(-1, BLOCK_bytes), random.Random(seed), 0
            while time.monotonic() - begin_s < seconds:
                os.preadv(file, [buffer], draw.randrange(file_bytes // BLOCK_bytes) * BLOCK_bytes)
                count += 1
            return count

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            return sum(threads.map(read_on, range(IN_FLIGHT))) / (time.monotonic() - begin_s)


@contextmanager
def _unnamed(folder: Path) -> Iterator[int]:
    """A file for direct reads and writes that ends with its descriptor."""
    file = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def chunks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + size, rows)) for begin in range(0, rows, size))
