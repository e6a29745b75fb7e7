"""`TransportComm`: implements `Comm` over a `Transport`, which has three methods only.

It checks each collective and counts its bytes: what the collective needs, not what the transport sends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol, final

from torch import Tensor

from rowwise.parallel.comm.call import CollectiveCall, check_call, count_sent, find_group
from rowwise.parallel.comm.interface import BytesSent, Transfer, TransferObserver, WaitTime, Work
from rowwise.tables.spec import Topology


class Transport(Protocol):
    """Runs the collectives of one group of ranks."""

    waited: WaitTime  # shared with the transports of split groups

    def start(self, call: CollectiveCall, send_N: Tensor) -> "PendingCollective":
        """Start a collective; the tensor is contiguous and detached."""
        ...

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "Transport":
        """The transport of this rank's group; ranks are of the world."""
        ...

    def close(self) -> None:
        """Release connections and memory."""
        ...


class ReceivedTensor(NamedTuple):
    """The result of a collective, and when its data had arrived: [Note: Transfers] in `interface.py`."""

    tensor: Tensor
    arrived_s: float


@final
@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective in flight, with the function that finishes it."""

    finish: Callable[[], ReceivedTensor]

    def wait(self) -> Tensor:
        return self.finish().tensor


@final
class _ObservedCollective:
    """A collective whose transfer is reported."""

    __slots__ = ("_begin_s", "_call", "_observer", "_pending", "_stage", "_step")

    def __init__(
        self, pending: PendingCollective, observer: TransferObserver, call: CollectiveCall, begin_s: float
    ) -> None:
        self._pending, self._observer, self._call, self._begin_s = pending, observer, call, begin_s
        self._stage, self._step = observer.stage, observer.step

    def wait(self) -> Tensor:
        wait_s = perf_counter()
        received, arrived_s = self._pending.finish()
        report, call = self._observer.report, self._call
        if report is not None:
            report(Transfer(call.purpose, call.collective, self._stage, self._step, self._begin_s, arrived_s, wait_s))
        return received


@final
class TransportComm:
    """A `Comm` over a transport."""

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        rank: int,
        ranks: Sequence[int] = (),
        sent: BytesSent | None = None,
        observer: TransferObserver | None = None,
    ) -> None:
        """`rank` and `ranks` are of the world; by default all its ranks."""
        self.transport = transport
        self.topology = topology
        self.ranks = tuple(ranks) or tuple(range(topology.world))
        self.rank = self.ranks.index(rank)
        self.sent = sent or BytesSent()
        self.waited = transport.waited
        self.observer = observer or TransferObserver()

    def all_to_all(
        self, send_N: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], purpose: str
    ) -> Work:
        return self._start("all_to_all", send_N, input_splits, output_splits, purpose)

    def all_gather(self, send_N: Tensor, output_splits: Sequence[int], purpose: str) -> Work:
        return self._start("all_gather", send_N, (send_N.numel(),) * len(self.ranks), output_splits, purpose)

    def reduce_scatter(self, send_N: Tensor, input_splits: Sequence[int], purpose: str) -> Work:
        size = input_splits[self.rank] if self.rank < len(input_splits) else 0
        return self._start("reduce_scatter", send_N, input_splits, (size,) * len(self.ranks), purpose)

    def all_reduce(self, tensor_N: Tensor, purpose: str) -> Work:
        input_splits = (tensor_N.numel(),) * len(self.ranks)
        return self._start("all_reduce", tensor_N, input_splits, input_splits, purpose)

    def split(self, groups: Sequence[Sequence[int]]) -> "TransportComm":
        me = self.ranks[self.rank]
        group = find_group(groups, self.ranks, me)
        return TransportComm(self.transport.split(groups, group), self.topology, me, group, self.sent, self.observer)

    def close(self) -> None:
        self.transport.close()

    def _start(
        self, collective: str, send_N: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], purpose: str
    ) -> Work:
        call = CollectiveCall(collective, purpose, send_N.dtype, tuple(input_splits), tuple(output_splits))
        check_call(call, send_N, self.ranks, self.rank)
        for link, count_bytes in count_sent(call, self.ranks, self.rank, self.topology).items():
            self.sent.add(purpose, collective, link, count_bytes)
        if self.observer.report is None:
            return self.transport.start(call, send_N.detach().contiguous())
        begin_s = perf_counter()
        pending = self.transport.start(call, send_N.detach().contiguous())
        return _ObservedCollective(pending, self.observer, call, begin_s)
