"""Whole steps by `Trainer` on batches that are ready, for `pipeline.py`.

A block is a run of a few steps. Its first steps fill the pipeline and its last ones prepare nothing, so neither counts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs
from torch import nn

from parts.shard_work import SLOW_LR, Parts
from rowwise import Batch
from rowwise.ingest.batcher import Position
from rowwise.parallel.comm.interface import Comm
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
    training = Training(optimizer=DenseAdam(lr=SLOW_LR), shuffle=False, steps=updates, **train)
    return Settings(train=training, log=Log(every=updates))


class Block(NamedTuple):
    """A block on rank 0, with which all others keep up; 0 on other ranks."""

    seconds: float  # an update
    sampled: float  # how much what was sampled grew, an update


def nothing() -> float:
    return 0.0


def time_block(
    model: nn.Module,
    comm: Comm,
    batches: Sequence[Batch],
    updates: int,
    folder: Path | None = None,
    sample: Callable[[], float] = nothing,
    **train: Any,
) -> Block:
    """A run of so many updates, of which those in the middle count."""
    settings = settings_of(updates, **train)
    ready: Any = ReadyBatches(batches, updates * settings.train.accumulate)
    job = TrainingJob(model=model, objective=Clicks(model), batches=lambda _: ready, tasks=TASKS)
    ends: list[tuple[float, float]] = []
    run = None if folder is None else RunFolder(folder)
    Trainer(job, settings, run, lambda _: ends.append((time.perf_counter(), sample())), comm).run()
    if not ends:
        return Block(0.0, 0.0)
    counted = ends if updates <= FILL + DRAIN else ends[FILL - 1 : -DRAIN]
    (first_s, first), (last_s, last), count = counted[0], counted[-1], len(counted) - 1
    return Block((last_s - first_s) / count, (last - first) / count)
