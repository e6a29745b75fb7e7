"""`TransportComm`: the one class behind the seam. Checks and counts a collective, then hands it to a `Transport`.

Its own file so that counting and checking are in one place, and a way to travel is three methods. Known limits: a
transport cannot count what it really sends; bytes are those that the collective needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from rowwise.comm.call import CollectiveCall, check_call, count_sent, find_group
from rowwise.comm.seam import BytesSent, Handle, WaitTime
from rowwise.spec import Topology


class Transport(Protocol):
    """Carries out the collectives of one group."""

    waited: WaitTime  # shared with the transports of groups that are split off

    def start(self, call: CollectiveCall, send_N: Tensor) -> Handle:
        """Begin a collective; the tensor is contiguous, and has no gradient."""
        ...

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "Transport":
        """The same for this rank's group of the world's ranks."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


@final
@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective under way: what is left to do when it is waited for."""

    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        return self.finish()


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
    ) -> None:
        """`rank` and `ranks` are of the world; no ranks: all of it."""
        self.transport = transport
        self.topology = topology
        self.ranks = tuple(ranks) or tuple(range(topology.world))
        self.rank = self.ranks.index(rank)
        self.sent = sent or BytesSent()
        self.waited = transport.waited

    def all_to_all(self, send_N: Tensor, sizes_W: Sequence[int], receives_W: Sequence[int], what: str) -> Handle:
        """Send a run to each rank."""
        return self._start("all_to_all", send_N, sizes_W, receives_W, what)

    def all_gather(self, send_N: Tensor, receives_W: Sequence[int], what: str) -> Handle:
        """Send everything to everybody."""
        return self._start("all_gather", send_N, (send_N.numel(),) * len(self.ranks), receives_W, what)

    def reduce_scatter(self, send_N: Tensor, sizes_W: Sequence[int], what: str) -> Handle:
        """The sum of what all ranks have for this one, added in rank order."""
        own = sizes_W[self.rank] if self.rank < len(sizes_W) else 0
        return self._start("reduce_scatter", send_N, sizes_W, (own,) * len(self.ranks), what)

    def all_reduce(self, tensor_N: Tensor, what: str) -> Handle:
        """The sum over all ranks."""
        sizes_W = (tensor_N.numel(),) * len(self.ranks)
        return self._start("all_reduce", tensor_N, sizes_W, sizes_W, what)

    def split(self, groups: Sequence[Sequence[int]]) -> "TransportComm":
        """This rank's group out of several, given as ranks of the world; bytes are counted together."""
        me = self.ranks[self.rank]
        group = find_group(groups, self.ranks, me)
        return TransportComm(self.transport.split(groups, group), self.topology, me, group, self.sent)

    def close(self) -> None:
        """Give up what it holds."""
        self.transport.close()

    def _start(
        self, collective: str, send_N: Tensor, sizes_W: Sequence[int], receives_W: Sequence[int], what: str
    ) -> Handle:
        sizes_W, receives_W = tuple(sizes_W), tuple(receives_W)
        call = CollectiveCall(
            collective=collective, what=what, dtype=send_N.dtype, sizes_W=sizes_W, receives_W=receives_W
        )
        check_call(call, send_N, self.ranks, self.rank)
        for link, count_bytes in count_sent(call, self.ranks, self.rank, self.topology).items():
            self.sent.add(what, collective, link, count_bytes)
        return self.transport.start(call, send_N.detach().contiguous())
