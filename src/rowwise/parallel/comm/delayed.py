"""`DelayedTransport`: runs a transport as over a slower link, for tests and benchmarks of overlap on one machine.

Each rank calls a collective of the inner transport when its data would have arrived, so a collective ends at the
arrival of the last rank's data. Calls do not block: a thread per group sleeps until then, which needs no privilege,
unlike netem, and no processor. The bytes of a rank, of all its groups, queue for one link; latencies overlap. Tensors
between CPUs only.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from torch import Tensor

from rowwise.parallel.comm.call import CollectiveCall, count_sent
from rowwise.parallel.comm.call_thread import CallThread
from rowwise.parallel.comm.group import PendingCollective, Transport, TransportComm
from rowwise.parallel.comm.simulated_link import SimulatedLink
from rowwise.tables.spec import Topology


@final
@dataclass(slots=True)
class LinkQueue:
    """One rank's end of the link. The link may change between collectives, on all ranks alike."""

    link: SimulatedLink
    free_s: float = 0.0  # time at which all queued bytes are sent
    _sending: threading.Lock = field(default_factory=threading.Lock)  # groups may be used by several threads

    def send(self, count_bytes: int) -> float:
        """Queue bytes; returns their time of arrival."""
        with self._sending:
            self.free_s = max(self.free_s, time.monotonic()) + count_bytes / self.link.bytes_s
            return self.free_s + self.link.latency_s


@final
class DelayedTransport:
    """Delays each collective of another transport."""

    def __init__(self, inner: Transport, queue: LinkQueue, ranks: tuple[int, ...], rank: int) -> None:
        """`ranks` of the group and `rank`, all of the world."""
        self.inner, self.waited = inner, inner.waited  # the delay itself counts as transfer
        self.queue, self._ranks, self._rank = queue, ranks, rank
        self._thread = CallThread("delayed link")

    def start(self, call: CollectiveCall, send_N: Tensor) -> PendingCollective:
        w = len(self._ranks)
        sent = count_sent(call, range(w), self._ranks.index(self._rank), Topology(devices=w))
        # Not copied: the caller may change the tensor only after `wait`.
        arrival_s = self.queue.send(sum(sent.values()))
        started = self._thread.call(partial(self.inner.start, call, send_N), arrival_s)
        return PendingCollective(lambda: started.result().finish())

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> Transport:
        # In the order of the calls, as some transports number calls and splits together.
        inner = self._thread.call(partial(self.inner.split, groups, group)).result()
        if len(group) == 1:
            return inner
        return DelayedTransport(inner, self.queue, group, self._rank)

    def close(self) -> None:
        self._thread.close()
        self.inner.close()


def delay(comm: TransportComm, link: SimulatedLink) -> TransportComm:
    """The same ranks over a slower link; a group of one rank has no link."""
    if len(comm.ranks) == 1:
        return comm
    transport = DelayedTransport(comm.transport, LinkQueue(link), comm.ranks, comm.ranks[comm.rank])
    return TransportComm(transport, comm.topology, comm.ranks[comm.rank], comm.ranks, comm.sent, comm.observer)
