"""`run_threads`: ranks as threads of one process, for tests: a world with backward passes in milliseconds.

Calls of the ranks are matched by (process group, number of the call). A call copies its data when it starts, so
ranks may wait in any order. If a rank ends, or calls another collective, the ranks that wait for it raise; they never
hang. It is slow: each rank computes full sums, under Python's lock.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from rowwise.base.errors import PeerError
from rowwise.parallel.comm.call import CollectiveCall, combine_segments, find_mismatch, segment_for
from rowwise.parallel.comm.delayed import delay
from rowwise.parallel.comm.group import PendingCollective, ReceivedTensor, TransportComm
from rowwise.parallel.comm.interface import Comm, WaitTime
from rowwise.parallel.comm.simulated_link import SimulatedLink
from rowwise.tables.spec import Topology

T = TypeVar("T")


class _PostedCall(NamedTuple):
    call: CollectiveCall
    sent_N: Tensor
    at_s: float


CallKey = tuple[object, ...]  # a process group's name, then the number of the call


@final
class _ThreadRendezvous:
    """The calls that ranks have posted, by key, and the ranks that have ended, with their errors."""

    def __init__(self, timeout_s: float) -> None:
        self.ended: dict[int, BaseException | None] = {}
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._posts: defaultdict[CallKey, dict[int, _PostedCall]] = defaultdict(dict)
        self._read: defaultdict[CallKey, set[int]] = defaultdict(set)

    def post(self, key: CallKey, rank: int, post: _PostedCall) -> None:
        with self._changed:
            self._posts[key][rank] = post
            self._changed.notify_all()

    def end(self, rank: int, error: BaseException | None) -> None:
        with self._changed:
            self.ended.setdefault(rank, error)
            self._changed.notify_all()

    def collect(self, key: CallKey, ranks: Sequence[int], rank: int) -> list[_PostedCall]:
        """Wait for the calls of all ranks; returns them in rank order."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._changed:
            assert rank in self._posts[key], "a collective is waited for once"
            posts, read = self._posts[key], self._read[key]
            while missing := [r for r in ranks if r not in posts]:
                self._check(posts[rank].call, rank, missing, deadline_s)
                self._changed.wait(max(0.0, deadline_s - time.monotonic()))
            read.add(rank)
            if len(read) == len(ranks):
                del self._posts[key], self._read[key]
            return [posts[r] for r in ranks]

    def _check(self, call: CollectiveCall, rank: int, missing: Sequence[int], deadline_s: float) -> None:
        ended_rank = next((r for r in missing if r in self.ended), None)
        expected = "expected the same calls on all ranks"
        if ended_rank is not None:
            error = self.ended[ended_rank]
            outcome = f"has ended: {expected}" if error is None else f"failed with {type(error).__name__}: {error}"
            raise PeerError(
                f"rank {rank} waits for {call}, which rank {ended_rank} never called: it {outcome}"
            ) from error
        if time.monotonic() >= deadline_s:
            late = f"not called by rank {', '.join(map(str, missing))}: {expected}, or a larger timeout_s"
            raise PeerError(f"rank {rank} waited {self._timeout_s} s for {call}: {late}")


@final
class _ThreadTransport:
    def __init__(self, rendezvous: _ThreadRendezvous, name: CallKey, ranks: tuple[int, ...], rank: int) -> None:
        self.rendezvous, self.name, self.ranks, self.rank = rendezvous, name, ranks, rank
        self.waited = WaitTime()
        self._calls = count()

    def start(self, call: CollectiveCall, send_N: Tensor) -> PendingCollective:
        key = (*self.name, next(self._calls))
        self.rendezvous.post(key, self.rank, _PostedCall(call, send_N.clone(), time.perf_counter()))
        return PendingCollective(partial(self._finish, key))

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "_ThreadTransport":
        none_W = (0,) * len(self.ranks)
        purpose = ", ".join(str(tuple(g)) for g in groups)
        call = CollectiveCall("split", purpose, torch.uint8, none_W, none_W)
        name = (*self.name, next(self._calls))
        self.rendezvous.post(name, self.rank, _PostedCall(call, torch.empty(0, dtype=torch.uint8), 0.0))
        self._finish(name)
        transport = _ThreadTransport(self.rendezvous, (*name, group), group, self.rank)
        transport.waited = self.waited
        return transport

    def close(self) -> None:
        pass

    def _finish(self, key: CallKey) -> ReceivedTensor:
        begin_s = time.perf_counter()
        posts_W = self.rendezvous.collect(key, self.ranks, self.rank)
        self.waited.add(begin_s, time.perf_counter())
        mismatch = find_mismatch([post.call for post in posts_W], self.ranks)
        if mismatch:
            raise PeerError(mismatch)
        me = self.ranks.index(self.rank)
        received = combine_segments(posts_W[me].call, [segment_for(post.call, post.sent_N, me) for post in posts_W])
        return ReceivedTensor(received, max(post.at_s for post in posts_W))


def run_threads(
    world: int | Topology, function: Callable[[Comm], T], timeout_s: float = 300.0, link: SimulatedLink | None = None
) -> list[T]:
    """`function(comm)` of each rank, run in a thread each; if ranks fail, raises the error of the likely cause.

    A number as `world` means ranks of one host. No rank waits longer than `timeout_s` for another.
    """
    topology = Topology(devices=world) if isinstance(world, int) else world
    rendezvous = _ThreadRendezvous(timeout_s)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        error: BaseException | None = None
        try:
            # Autograd's worker thread is shared by all ranks, and a backward waits for other ranks' backwards in it.
            with torch.autograd.set_multithreading_enabled(False):
                transport = _ThreadTransport(rendezvous, (), tuple(range(topology.world)), rank)
                comm = TransportComm(transport, topology, rank)
                results[rank] = function(comm if link is None else delay(comm, link))
        except BaseException as caught:
            error = caught
        finally:
            rendezvous.end(rank, error)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(topology.world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # after an interrupt, so that ranks that still wait raise
        for rank in range(topology.world):
            rendezvous.end(rank, None)
    _raise_first({rank: error for rank, error in rendezvous.ended.items() if error is not None})
    return [results[rank] for rank in range(topology.world)]


def _raise_first(errors: dict[int, BaseException]) -> None:
    """Raise the first rank's own error, rather than a `PeerError` that another rank's failure caused."""
    if errors:
        rank = min(errors, key=lambda r: (any(isinstance(e, PeerError) for e in (errors[r], errors[r].__context__)), r))
        errors[rank].add_note(f"raised by rank {rank}")
        raise errors[rank]
