"""W ranks as threads of one process, for tests and for small machines: a whole world, with backward passes, in
milliseconds and under one debugger.

Ranks meet at (group, number of the call). What a rank sends is copied when the call starts, so ranks may wait in any
order. A rank that ends, or calls something else, is an error on those that wait for it, never a hang. Known limits:
speed, as each rank adds everything itself and Python's lock is shared.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeVar, final

import torch
from torch import Tensor

from rowwise.comm.call import CollectiveCall, find_mismatch, join, run_for
from rowwise.comm.group import PendingCollective, TransportComm
from rowwise.comm.seam import Comm, Handle, WaitTime
from rowwise.errors import PeerError
from rowwise.spec import Topology

T = TypeVar("T")
Post = tuple[CollectiveCall, Tensor]
Place = tuple[object, ...]  # where ranks meet: a group, and which of its calls


@final
class _Meeting:
    """The tensors of thread ranks by collective, and the ranks that have ended, with their errors."""

    def __init__(self, timeout_s: float) -> None:
        self.ended: dict[int, BaseException | None] = {}
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._posts: defaultdict[Place, dict[int, Post]] = defaultdict(dict)
        self._read: defaultdict[Place, set[int]] = defaultdict(set)

    def bring(self, place: Place, rank: int, post: Post) -> None:
        with self._changed:
            self._posts[place][rank] = post
            self._changed.notify_all()

    def end(self, rank: int, error: BaseException | None) -> None:
        with self._changed:
            self.ended.setdefault(rank, error)
            self._changed.notify_all()

    def collect(self, place: Place, ranks: Sequence[int], rank: int) -> list[Post]:
        """What all ranks have brought, in rank order; waits for it."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._changed:
            assert rank in self._posts[place], "a handle is waited for once"
            posts, read = self._posts[place], self._read[place]
            while missing := [r for r in ranks if r not in posts]:
                self._check(posts[rank][0], rank, missing, deadline_s)
                self._changed.wait(max(0.0, deadline_s - time.monotonic()))
            read.add(rank)
            if len(read) == len(ranks):
                del self._posts[place], self._read[place]
            return [posts[r] for r in ranks]

    def _check(self, call: CollectiveCall, rank: int, missing: Sequence[int], deadline_s: float) -> None:
        gone = next((r for r in missing if r in self.ended), None)
        if gone is not None:
            error = self.ended[gone]
            how = "has ended" if error is None else f"failed with {type(error).__name__}: {error}"
            raise PeerError(f"rank {rank} waits for {call}, which rank {gone} never called: it {how}") from error
        if time.monotonic() >= deadline_s:
            late = ", ".join(str(r) for r in missing)
            raise PeerError(f"rank {rank} waited {self._timeout_s} s for {call}: not called by rank {late}")


@final
class _ThreadTransport:
    """To threads of this process."""

    def __init__(self, meeting: _Meeting, name: Place, ranks: tuple[int, ...], rank: int) -> None:
        self.meeting, self.name, self.ranks, self.rank = meeting, name, ranks, rank
        self.waited = WaitTime()  # each rank is a thread
        self._calls = count()

    def start(self, call: CollectiveCall, send_N: Tensor) -> Handle:
        place = (*self.name, next(self._calls))
        self.meeting.bring(place, self.rank, (call, send_N.clone()))
        return PendingCollective(partial(self._finish, place))

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "_ThreadTransport":
        none_W = (0,) * len(self.ranks)
        what = ", ".join(str(tuple(g)) for g in groups)
        call = CollectiveCall(collective="split", what=what, dtype=torch.uint8, sizes_W=none_W, receives_W=none_W)
        name = (*self.name, next(self._calls))
        self.meeting.bring(name, self.rank, (call, torch.empty(0, dtype=torch.uint8)))
        self._finish(name)
        made = _ThreadTransport(self.meeting, (*name, group), group, self.rank)
        made.waited = self.waited
        return made

    def close(self) -> None:
        pass

    def _finish(self, place: Place) -> Tensor:
        begin_s = time.perf_counter()
        posts_W = self.meeting.collect(place, self.ranks, self.rank)
        self.waited.seconds += time.perf_counter() - begin_s
        mismatch = find_mismatch([call for call, _ in posts_W], self.ranks)
        if mismatch:
            raise PeerError(mismatch)
        me = self.ranks.index(self.rank)
        return join(posts_W[me][0], [run_for(call, sent_N, me) for call, sent_N in posts_W])


def run_threads(world: int | Topology, function: Callable[[Comm], T], timeout_s: float = 300.0) -> list[T]:
    """What `function` gives on each rank of a world of threads; if ranks fail, raises the first one's own error.

    Ranks of one host if only their number is given. No rank waits longer than `timeout_s` for another.
    """
    topology = Topology(devices=world) if isinstance(world, int) else world
    meeting = _Meeting(timeout_s)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        error: BaseException | None = None
        try:
            # One rank's backward may wait for another's, so none may run in a thread that they share.
            with torch.autograd.set_multithreading_enabled(False):
                transport = _ThreadTransport(meeting, (), tuple(range(topology.world)), rank)
                results[rank] = function(TransportComm(transport, topology, rank))
        except BaseException as caught:
            error = caught
        finally:
            meeting.end(rank, error)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(topology.world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # interrupted: those that wait fail
        for rank in range(topology.world):
            meeting.end(rank, None)
    _raise_first({rank: error for rank, error in meeting.ended.items() if error is not None})
    return [results[rank] for rank in range(topology.world)]


def _raise_first(errors: dict[int, BaseException]) -> None:
    """Raise the error of the first rank whose own it is, not another's that reached it."""
    if errors:
        rank = min(errors, key=lambda r: (any(isinstance(e, PeerError) for e in (errors[r], errors[r].__context__)), r))
        errors[rank].add_note(f"raised by rank {rank}")
        raise errors[rank]
