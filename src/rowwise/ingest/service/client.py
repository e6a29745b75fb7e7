"""A trainer's end of a service: splits, in order and each once, from memory that workers have written.

The arrays of a split are views of shared memory; once nothing refers to them any more, the service is told, and the
memory is used again. When the host is gone, whoever owns it starts another, and clients go on from where they stand:
what they have taken they never take again, whoever offers it.
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

from rowwise.errors import DataError, PeerError
from rowwise.ingest.block import Bytes, Encoded
from rowwise.ingest.service.coordinator import ClientAttached, SplitDelivery, SplitId, SplitReleased, WorkerTimes
from rowwise.ingest.service.memory import SlotMemory
from rowwise.ingest.service.messages import Connection, Message
from rowwise.spec import Value

POLL_S = 0.05


class ServiceHealth(Value, frozen=True):
    """The number of workers, ready splits and restarts of a service."""

    splits: int = 0  # that were taken
    waited_s: float = 0.0  # for them
    workers: int = 0
    ready: int = 0  # splits that were prepared when the last one was taken
    times: WorkerTimes = WorkerTimes()  # of all splits that were taken, summed
    restarts: int = 0  # of the host


class SplitTransport(Protocol):
    """Carries splits from a service to a trainer."""

    restarts: int  # of the coordinator, that it has met

    def attach(self, place: SplitId, waited_s: float) -> None:
        """Ask for the splits from here on; those of before are forgotten."""
        ...

    def take(self, place: SplitId, count: int, waited_s: float) -> tuple[SplitDelivery, Bytes | None]:
        """The next split of an epoch of so many, and its block; those before it are no longer used."""
        ...

    def close(self) -> None:
        """Hang up; a trainer that waits for a split meets a PeerError."""
        ...


@final
class ServiceClient:
    """A trainer's end of a service: gives splits in order, each once."""

    def __init__(self, transport: SplitTransport) -> None:
        self._transport = transport
        self.health = ServiceHealth()

    def splits(self, epoch: int, at: int, count: int) -> Iterator[Encoded]:
        """The splits of an epoch from a position on; valid until another epoch begins."""
        self._transport.attach(SplitId(epoch, at), self.health.waited_s)
        for number in range(at, count):
            begin_s = perf_counter()
            give, block = self._transport.take(SplitId(epoch, number), count, self.health.waited_s)
            if give.split is None or block is None:
                raise DataError(give.error or "")
            self._note(give, give.split.times, perf_counter() - begin_s)
            yield Encoded.of(block, give.split.layout)

    def close(self) -> None:
        self._transport.close()

    def _note(self, give: SplitDelivery, times: WorkerTimes, waited_s: float) -> None:
        health = self.health
        self.health = ServiceHealth(
            splits=health.splits + 1,
            waited_s=health.waited_s + waited_s,
            workers=give.workers,
            ready=give.ready,
            times=sum_of(health.times, times),
            restarts=self._transport.restarts,
        )


@final
class HostTransport:
    """To a host on this machine.

    Args:
        number: of the client, from 0 on.
        call: connects to the host; told how many workers a host had that is gone, it is for another one to be started,
            where that is this client's to do. Raises PeerError in the end.
        is_alive: whether anybody will ever answer.
    """

    def __init__(self, number: int, call: Callable[[int | None], Connection], is_alive: Callable[[], bool]) -> None:
        self._number, self._call, self._is_alive = number, call, is_alive
        self._line: Connection | None = None
        self._slots: dict[int, SlotMemory] = {}
        self._arrived: dict[SplitId, SplitDelivery] = {}
        self._released: deque[int] = deque()  # in any thread, at any time: appending is all that may be done there
        self._held: dict[int, SplitId] = {}  # a split may be taken twice: each time it is told apart
        self._looks = count()
        self._told: SplitId | None = None
        self._closed = False
        self._waited_s, self._workers = 0.0, 0
        self.restarts = 0

    def attach(self, place: SplitId, waited_s: float) -> None:
        """Ask the host, or the next one."""
        self._waited_s = waited_s
        self._arrived.clear()
        self._held.clear()
        self._hello(place)

    def take(self, place: SplitId, count: int, waited_s: float) -> tuple[SplitDelivery, Bytes | None]:
        """A view of the slot that the split is in."""
        self._waited_s = waited_s
        with contextlib.suppress(PeerError):  # that the host is gone matters when something is wanted of it
            self._tell_released(place)
        while place not in self._arrived:
            self._receive(place)
        give = self._arrived.pop(place)
        self._workers = give.workers
        return give, None if give.split is None else self._look(give, give.split.layout.size)

    def close(self) -> None:
        self._closed = True
        if self._line is not None:
            self._line.close()
        for slot in self._slots.values():
            slot.close()
        self._line = None

    def _look(self, give: SplitDelivery, size_bytes: int) -> Bytes:
        """The block of a split; the service hears when it is gone."""
        assert give.slot is not None
        memory = self._slots[give.slot].look(size_bytes)
        block = (ctypes.c_char * size_bytes).from_buffer(memory)
        look = next(self._looks)
        self._held[look] = give.place
        weakref.finalize(block, self._released.append, look)
        return np.frombuffer(memoryview(block), np.uint8)

    def _receive(self, wanted: SplitId) -> None:
        """Receive once, and send pending releases."""
        line = self._line
        if self._closed or line is None:
            raise PeerError("the service that prepares rows was closed")
        try:
            self._tell_released(wanted)
            messages = line.receive()
        except PeerError:
            self._reconnect(wanted)
            return
        for message, file in messages:
            self._heard(message, file, wanted)
        if not messages and not self._is_alive():
            self._reconnect(wanted)

    def _heard(self, message: Message, file: int | None, wanted: SplitId) -> None:
        assert isinstance(message, SplitDelivery)
        if file is not None:
            assert message.slot is not None
            self._slots[message.slot] = SlotMemory(file)
        if message.place >= wanted:  # what was taken before is not taken again, whoever offers it
            self._arrived[message.place] = message

    def _tell_released(self, wanted: SplitId) -> None:
        """All splits up to the first that is still held are done with."""
        while self._released:
            self._held.pop(self._released.popleft(), None)
        first = min(self._held.values(), default=wanted)
        last = SplitId(first.epoch, first.at - 1)
        if self._line is not None and last.at >= 0 and last != self._told:
            self._line.send(SplitReleased(self._number, last, self._waited_s))
            self._told = last

    def _hello(self, place: SplitId) -> None:
        self._told = None
        if self._line is None:
            self._connect(None)
        assert self._line is not None
        try:
            self._line.send(ClientAttached(self._number, place, self._waited_s))
        except PeerError:
            self._reconnect(place)

    def _connect(self, workers: int | None) -> None:
        self._line = self._call(workers)
        self._line.socket.settimeout(POLL_S)

    def _reconnect(self, place: SplitId) -> None:
        """Connect to a new host after the old one is gone; splits from the old host stay usable."""
        if self._closed:
            return
        if self._line is not None:
            self._line.close()
        self.restarts += 1
        self._arrived.clear()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._connect(max(self._workers, 1))
        self._hello(place)


def sum_of(a: WorkerTimes, b: WorkerTimes) -> WorkerTimes:
    spent = {name: getattr(a.spent, name) + getattr(b.spent, name) for name in a.spent.__struct_fields__}
    return WorkerTimes(spent=structs.replace(a.spent, **spent), busy_s=a.busy_s + b.busy_s, cpu_s=a.cpu_s + b.cpu_s)
