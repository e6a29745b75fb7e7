"""A worker: a process that prepares splits, one after another, and keeps nothing.

It reads, transforms and encodes a split straight into memory that clients map. What a split has that cannot be used is
told, and is the clients' business; a worker goes on. Known limits: a thread of its own that reads ahead; there are as
many workers as it takes.
"""

import contextlib
import pickle
import signal
import socket
import sys
from time import perf_counter, process_time

import pyarrow as pa
from msgspec import structs

from rowwise.errors import PeerError, one_line
from rowwise.ingest import block
from rowwise.ingest.prepare import PreparationTask
from rowwise.ingest.service.coordinator import (
    SplitLease,
    SplitReady,
    SplitRefused,
    WorkerJoined,
    WorkerLost,
    WorkerTimes,
)
from rowwise.ingest.service.memory import SlotMemory
from rowwise.ingest.service.messages import Connection, WorkerSetup


def main() -> None:
    """Work until the host hangs up."""
    # Ctrl-C at a terminal goes to all processes there; a worker ends with its host.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)  # workers are processes: threads of each would only take cores from the others
    with contextlib.suppress(PeerError), socket.socket(fileno=int(sys.argv[1])) as end:
        work(Connection(end))


def work(line: Connection) -> None:
    """Do what the host asks for."""
    task: PreparationTask | None = None
    slots: dict[int, SlotMemory] = {}
    while True:
        for message, file in line.receive():
            if file is not None:
                slots[message.slot if isinstance(message, SplitLease) else -1] = SlotMemory(file)
            if isinstance(message, WorkerSetup):
                sys.path += [folder for folder in message.path if folder not in sys.path]
                try:
                    task = pickle.loads(slots.pop(-1).look(message.size_bytes)[: message.size_bytes])
                except (pickle.UnpicklingError, AttributeError, ImportError) as error:
                    out = "want functions of modules that workers can import, not of __main__"
                    line.send(
                        WorkerLost(message.worker, f"what to prepare cannot be loaded in a worker: {error}; {out}")
                    )
                    return
                line.send(WorkerJoined(message.worker))
            else:
                assert isinstance(message, SplitLease)
                assert task is not None
                line.send(prepare_split(task, message, slots[message.slot].take))


def prepare_split(task: PreparationTask, lease: SplitLease, memory: block.Memory) -> SplitReady | SplitRefused:
    """A split, in the memory that is given; or why it is not."""
    begin_s, begin_cpu_s = perf_counter(), process_time()
    try:
        opened = task.open(task.order(lease.place.epoch)[lease.place.at], lease.place.epoch)
        encode_s = perf_counter()
        encoded = opened.encode(memory=memory)
    except Exception as error:
        # Whatever it is, it is the trainer's to raise, with its place in the order of rows.
        return SplitRefused(lease.worker, lease.place, one_line(error) or f"{type(error).__name__}: {error}")
    spent = structs.replace(opened.spent, encode_s=perf_counter() - encode_s)
    times = WorkerTimes(spent=spent, busy_s=perf_counter() - begin_s, cpu_s=process_time() - begin_cpu_s)
    return SplitReady(lease.worker, lease.place, encoded.layout, times)


if __name__ == "__main__":
    main()
