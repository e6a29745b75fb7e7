"""A trainer's end of a service: receives prepared splits in order, exactly once, in shared memory.

The arrays of a split are views of shared memory. When the last reference to them is dropped, the client releases the
split, and the service reuses the memory. When the host dies, its owner starts another host, and each client reattaches
with its own position; deliveries before that position are ignored.
"""

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from time import perf_counter
from typing import Protocol, final

import numpy as np
from msgspec import structs

from rowwise.base.errors import DataError, PeerError
from rowwise.ingest.block import Bytes, EncodedRows
from rowwise.ingest.service.coordinator import ClientAttached, SplitDelivery, SplitId, SplitReleased, WorkerTimes
from rowwise.ingest.service.memory import SlotMemory
from rowwise.ingest.service.messages import Connection, Message
from rowwise.tables.spec import Value

POLL_S = 0.05


class ServiceHealth(Value, frozen=True):
    """A client's counters of splits and waits, and the workers and ready splits of its service."""

    splits: int = 0  # taken by this client
    waited_s: float = 0.0  # by this client, for these splits
    workers: int = 0
    ready: int = 0  # backlog of prepared splits at the last delivery
    times: WorkerTimes = WorkerTimes()  # of the workers, summed over the splits taken
    restarts: int = 0  # of the host


class SplitTransport(Protocol):
    """Carries splits from a service to a trainer."""

    restarts: int  # of the coordinator, since this transport was made

    def attach(self, split_id: SplitId, waited_s: float) -> None:
        """Request the splits from this one on; earlier requests are void."""
        ...

    def take(self, split_id: SplitId, count: int, waited_s: float) -> tuple[SplitDelivery, Bytes | None]:
        """Wait for the next split of an epoch of `count` splits; the block of a refused split is None."""
        ...

    def close(self) -> None:
        """Close the connection; a blocked `take` raises PeerError."""
        ...


@final
class ServiceClient:
    """Iterates over the prepared splits of a service, and measures the time spent waiting for them."""

    def __init__(self, transport: SplitTransport) -> None:
        self._transport = transport
        self.health = ServiceHealth()

    def splits(self, epoch: int, at: int, count: int) -> Iterator[EncodedRows]:
        """The splits `at` to `count` of an epoch. Their arrays are valid until the next call."""
        self._transport.attach(SplitId(epoch, at), self.health.waited_s)
        for number in range(at, count):
            begin_s = perf_counter()
            delivery, block = self._transport.take(SplitId(epoch, number), count, self.health.waited_s)
            if delivery.split is None or block is None:
                raise DataError(delivery.error or f"the service sent no rows of split {number}: resume the run")
            self._count(delivery, delivery.split.times, perf_counter() - begin_s)
            yield EncodedRows.from_block(block, delivery.split.layout)

    def close(self) -> None:
        self._transport.close()

    def _count(self, delivery: SplitDelivery, times: WorkerTimes, waited_s: float) -> None:
        health = self.health
        self.health = ServiceHealth(
            splits=health.splits + 1,
            waited_s=health.waited_s + waited_s,
            workers=delivery.workers,
            ready=delivery.ready,
            times=add_times(health.times, times),
            restarts=self._transport.restarts,
        )


