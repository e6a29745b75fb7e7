"""Measures one worker's work on a few splits repeatedly: the best time of each stage.

It times the worker's own function, `service.worker.prepare_split`, on one core and into shared memory, then the
trainer's part. The best of all rounds counts per split and stage, as noise only adds time. Only the first round may
read files from outside the page cache; its read time is reported separately. Known limits: contention of several
workers for disk and memory bandwidth.
"""

import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from time import perf_counter
from typing import final

import numpy as np
import pyarrow as pa

from rowwise.base.errors import DataError
from rowwise.ingest.bench.packed import unpacking_of
from rowwise.ingest.block import EncodedRows
from rowwise.ingest.columns import Columns
from rowwise.ingest.delimited import CsvReader
from rowwise.ingest.prepare import PreparationTask
from rowwise.ingest.reader import Split
from rowwise.ingest.service.coordinator import SplitDelivery, SplitId, SplitLease, SplitReady, SplitRefused
from rowwise.ingest.service.memory import SlotMemory, make_memory
from rowwise.ingest.service.messages import Connection
from rowwise.ingest.service.worker import prepare_split
from rowwise.ingest.warehouse.ranges import ReadCounters, counters_of
from rowwise.tables.spec import Value

SPLITS = 3
ROUNDS = (2, 7)  # minimum and maximum
BUDGET_S = 12.0  # no round begins after it

Progress = Callable[[int, int], None]  # called with the number of rounds done, and their maximum


class WorkerSeconds(Value, frozen=True):
    """Seconds of one worker by stage."""

    read_s: float = 0.0  # bytes from files; part of `decode_s` if the reader does not count them
    decompress_s: float = 0.0
    decode_s: float = 0.0  # of Parquet, or of lines
    transform_s: float = 0.0  # includes filters and the order of rows
    encode_s: float = 0.0


class PreparationTimes(Value, frozen=True):
    """The best times of one worker for some splits; wall-clock seconds except `cpu_s`.

    The hand-off is the trainer's part: it receives the split, maps its memory and copies its rows into batches.
    """

    splits: int
    of: int  # splits of the data
    rounds: int
    rows: int  # output rows
    rows_in: int  # input rows, before filters and sampling
    wall_s: float
    cpu_s: float
    parts: WorkerSeconds
    hand_off_s: float
    bytes_read: int
    bytes_wanted: int
    bytes_encoded: int
    first_read_s: float  # read time of the first round, maybe from disk
    codec: str  # of most bytes; empty if they are not compressed


class _SplitTimes(Value, frozen=True):
    """Seconds of one split in one round."""

    wall_s: float
    cpu_s: float
    read_s: float
    loaded_s: float  # read, decompress and decode
    transform_s: float
    encode_s: float
    hand_off_s: float


