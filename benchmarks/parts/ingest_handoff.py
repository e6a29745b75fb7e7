"""A batch from one process to another: memory slots as the service has them, beside torch's queue.

The one that makes batches is a process of its own, `-m parts.ingest_handoff`; both say how many seconds of a processor
they took. In all ways the arrays are there before, the receiver looks at every page of them, and the time
runs until the receiver has let the last one go. Apart from `ingest.py`, because it is a program.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from parts import BENCHMARKS
from parts.ingest_data import tasks
from rowwise.ingest.block import EncodedRows
from rowwise.ingest.service.coordinator import SplitDelivery, SplitId, SplitReady, SplitReleased, WorkerTimes
from rowwise.ingest.service.memory import SlotMemory, make_memory
from rowwise.ingest.service.messages import Connection

ROWS = 8192
SLOTS = 4
PAGE = 4096
WAYS = ("memory slots", "queue, 3 tensors", "queue, 60 tensors")


def a_batch(path: Path) -> EncodedRows:
    """So many rows, as a worker makes them."""
    return tasks(path).open(0, 0).encode([(0, ROWS)])


class Sender:
    """Writes a batch to slots that are free, and says where its arrays are."""

    def __init__(self, line: Connection, batch: EncodedRows) -> None:
        self._line, self._batch = line, batch
        self._slots = [SlotMemory(make_memory()) for _ in range(SLOTS)]
        self._free = list(range(SLOTS))
        self._known: set[int] = set()

    def send(self, count: int) -> None:
        """So many, until the receiver has let all of them go."""
        for number in range(count):
            while not self._free:
                self._hear()
            slot = self._free.pop(0)
            layout = self._batch.layout
            np.copyto(self._slots[slot].resize(layout.size), self._batch.block)
            place = SplitId(slot, number)
            took = SplitDelivery(0, place, slot, SplitReady(0, place, layout, WorkerTimes()), workers=1, ready=1)
            self._line.send(took, None if slot in self._known else self._slots[slot].file)
            self._known.add(slot)
        while len(self._free) < SLOTS:
            self._hear()

    def _hear(self) -> None:
        for done, _ in self._line.receive():
            assert isinstance(done, SplitReleased)
            self._free.append(done.split_id.epoch)


def take_slots(line: Connection, slots: dict[int, SlotMemory], count: int) -> int:
    """Map them, look at them, let them go; the bytes that there were."""
    seen = bytes_seen = 0
    while seen < count:
        for took, file in line.receive():
            assert isinstance(took, SplitDelivery)
            if file is not None:
                slots[took.slot] = SlotMemory(file)
            block = np.frombuffer(slots[took.slot].map(took.split.layout.size), np.uint8, took.split.layout.size)
            encoded = EncodedRows.from_block(block, took.split.layout)
            encoded.block[::PAGE].sum()
            bytes_seen += len(encoded.block)
            seen += 1
            line.send(SplitReleased(0, took.split_id, 0.0))
    return bytes_seen


def torch_tensors(batch: EncodedRows, way: str) -> list:
    """Everything in three tensors, or two for each of 30 features."""
    import torch

    rows = np.arange(batch.rows + 1)
    offsets = [rows if bags.offsets_R1 is None else bags.offsets_R1 for bags in batch.bags]
    if way == WAYS[1]:
        ids = np.concatenate([bags.values_N for bags in batch.bags])
        listed = np.concatenate([bags.offsets_R1 for bags in batch.bags if bags.offsets_R1 is not None])
        numbers = np.concatenate([batch.dense_RF, batch.labels_RK], 1)
        return [torch.from_numpy(x) for x in (ids, listed, numbers)]
    arrays = [np.array(a) for bags, o in zip(batch.bags, offsets, strict=True) for a in (bags.values_N, np.diff(o))]
    arrays[0] = np.concatenate([arrays[0], batch.dense_RF.view(np.int32).reshape(-1)])
    return [torch.from_numpy(a) for a in arrays]


def put(queue: Any, free: Any, report: Any, path: Path, way: str, count: int) -> None:
    """The sender of torch's queue; tensors that were sent once are shared already, so each batch has its own."""
    import torch

    torch.set_num_threads(1)
    batch = torch_tensors(a_batch(path), way)
    batches = [[tensor.clone() for tensor in batch] for _ in range(count)]
    report.put(None)
    free.get()
    begin_s = process_time()
    for one in batches:
        queue.put(one)
    free.get()  # the receiver has all of them
    report.put(process_time() - begin_s)
    free.get()


def over_queue(path: Path, way: str, size: float, count: int) -> dict[str, float]:
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queue, free, report = context.Queue(SLOTS), context.Queue(), context.Queue()
    sender = context.Process(target=put, args=(queue, free, report, path, way, count))
    sender.start()
    report.get()
    begin_s, begin_cpu_s = perf_counter(), process_time()
    free.put(None)
    for _ in range(count):
        for tensor in queue.get():
            tensor.view(torch.uint8).view(-1)[::PAGE].sum()
    free.put(None)
    wall_s, cpu_s = perf_counter() - begin_s, process_time() - begin_cpu_s + report.get()
    free.put(None)
    sender.join()
    return rate(way, size, count, wall_s, cpu_s)


def over_slots(path: Path, count: int) -> dict[str, float]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "parts.ingest_handoff", str(theirs.fileno()), str(path), str(count)]
        sender = subprocess.Popen(
            command, cwd=BENCHMARKS, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True
        )
    line = Connection(ours)
    slots: dict[int, SlotMemory] = {}
    take_slots(line, slots, SLOTS)  # pages are there from now on
    begin_s, begin_cpu_s = perf_counter(), process_time()
    size = take_slots(line, slots, count) / count
    wall_s, cpu_s = perf_counter() - begin_s, process_time() - begin_cpu_s
    told, _ = sender.communicate()
    line.close()
    return rate(WAYS[0], size, count, wall_s, cpu_s + float(told))


def rate(way: str, size: float, count: int, wall_s: float, cpu_s: float) -> dict[str, float]:
    return {"way": way, "mb": size / 1e6, "gb_cpu_s": size * count / cpu_s / 1e9, "gb_s": size * count / wall_s / 1e9}


def measure(path: Path, repeats: int, count: int, queues: Sequence[str] = WAYS[1:]) -> Iterator[dict]:
    """All ways in turns, the best of each."""
    best: dict[str, dict] = {}
    size = a_batch(path).layout.size
    for _ in range(repeats):
        found = [over_slots(path, 10 * count), *(over_queue(path, way, size, count) for way in queues)]
        for one in found:
            best[one["way"]] = max(one, best.get(one["way"], one), key=lambda f: f["gb_cpu_s"])
    yield from best.values()


def main() -> None:
    """The sender of slots."""
    with socket.socket(fileno=int(sys.argv[1])) as end:
        batch, count = a_batch(Path(sys.argv[2])), int(sys.argv[3])
        line = Connection(end)
        sender = Sender(line, batch)
        sender.send(SLOTS)
        begin_s = process_time()
        sender.send(count)
        print(process_time() - begin_s, flush=True)


if __name__ == "__main__":
    main()
