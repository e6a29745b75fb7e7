"""`rehearsal_comm`: a `Comm` of one rank without other ranks; it records collectives with their true shapes.

All ranks are assumed to have this rank's batch. So what another rank would send here equals what this rank sends itself
(counts, ids, gradients of copies), and that is what arrives. A rank sends itself no vectors, as they stay in place;
from other ranks vectors arrive as zeros.

torch's fake process group does not do: its results have a size but no values, and here received counts determine the
sizes of the collectives that follow.
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
        """A run from each rank: a copy of this rank's run for itself if it has the expected size, else zeros."""
        own_N, expected = run_for(call, send_N, self._me), call.receives_W[self._me]
        if len(own_N) != expected:
            raise PeerError(f"rank {self._rank}: {call} sends {len(own_N)} elements to itself, and expects {expected}")
        came_N = send_N.new_zeros(sum(call.receives_W))
        for run_N in came_N.split(list(call.receives_W)):
            if len(run_N) == len(own_N):
                run_N.copy_(own_N)
        return came_N

    def _add_up(self, call: CollectiveCall, send_N: Tensor) -> Tensor:
        """All-reduce: equal gradients of copies from all ranks. Reduce-scatter: zeros from the other ranks."""
        whole = call.collective == "all_reduce"
        return send_N * len(call.sizes_W) if whole else run_for(call, send_N, self._me).clone()


def rehearsal_comm(topology: Topology, rank: int) -> tuple[TransportComm, list[CollectiveCall]]:
    """A `Comm` for this rank, and the list to which it appends each collective."""
    if not 0 <= rank < topology.world:
        raise PeerError(f"rank {rank} of {topology.world}: want 0 to {topology.world - 1}")
    calls: list[CollectiveCall] = []
    return TransportComm(_RehearsalTransport(rank, tuple(range(topology.world)), calls), topology, rank), calls
