"""Whole steps by `Trainer` on batches that are ready, for `pipeline.py`.

A block is a run of a few steps. Its first steps fill the pipeline and its last ones prepare nothing, so neither counts.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from msgspec import structs
from torch import nn

from parts.shard_work import DENSE_LR, Parts
from rowwise import Batch
from rowwise.comm.interface import Comm
from rowwise.ingest.batcher import Position
from rowwise.train.objective import Clicks
from rowwise.train.run_folder import RunFolder
from rowwise.train.settings import DenseAdam, Log, Settings, Training
from rowwise.train.trainer import Trainer, TrainingJob

FILL, DRAIN = 4, 3  # updates of a block that do not count
TASKS = ("label",)


class ReadyBatches:
    """What a trainer uses of a `Batcher`: an epoch of these batches in turn."""

    splits = 1

    def __init__(self, batches: Sequence[Batch], steps: int) -> None:
        self._batches, self._steps, self._at = batches, steps, Position()

    def __iter__(self) -> Iterator[Batch]:
        for row, batch in enumerate(islice(cycle(self._batches), self._steps)):
            self._at = structs.replace(self._at, row=row + 1)
            yield batch
        self._at = Position(epoch=self._at.epoch + 1)

    def state(self) -> Position:
        return self._at


def batch_of(parts: Parts) -> Batch:
    return Batch(dense_BF=parts.dense_BF, sparse=parts.jagged(), labels_BK=parts.labels_BK)


def settings_of(updates: int, **train: Any) -> Settings:
    """As a recipe has them; metrics are written once, after the last step."""
    training = Training(optimizer=DenseAdam(lr=DENSE_LR), shuffle=False, steps=updates, **train)
    return Settings(train=training, log=Log(every=updates))


def time_block(
    model: nn.Module, comm: Comm, batches: Sequence[Batch], updates: int, folder: Path | None = None, **train: Any
) -> float:
    """Seconds an update in the middle of a run on rank 0, which all others keep up with; 0 on other ranks."""
    settings = settings_of(updates, **train)
    ready: Any = ReadyBatches(batches, updates * settings.train.accumulate)
    job = TrainingJob(model=model, objective=Clicks(model), batches=lambda _: ready, tasks=TASKS)
    ends_s: list[float] = []
    run = None if folder is None else RunFolder(folder)
    Trainer(job, settings, run, lambda _: ends_s.append(time.perf_counter()), comm).run()
    if not ends_s:
        return 0.0
    first, last = (0, -1) if updates <= FILL + DRAIN else (FILL - 1, -DRAIN)
    counted = ends_s[first : last + 1 or None]
    return (counted[-1] - counted[0]) / (len(counted) - 1)
