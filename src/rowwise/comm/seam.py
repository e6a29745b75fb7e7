"""What ranks can do together: the seam `Comm`, of which there are several implementations.

Four collectives over flat tensors, all uneven, all started at once and waited for later. Every rank of a group calls
the same collectives in the same order; sizes are known to both sides, so no collective asks for any. `what` names the
purpose ("ids", "pooled", ...) and is what bytes are counted under. Known limits: point-to-point messages, and sums of
anything but numbers as they are (lossy wires are made of these and of `ops.rowtype`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Protocol, final

from torch import Tensor

from rowwise.spec import Link, Topology


@dataclass(slots=True)
class BytesSent:
    """Bytes that this rank has sent to other ranks, by purpose, collective and link; a group adds to its parent's."""

    counts: Counter[tuple[str, str, Link]] = field(default_factory=Counter)
    _adding: Lock = field(default_factory=Lock, repr=False, compare=False)  # groups may be used by several threads

    def add(self, what: str, collective: str, link: Link, count_bytes: int) -> None:
        if count_bytes:
            with self._adding:
                self.counts[what, collective, link] += count_bytes

    def total(self, what: str | None = None, collective: str | None = None, link: Link | None = None) -> int:
        """All bytes of a kind; None: of any."""
        wanted = (what, collective, link)
        counts = list(self.counts.items())
        return sum(n for key, n in counts if all(w in (None, k) for w, k in zip(wanted, key, strict=True)))


@final
class WaitTime(local):
    """Seconds that the present thread has waited for other ranks to begin collectives; a group adds to its parent's.

    Transfers are no part of it. It stays 0 where a transport cannot tell the two apart.
    """

    seconds: float = 0.0


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """What came; called once. Tensors that were given may change only after it.

        In a world of one rank what came may be the very tensor that was given.
        """
        ...


class Comm(Protocol):
    """A group of ranks, seen from one of them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, as ranks of the whole world; a member's place in it is its rank in the group."""
        ...

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def topology(self) -> Topology:
        """The whole world's hosts and devices."""
        ...

    @property
    def sent(self) -> BytesSent:
        """The bytes so far."""
        ...

    @property
    def waited(self) -> WaitTime:
        """The time spent waiting for other ranks so far."""
        ...

    def all_to_all(self, send_N: Tensor, sizes_W: Sequence[int], receives_W: Sequence[int], what: str) -> Handle:
        """Send the w-th run of sizes[w] elements to rank w; gives what came, receives[w] elements from rank w."""
        ...

    def all_gather(self, send_N: Tensor, receives_W: Sequence[int], what: str) -> Handle:
        """Send everything to everybody; gives what all sent, in rank order."""
        ...

    def reduce_scatter(self, send_N: Tensor, sizes_W: Sequence[int], what: str) -> Handle:
        """The sum over all ranks of what they have for this one: its run of sizes[rank] elements, in rank order."""
        ...

    def all_reduce(self, tensor_N: Tensor, what: str) -> Handle:
        """The sum over all ranks, with the same bits on each; the tensor given may be used for it."""
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> "Comm":
        """This rank's group out of several disjoint ones, which hold all ranks of this one; called by all of them.

        Groups are ranks of the whole world in ascending order. Several threads may use a group each.
        """
        ...

    def close(self) -> None:
        """Give up what it holds; nothing may be under way. Who ends without it may take along what it sent last."""
        ...
