"""All-reduces between hosts by other algorithms than gloo's ring, each with its own order of ranks.

The ring sends least, in 2 (W - 1) steps. Halving and doubling takes 2 log2 W: partners at doubled distances exchange
half of what they still hold, then send the sums back the same way. A binary tree adds up to its root, and its sum
travels back, in chunks that follow each other. Fewer steps have less latency, so an algorithm is chosen by size:
`choose_sums` in `recipes/hosts.py`.

Bits: every number is added up in one order, which follows from the algorithm and its order of ranks, and the ranks
copy the sum. `order[k]` is the rank at place k.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from rowwise.base.value import Value
from rowwise.parallel.comm.call_thread import CallThread
from rowwise.parallel.comm.group import PendingCollective, ReceivedTensor

Algorithm = Literal["ring", "halving_doubling", "tree"]
CHUNKS, MIN_CHUNK_bytes = 16, 1 << 15  # of one send in a tree: up to 16 chunks of 32 KiB or more


class AllReduceSizes(Value, frozen=True):
    """The algorithm of all-reduces from a size on."""

    min_bytes: int
    algorithm: Algorithm  # ring: gloo's, in the order of the ranks
    order: tuple[int, ...] = ()


@final
class HostSums:
    """Runs all-reduces one after the other in a thread.

    Args:
        connect: opens connections of their own to all ranks.
        rank: this one.
        sizes: algorithms by size, ascending.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, sizes: Sequence[AllReduceSizes]) -> None:
        self._connect, self._rank, self._sizes = connect, rank, tuple(sizes)
        self._thread: CallThread | None = None
        self._backend: Any = None

    def choose(self, sum_N: Tensor) -> AllReduceSizes | None:
        """The algorithm for a tensor; None for gloo's ring."""
        size_bytes = sum_N.numel() * sum_N.element_size()
        fitting = [sizes for sizes in self._sizes if sizes.min_bytes <= size_bytes]
        return fitting[-1] if fitting and fitting[-1].algorithm != "ring" else None

    def start(self, sizes: AllReduceSizes, sum_N: Tensor) -> PendingCollective:
        """Sum in place; an error of a connection is raised by `finish`."""
        if self._thread is None:
            self._thread, self._backend = CallThread("sums of hosts"), self._connect()
        run = _halving_doubling if sizes.algorithm == "halving_doubling" else _tree
        place = sizes.order.index(self._rank)

        def sum_all() -> ReceivedTensor:
            run(self._backend, sizes.order, place, sum_N)
            return ReceivedTensor(sum_N, time.perf_counter())

        return PendingCollective(self._thread.call(sum_all).result)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._backend = None


def _halving_doubling(backend: Any, order: Sequence[int], place: int, sum_N: Tensor) -> None:
    """A reduce-scatter at doubled distances, then an all-gather back; a power of two of ranks."""
    size, ranks = len(sum_N), len(order)
    begin, end = 0, ranks  # of the segments that this place still adds up
    stages: list[tuple[int, slice, slice]] = []  # rank of the partner, what it adds up, and what this place does
    distance = 1
    while distance < ranks:
        middle = (begin + end) // 2
        halves = (
            slice(begin * size // ranks, middle * size // ranks),
            slice(middle * size // ranks, end * size // ranks),
        )
        is_upper = bool(place & distance)
        begin, end = (middle, end) if is_upper else (begin, middle)
        stages.append((order[place ^ distance], halves[not is_upper], halves[is_upper]))
        distance *= 2
    received_N = torch.empty_like(sum_N)
    for stage, (partner, theirs, own) in enumerate(stages):
        _exchange(backend, partner, stage, sum_N[theirs], received_N[own])
        sum_N[own] += received_N[own]
    for stage, (partner, theirs, own) in reversed(list(enumerate(stages))):
        _exchange(backend, partner, len(stages) + stage, sum_N[own], sum_N[theirs])


def _exchange(backend: Any, partner: int, tag: int, sent: Tensor, received: Tensor) -> None:
    """Send and receive at once; parts without numbers are not sent."""
    works = [backend.recv([received], partner, tag)] if len(received) else []
    works += [backend.send([sent], partner, tag)] if len(sent) else []
    for work in works:
        work.wait()


def _tree(backend: Any, order: Sequence[int], place: int, sum_N: Tensor) -> None:
    """Sums of children, first child first, up to the root; the root's sum down."""
    parent = order[(place - 1) // 2] if place else None
    children = [order[child] for child in (2 * place + 1, 2 * place + 2) if child < len(order)]
    chunk = max(-(-len(sum_N) // CHUNKS), MIN_CHUNK_bytes // sum_N.element_size())
    chunks = list(enumerate(sum_N.split(chunk)))
    received_CN = torch.empty((len(children), *sum_N.shape), dtype=sum_N.dtype)
    arriving = {
        (tag, child): backend.recv([received_CN[index, tag * chunk : tag * chunk + len(part)]], child, tag)
        for tag, part in chunks
        for index, child in enumerate(children)
    }
    sending: list[Any] = []
    for tag, part in chunks:
        for index, child in enumerate(children):
            arriving[tag, child].wait()
            part += received_CN[index, tag * chunk : tag * chunk + len(part)]
        if parent is not None:
            sending.append(backend.send([part], parent, tag))
    for work in sending:
        work.wait()
    down = [] if parent is None else [backend.recv([part], parent, CHUNKS + tag) for tag, part in chunks]
    copying: list[Any] = []
    for tag, part in chunks:
        if parent is not None:
            down[tag].wait()
        copying += [backend.send([part], child, CHUNKS + tag) for child in children]
    for work in copying:
        work.wait()
