"""One rank of a world whose other ranks are not there: its collectives have their true shapes, and are written down.

All ranks are taken to have the batch of this one. Then what another rank has for this one is what this one has for
itself: the same counts, the same ids, the same gradients of copies, and that is what arrives. Of vectors a rank sends
itself nothing, as they stay where they are; from other ranks they arrive as zeros, as if all their rows were zero.

It is not made of torch's fake process group, which gives what arrives a size and not its numbers: here counts arrive
that say how much comes next. Known limits: the numbers of vectors, and batches that differ between ranks.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from rowwise.comm.call import SUMS, CollectiveCall, run_for
from rowwise.comm.group import PendingCollective, TransportComm
from rowwise.comm.seam import Handle, WaitTime
from rowwise.errors import PeerError
from rowwise.spec import Topology


@final
class _RehearsalTransport:
    """To ranks that are not there."""

    def __init__(self, rank: int, ranks: tuple[int, ...], calls: list[CollectiveCall]) -> None:
        self._rank, self._me, self._calls = rank, ranks.index(rank), calls
        self.waited = WaitTime()

    def start(self, call: CollectiveCall, send_N: Tensor) -> Handle:
        self._calls.append(call)
        came = self._add_up(call, send_N) if call.collective in SUMS else self._answer(call, send_N)
        return PendingCollective(lambda: came)

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "_RehearsalTransport":
        return _RehearsalTransport(self._rank, group, self._calls)

    def close(self) -> None:
        pass

    def _answer(self, call: CollectiveCall, send_N: Tensor) -> Tensor:
        """A run from each rank: this rank's own, where that is as much as is expected; else zeros."""
        own_N, expected = run_for(call, send_N, self._me), call.receives_W[self._me]
        if len(own_N) != expected:
            raise PeerError(f"rank {self._rank}: {call} sends {len(own_N)} elements to itself, and expects {expected}")
        came_N = send_N.new_zeros(sum(call.receives_W))
        for run_N in came_N.split(list(call.receives_W)):
            if len(run_N) == len(own_N):
                run_N.copy_(own_N)
        return came_N

    def _add_up(self, call: CollectiveCall, send_N: Tensor) -> Tensor:
        """Copies have the same sums everywhere; of what is added up for this rank, the others have zeros."""
        whole = call.collective == "all_reduce"
        return send_N * len(call.sizes_W) if whole else run_for(call, send_N, self._me).clone()


def rehearsal_comm(topology: Topology, rank: int) -> tuple[TransportComm, list[CollectiveCall]]:
    """This rank's `Comm`, whose bytes are counted as any other's, and the list of its collectives, which grows."""
    if not 0 <= rank < topology.world:
        raise PeerError(f"rank {rank} of {topology.world}: want 0 to {topology.world - 1}")
    calls: list[CollectiveCall] = []
    return TransportComm(_RehearsalTransport(rank, tuple(range(topology.world)), calls), topology, rank), calls
