"""`Comm`: the protocol of communication between ranks, with several implementations.

Four collectives over flat tensors, with uneven splits, all asynchronous. Every rank of a process group calls the same
collectives in the same order. Both sides know all splits, so no collective exchanges any. Bytes are counted by purpose
("ids", "pooled", ...). There are no point-to-point messages, and no encoded sums: lossy wires encode blocks and use
all-to-all (`codec.py`).

[Note: Transfers] A transfer lasts from the call of a collective until the data of all ranks have arrived, with exact
ends for threads and shared memory: there the data have arrived when the last rank has copied its data into shared
memory; later copies and sums are part of `wait`. Gloo's ends are reported by its thread, slightly late under contention
for Python's lock. For other backends the end is an upper bound: that of the `wait`. The waiting thread reports a
transfer, so a transfer without a `wait` is not reported.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock, local
from typing import NamedTuple, Protocol, final

from torch import Tensor

from rowwise.tables.spec import Link, Topology


@dataclass(slots=True)
class BytesSent:
    """Bytes that this rank has sent to other ranks, by purpose, collective and link; split groups count here too."""

    counts: Counter[tuple[str, str, Link]] = field(default_factory=Counter)
    _adding: Lock = field(default_factory=Lock, repr=False, compare=False)  # groups may be used by several threads

    def add(self, purpose: str, collective: str, link: Link, count_bytes: int) -> None:
        if count_bytes:
            with self._adding:
                self.counts[purpose, collective, link] += count_bytes

    def total(self, purpose: str | None = None, collective: str | None = None, link: Link | None = None) -> int:
        """Bytes of one purpose, collective and link; None matches any."""
        pattern = (purpose, collective, link)
        counts = list(self.counts.items())
        return sum(n for key, n in counts if all(p in (None, k) for p, k in zip(pattern, key, strict=True)))


@final
class WaitTime(local):
    """Seconds that the current thread has waited for other ranks to begin a collective, in split groups too.

    Transfers do not count. Always 0 for transports that cannot separate waiting from transferring.
    """

    seconds: float = 0.0
    end_s: float = 0.0  # when the last wait ended, by `time.perf_counter`

    def add(self, begin_s: float, end_s: float) -> None:
        self.seconds += end_s - begin_s
        self.end_s = end_s


class Transfer(NamedTuple):
    """A completed transfer of this rank; times are of `time.perf_counter`. See [Note: Transfers]."""

    purpose: str
    collective: str
    stage: str  # stage of the observer at the call, as is `step`
    step: int
    begin_s: float
    end_s: float
    wait_s: float  # when `wait` was called

    @property
    def waited(self) -> tuple[float, float]:
        """The interval in which a thread waited for the data."""
        return self.wait_s, max(self.wait_s, self.end_s)


@final
@dataclass(slots=True)
class TransferObserver:
    """Where a communicator and its split groups report transfers."""

    report: Callable[[Transfer], None] | None = None  # None if transfers are not measured
    stage: str = ""  # current stage of the training step
    step: int = 0


class Work(Protocol):
    """A collective in flight, as `torch.distributed.Work`."""

    def wait(self) -> Tensor:
        """The received tensor; call once. Sent tensors may change only after it.

        In a world of one rank the result may be the sent tensor.
        """
        ...


class Comm(Protocol):
    """A process group, seen from one of its ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, as ranks of the world; a member's index is its rank in the group."""
        ...

    @property
    def rank(self) -> int:
        """This rank's index in `ranks`."""
        ...

    @property
    def topology(self) -> Topology:
        """Hosts and devices of the world."""
        ...

    @property
    def sent(self) -> BytesSent: ...

    @property
    def waited(self) -> WaitTime: ...

    @property
    def observer(self) -> TransferObserver: ...

    def all_to_all(
        self, send_N: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], purpose: str
    ) -> Work:
        """As `all_to_all_single`: send the next `input_splits[w]` elements to rank w, receive `output_splits[w]`."""
        ...

    def all_gather(self, send_N: Tensor, output_splits: Sequence[int], purpose: str) -> Work:
        """The tensors of all ranks, concatenated in rank order."""
        ...

    def reduce_scatter(self, send_N: Tensor, input_splits: Sequence[int], purpose: str) -> Work:
        """The sum over all ranks of their segments for this one (`input_splits[rank]` elements), in rank order."""
        ...

    def all_reduce(self, tensor_N: Tensor, purpose: str) -> Work:
        """The sum over all ranks, with the same bits on each; may overwrite the tensor."""
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> "Comm":
        """This rank's group; collective. `groups` partition the ranks of this one, as ascending ranks of the world.

        Several threads may use a group each.
        """
        ...

    def close(self) -> None:
        """Release connections and memory; no collective may be pending. A rank that ends without it may lose sends."""
        ...