@final
class HostTransport:
    """Carries splits from a host on this machine.

    Args:
        number: the client's number, from 0 on.
        connect: connects to the host. Given the worker count of a dead host, the owner's `connect` first starts a
            replacement with as many workers. Raises PeerError when it gives up.
        is_alive: whether the host, or its owner, still runs.
    """

    def __init__(self, number: int, connect: Callable[[int | None], Connection], is_alive: Callable[[], bool]) -> None:
        self._number, self._connect, self._is_alive = number, connect, is_alive
        self._connection: Connection | None = None
        self._slots: dict[int, SlotMemory] = {}
        self._deliveries: dict[SplitId, SplitDelivery] = {}
        # Ids of collected views. Finalizers run in any thread at any time, so they only append here (atomic).
        self._released: deque[int] = deque()
        self._views: dict[int, SplitId] = {}  # by view id; a split taken twice has two views
        self._view_ids = count()
        self._last_released: SplitId | None = None
        self._closed = False
        self._waited_s, self._workers = 0.0, 0
        self.restarts = 0

    def attach(self, split_id: SplitId, waited_s: float) -> None:
        """Attach to the host, or to the one that replaces it."""
        self._waited_s = waited_s
        self._deliveries.clear()
        self._views.clear()
        self._send_attach(split_id)

    def take(self, split_id: SplitId, count: int, waited_s: float) -> tuple[SplitDelivery, Bytes | None]:
        """Wait for the delivery, and map the slot that holds the split."""
        self._waited_s = waited_s
        with contextlib.suppress(PeerError):  # a dead host matters only if the split has not arrived: see _receive
            self._send_released(split_id)
        while split_id not in self._deliveries:
            self._receive(split_id)
        delivery = self._deliveries.pop(split_id)
        self._workers = delivery.workers
        return delivery, None if delivery.split is None else self._map_block(delivery, delivery.split.layout.size)

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        for slot in self._slots.values():
            slot.close()
        self._connection = None

    def _map_block(self, delivery: SplitDelivery, size_bytes: int) -> Bytes:
        """The block of a split; the split is released when the last view of the block is collected."""
        assert delivery.slot is not None
        memory = self._slots[delivery.slot].map(size_bytes)
        # An object per view, kept alive by every numpy array over it: the mmap itself outlives the view.
        block = (ctypes.c_char * size_bytes).from_buffer(memory)
        view = next(self._view_ids)
        self._views[view] = delivery.split_id
        weakref.finalize(block, self._released.append, view)
        return np.frombuffer(memoryview(block), np.uint8)

    def _receive(self, wanted: SplitId) -> None:
        """Send releases and store the deliveries that arrive within POLL_S; reconnect if the host died."""
        connection = self._connection
        if self._closed or connection is None:
            raise PeerError(
                f"the service that prepares rows was closed before split {wanted.index}", hint="resume the run"
            )
        try:
            self._send_released(wanted)
            messages = connection.receive()
        except PeerError:
            self._reconnect(wanted)
            return
        for message, file in messages:
            self._store_delivery(message, file, wanted)
        if not messages and not self._is_alive():
            self._reconnect(wanted)

    def _store_delivery(self, message: Message, file: int | None, wanted: SplitId) -> None:
        assert isinstance(message, SplitDelivery)
        if file is not None:
            assert message.slot is not None
            self._slots[message.slot] = SlotMemory(file)
        if message.split_id >= wanted:  # a new host may deliver splits already taken from the old host
            self._deliveries[message.split_id] = message

    def _send_released(self, wanted: SplitId) -> None:
        """Release all splits before the first one with a live view."""
        while self._released:
            self._views.pop(self._released.popleft(), None)
        first = min(self._views.values(), default=wanted)
        last = SplitId(first.epoch, first.index - 1)
        if self._connection is not None and last.index >= 0 and last != self._last_released:
            self._connection.send(SplitReleased(self._number, last, self._waited_s))
            self._last_released = last

    def _send_attach(self, split_id: SplitId) -> None:
        self._last_released = None
        if self._connection is None:
            self._open_connection(None)
        assert self._connection is not None
        try:
            self._connection.send(ClientAttached(self._number, split_id, self._waited_s))
        except PeerError:
            self._reconnect(split_id)

    def _open_connection(self, workers: int | None) -> None:
        self._connection = self._connect(workers)
        self._connection.socket.settimeout(POLL_S)

    def _reconnect(self, split_id: SplitId) -> None:
        """Attach to a new host. Views of the old host's memory stay valid: each holds a reference to the mapping."""
        if self._closed:
            return
        if self._connection is not None:
            self._connection.close()
        self.restarts += 1
        self._deliveries.clear()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._open_connection(max(self._workers, 1))
        self._send_attach(split_id)


def add_times(a: WorkerTimes, b: WorkerTimes) -> WorkerTimes:
    spent = {name: getattr(a.spent, name) + getattr(b.spent, name) for name in a.spent.__struct_fields__}
    return WorkerTimes(spent=structs.replace(a.spent, **spent), busy_s=a.busy_s + b.busy_s, cpu_s=a.cpu_s + b.cpu_s)