def measure(
    task: PreparationTask, batch: int, splits: int = SPLITS, budget_s: float = BUDGET_S, tell: Progress | None = None
) -> PreparationTimes:
    """Prepare a spread sample of a task's splits, for a trainer with batches of `batch` rows."""
    count = min(splits, len(task.splits))
    split_ids = [SplitId(0, number * len(task.splits) // count) for number in range(count)]
    best: dict[SplitId, _SplitTimes] = {}
    begin_s, first_read_s, rounds = perf_counter(), 0.0, 0
    with _one_thread(), closing(_Bench(task, batch)) as bench:
        for rounds in range(1, ROUNDS[1] + 1):
            for split_id in split_ids:
                times = bench.prepare(split_id)
                first_read_s += times.read_s if rounds == 1 else 0.0
                best[split_id] = _combine((best.get(split_id, times), times), min)
            if tell is not None:
                tell(rounds, ROUNDS[1])
            spent_s = perf_counter() - begin_s
            if rounds >= ROUNDS[0] and spent_s * (rounds + 1) / rounds > budget_s:
                break
        order = task.order(0)
        unpacking = unpacking_of(task.reader, task.splits[order[split_ids[0].index]], task.preparation.names)
    total = _combine(best.values(), sum)
    decoded_s = max(total.loaded_s - total.read_s, 0.0)
    return PreparationTimes(
        splits=count,
        of=len(task.splits),
        rounds=rounds,
        rows=sum(bench.rows.values()),
        rows_in=sum(bench.rows_in.values()),
        wall_s=total.wall_s,
        cpu_s=total.cpu_s,
        parts=WorkerSeconds(
            read_s=total.read_s,
            decompress_s=decoded_s * unpacking.share,
            decode_s=decoded_s * (1 - unpacking.share),
            transform_s=total.transform_s,
            encode_s=total.encode_s,
        ),
        hand_off_s=total.hand_off_s,
        bytes_read=bench.counters.bytes_read // rounds,
        bytes_wanted=bench.counters.bytes_wanted // rounds,
        bytes_encoded=bench.bytes_encoded // rounds,
        first_read_s=first_read_s,
        codec=unpacking.codec,
    )


def _combine(times: Collection[_SplitTimes], reduce: Callable[[Iterator[float]], float]) -> _SplitTimes:
    return _SplitTimes(**{name: reduce(getattr(t, name) for t in times) for name in _SplitTimes.__struct_fields__})


@final
class _Bench:
    """A worker and a trainer in one process, with the shared memory of a service."""

    def __init__(self, task: PreparationTask, batch: int) -> None:
        self._task, self._order = task, task.order(0)
        self._slot = SlotMemory(make_memory())
        self._hand_off = _HandOff(os.dup(self._slot.file), task.preparation.columns, batch)
        self.rows: dict[SplitId, int] = {}
        self.rows_in: dict[SplitId, int] = {}
        self.counters, self.bytes_encoded = ReadCounters(), 0

    def prepare(self, split_id: SplitId) -> _SplitTimes:
        split = self._task.splits[self._order[split_id.index]]
        before = counters_of(self._task.reader)
        ready = prepare_split(self._task, SplitLease(0, split_id, 0), self._slot.resize)
        if isinstance(ready, SplitRefused):
            raise DataError(ready.error)
        counters = counters_of(self._task.reader) - before
        if isinstance(self._task.reader, CsvReader):
            counters = _lines_read(split)
        self.counters += counters
        self.bytes_encoded += ready.layout.size
        self.rows[split_id], self.rows_in[split_id] = (
            ready.layout.rows,
            counters.rows or split.rows or ready.layout.rows,
        )
        spent = ready.times.spent
        return _SplitTimes(
            wall_s=ready.times.busy_s,
            cpu_s=ready.times.cpu_s,
            read_s=min(counters.read_s, spent.read_s),
            loaded_s=spent.read_s,
            transform_s=spent.transform_s,
            encode_s=spent.encode_s,
            hand_off_s=self._hand_off.time(ready),
        )

    def close(self) -> None:
        self._hand_off.close()
        self._slot.close()


@final
class _HandOff:
    """The hand-off of a prepared split to a trainer in this process: message, memory mapping, and batches.

    Runs the code of worker, host and client. Known limits: without context switches between processes, some
    20 microseconds a split.

    Args:
        file: descriptor of a slot's memory; owned.
        columns: the columns of the rows.
        batch: rows of a batch.
    """

    def __init__(self, file: int, columns: Columns, batch: int) -> None:
        self._memory, self._columns, self._batch = SlotMemory(file), columns, batch
        ends = socket.socketpair()
        self._sender, self._receiver = Connection(ends[0]), Connection(ends[1])

    def time(self, split: SplitReady) -> float:
        """Seconds from a ready split to its batches."""
        from rowwise.ingest.collate import SplitRows, collate

        begin_s = perf_counter()
        self._sender.send(SplitDelivery(0, split.split_id, 0, split, workers=1, ready=1))
        [(message, _)] = self._receive()
        assert isinstance(message, SplitDelivery)
        assert message.split is not None
        memory = np.frombuffer(self._memory.map(message.split.layout.size), np.uint8)
        encoded = EncodedRows.from_block(memory, message.split.layout)
        for begin in range(0, encoded.rows, self._batch):
            collate([SplitRows(encoded, begin, min(begin + self._batch, encoded.rows))], self._columns)
        return perf_counter() - begin_s

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
        self._memory.close()

    def _receive(self) -> list[tuple[object, int | None]]:
        while True:
            messages: list[tuple[object, int | None]] = list(self._receiver.receive())
            if messages:
                return messages


@contextmanager
def _one_thread() -> Iterator[None]:
    before = pa.cpu_count()
    pa.set_cpu_count(1)
    try:
        yield
    finally:
        pa.set_cpu_count(before)


def _lines_read(split: Split) -> ReadCounters:
    """Time a read of a split's bytes, as `CsvReader` does not count it."""
    begin_s = perf_counter()
    with open(split.source, "rb") as file:
        file.seek(split.start)
        count = len(file.read(split.stop - split.start))
    return ReadCounters(reads=1, bytes_read=count, bytes_wanted=count, read_s=perf_counter() - begin_s)
