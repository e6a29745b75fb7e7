"""A worker process: prepares one leased split after another, and keeps no state between them.

It reads, transforms and encodes a split straight into memory that clients map. If a split raises an error, the worker
sends the error to the clients and goes on. Not supported: reading the next split while one is encoded; another worker
does that.
"""

import contextlib
import pickle
import signal
import socket
import sys
from time import perf_counter, process_time

import pyarrow as pa
from msgspec import structs

from rowwise.base.errors import PeerError, one_line
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

TASK = -1  # the slot number under which the pickled task arrives


def main() -> None:
    """Work until the host closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; exit with the host
    pa.set_cpu_count(1)  # parallelism comes from the number of workers: Arrow's threads would compete with them
    with contextlib.suppress(PeerError), socket.socket(fileno=int(sys.argv[1])) as end:
        work(Connection(end))


def work(connection: Connection) -> None:
    """Load the task, then prepare the splits that the host leases."""
    task: PreparationTask | None = None
    slots: dict[int, SlotMemory] = {}
    while True:
        for message, file in connection.receive():
            if file is not None:
                slots[message.slot if isinstance(message, SplitLease) else TASK] = SlotMemory(file)
            if isinstance(message, WorkerSetup):
                sys.path += [folder for folder in message.path if folder not in sys.path]
                try:
                    task = pickle.loads(slots.pop(TASK).map(message.size_bytes)[: message.size_bytes])
                except (pickle.UnpicklingError, AttributeError, ImportError) as error:
                    expected = "expected functions of modules that workers can import, not of __main__"
                    connection.send(
                        WorkerLost(
                            message.worker, f"a worker cannot load the reader or transforms: {error}: {expected}"
                        )
                    )
                    return
                connection.send(WorkerJoined(message.worker))
            else:
                assert isinstance(message, SplitLease)
                assert task is not None
                connection.send(prepare_split(task, message, slots[message.slot].resize))


def prepare_split(task: PreparationTask, lease: SplitLease, allocator: block.Allocator) -> SplitReady | SplitRefused:
    """Read and encode a leased split into memory of `allocator`; any error is returned, for the clients to raise."""
    begin_s, begin_cpu_s = perf_counter(), process_time()
    try:
        opened = task.open(task.order(lease.split_id.epoch)[lease.split_id.index], lease.split_id.epoch)
        encode_s = perf_counter()
        encoded = opened.encode(allocator=allocator)
    except Exception as error:
        # Any exception: the trainer raises it on reaching this split, at the same batch as without workers.
        return SplitRefused(lease.worker, lease.split_id, one_line(error) or f"{type(error).__name__}: {error}")
    spent = structs.replace(opened.spent, encode_s=perf_counter() - encode_s)
    times = WorkerTimes(spent=spent, busy_s=perf_counter() - begin_s, cpu_s=process_time() - begin_cpu_s)
    return SplitReady(lease.worker, lease.split_id, encoded.layout, times)


if __name__ == "__main__":
    main()
