"""`rehearsal_comm`: a `Comm` of one rank without other ranks; it records collectives with their true shapes.

All ranks are assumed to have this rank's batch. So data received from another rank (counts, ids, gradients of
replicated tables) equal this rank's segment for itself. Only vectors have no such segment, as they stay in place: from
other ranks they arrive as zeros.

torch's fake process group is not enough: its results have a size but no values, and here received counts determine the
sizes of later collectives.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import final

from torch import Tensor

from rowwise.base.errors import PeerError
from rowwise.parallel.comm.call import SUMS, CollectiveCall, segment_for
from rowwise.parallel.comm.group import PendingCollective, ReceivedTensor, TransportComm
from rowwise.parallel.comm.interface import WaitTime
from rowwise.tables.spec import Topology


@final
class _RehearsalTransport:
    def __init__(self, rank: int, ranks: tuple[int, ...], calls: list[CollectiveCall]) -> None:
        self._rank, self._me, self._calls = rank, ranks.index(rank), calls
        self.waited = WaitTime()

    def start(self, call: CollectiveCall, send_N: Tensor) -> PendingCollective:
        self._calls.append(call)
        answer = self._add_up(call, send_N) if call.collective in SUMS else self._answer(call, send_N)
        received = ReceivedTensor(answer, perf_counter())
        return PendingCollective(lambda: received)

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "_RehearsalTransport":
        return _RehearsalTransport(self._rank, group, self._calls)

    def close(self) -> None:
        pass

    def _answer(self, call: CollectiveCall, send_N: Tensor) -> Tensor:
        """A segment from each rank: a copy of this rank's for itself if it has the expected size, else zeros."""
        own_N, expected = segment_for(call, send_N, self._me), call.output_splits[self._me]
        if len(own_N) != expected:
            sizes = f"sends {len(own_N)} elements to itself, and expects {expected}"
            raise PeerError(f"rank {self._rank}: {call} {sizes}", "equal sizes")
        received_N = send_N.new_zeros(sum(call.output_splits))
        for segment_N in received_N.split(list(call.output_splits)):
            if len(segment_N) == len(own_N):
                segment_N.copy_(own_N)
        return received_N

    def _add_up(self, call: CollectiveCall, send_N: Tensor) -> Tensor:
        """All-reduce: all ranks have equal gradients of replicated tables. Reduce-scatter: zeros from other ranks."""
        own_N = segment_for(call, send_N, self._me)
        return own_N * len(call.input_splits) if call.collective == "all_reduce" else own_N.clone()


def rehearsal_comm(topology: Topology, rank: int) -> tuple[TransportComm, list[CollectiveCall]]:
    """A `Comm` for this rank, and the list to which it appends each collective."""
    if not 0 <= rank < topology.world:
        raise PeerError(f"rank {rank} of {topology.world}", f"0 to {topology.world - 1}, or a larger topology")
    calls: list[CollectiveCall] = []
    return TransportComm(_RehearsalTransport(rank, tuple(range(topology.world)), calls), topology, rank), calls
