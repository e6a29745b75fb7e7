"""`solo`: the `Comm` of a world of one rank. A collective returns its input tensor, not a copy."""

from collections.abc import Sequence
from time import perf_counter
from typing import final

from torch import Tensor

from rowwise.base.errors import PeerError
from rowwise.parallel.comm.call import CollectiveCall
from rowwise.parallel.comm.group import PendingCollective, ReceivedTensor, TransportComm
from rowwise.parallel.comm.interface import WaitTime
from rowwise.tables.spec import Topology


@final
class _SoloTransport:
    def __init__(self) -> None:
        self.waited = WaitTime()

    def start(self, call: CollectiveCall, send_N: Tensor) -> PendingCollective:
        if call.input_splits != call.output_splits:
            sizes = f"sends {call.input_splits[0]} elements to itself, and expects {call.output_splits[0]}"
            raise PeerError(f"{call}: rank 0 {sizes}", "equal sizes")
        received = ReceivedTensor(send_N, perf_counter())
        return PendingCollective(lambda: received)

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "_SoloTransport":
        return self

    def close(self) -> None:
        pass


def solo() -> TransportComm:
    return TransportComm(_SoloTransport(), Topology(), 0)
