"""Probes the links between hosts: messages between the ranks of a job, one rank for each host.

Ranks meet before every exchange. *Alone*, one pair of hosts communicates and all others idle: a ping-pong of a few
bytes, then messages of two sizes both ways, whose difference excludes latency and the burst of a traffic shaper.
*Loaded*, all pairs of a round communicate at once, which reveals shared uplinks. Pairs come from tournaments: rounds of
disjoint pairs, in which each pair meets once.

Messages are gloo's send and receive; NCCL is untested. Clocks of two hosts are never compared.
"""

import fcntl
import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from rowwise.base.errors import PeerError, SpecError
from rowwise.parallel.comm.torch import Rendezvous, connect_backend

Pair = tuple[int, int]
PING_bytes, MIN_bytes, MAX_bytes = 4, 1 << 19, 1 << 26
MIN_MESSAGE_s = 0.012  # min. time of the larger message on the fastest link
PINGS = 9
ALONE_PASSES, LOADED_PASSES = 4, 10
MAX_ROUNDS = 31  # max. rounds of an alone pass; with more than 32 hosts it has a sample of the pairs
REACH_s, LATE_s = 5.0, 2.0  # timeouts until a host counts as unreachable, a rank as dead
SIOCGIFADDR = 0x8915


class ProbeSample(NamedTuple):
    """The time of one message, as its receiver measured it."""

    kind: str  # ping, alone or loaded
    size_bytes: int
    round: int  # messages of a round are concurrent
    sender: int
    receiver: int
    seconds: float


class ProbeSamples(NamedTuple):
    """The result of a probe."""

    samples: tuple[ProbeSample, ...]
    addresses: tuple[str, ...]  # address of each rank
    seconds: float
    dead: tuple[int, ...] = ()  # ranks that ended before the probe did


def tournament(players: Sequence[int]) -> Iterator[list[Pair]]:
    """Rounds of disjoint pairs in which each pair meets once; of an odd number, one player is idle in each round."""
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    for _ in range(len(circle) - 1):
        ends = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        yield [(a, b) for a, b in ends if a is not None and b is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def probe(
    world: Rendezvous,
    limit_s: float,
    *,
    on_progress: Callable[[float], None] = lambda share: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> ProbeSamples | None:
    """Probe the links between ranks, for at most about `limit_s`; a collective. The result is on the first rank only.

    `on_progress` gets the completed share. Samples of a rank that dies are kept; `is_stopped` ends the probe early.
    """
    begin_s = time.monotonic()
    addresses = _reach_all(world)
    prober = _Prober(world, begin_s + limit_s, on_progress, is_stopped)
    try:
        prober.run()
    except RuntimeError as error:  # another rank has ended, or failed because of one that has
        failure: str | None = str(error).partition("\n")[0]
    else:
        failure = None
    try:
        prober.save(ended=True)
    except RuntimeError as error:
        raise PeerError(f"rank {world.rank}: the first rank has ended: {failure or error}") from error
    if world.rank != world.ranks[0]:
        return None
    return _collect(world, addresses, time.monotonic() - begin_s)


@final
class _Prober:
    """A rank's part of a probe."""

    def __init__(
        self, world: Rendezvous, end_s: float, on_progress: Callable[[float], None], is_stopped: Callable[[], bool]
    ) -> None:
        self._world, self._end_s, self._on_progress, self._is_stopped = world, end_s, on_progress, is_stopped
        self._me = world.ranks.index(world.rank)
        self._backend: Any = connect_backend(world, "cpu")
        self._messages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._samples: list[ProbeSample] = []
        self._round = 0

    def run(self) -> None:
        hosts, rng = list(range(len(self._world.ranks))), random.Random(0)
        size_bytes = self._choose_size(next(tournament(hosts)))
        for number in range(LOADED_PASSES):
            self._on_progress(number / LOADED_PASSES)
            if number < ALONE_PASSES:
                rng.shuffle(hosts)
                rounds = [pairs for pairs, _ in zip(tournament(hosts), range(MAX_ROUNDS), strict=False)]
                for pair in (pair for pairs in rounds for pair in pairs):
                    if not self._agree_to_continue():
                        return
                    self._measure_alone(pair, size_bytes)
            rng.shuffle(hosts)
            for pairs in tournament(hosts):
                if not self._agree_to_continue():
                    return
                self._exchange("loaded", pairs, size_bytes)
            self.save(ended=False)
        self._on_progress(1.0)

    def save(self, *, ended: bool) -> None:
        """Write this rank's samples to the store, where they survive it."""
        self._world.store.set(_key(self._world, self._world.rank), json.dumps([ended, self._samples]))

    def _agree_to_continue(self) -> bool:
        """Barrier of all ranks; False on all if one asks to end."""
        self._round += 1
        return self._all_reduce_max(self._is_stopped() or time.monotonic() > self._end_s) == 0

    def _all_reduce_max(self, value: float) -> float:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        largest = torch.tensor([value], dtype=torch.float64)
        self._backend.allreduce([largest], options).wait()
        return largest.item()

    def _choose_size(self, pairs: Sequence[Pair]) -> int:
        """Bytes of a message that takes long enough to be timed on the fastest link."""
        size_bytes = MIN_bytes
        while size_bytes < MAX_bytes:
            self._all_reduce_max(0)
            seconds = self._time_message(pairs, size_bytes)
            if -self._all_reduce_max(-float("inf") if seconds is None else -seconds) >= MIN_MESSAGE_s:
                break
            size_bytes *= 2
        return size_bytes

    def _measure_alone(self, pair: Pair, size_bytes: int) -> None:
        if self._me not in pair:
            return
        peer = pair[self._me == pair[0]]
        self._samples += [self._sample("ping", PING_bytes, peer, seconds) for seconds in self._ping_pong(peer)]
        for size in (size_bytes // 4, size_bytes):
            self._exchange("alone", [pair], size)

    def _ping_pong(self, peer: int) -> list[float]:
        """Seconds of a message each way, without the first."""
        sent, received = self._buffers(PING_bytes)
        times: list[float] = []
        for _ in range(PINGS):
            begin_s = time.perf_counter()
            for sends in (self._me < peer, self._me > peer):
                work = self._backend.send([sent], peer, 0) if sends else self._backend.recv([received], peer, 0)
                work.wait()
            times.append((time.perf_counter() - begin_s) / 2)
        return times[1:] if self._me < peer else []

    def _exchange(self, kind: str, pairs: Sequence[Pair], size_bytes: int) -> None:
        seconds = self._time_message(pairs, size_bytes)
        if seconds is not None:
            self._samples.append(self._sample(kind, size_bytes, _partner(pairs, self._me), seconds))

    def _time_message(self, pairs: Sequence[Pair], size_bytes: int) -> float | None:
        """Seconds to receive the partner's message while sending it one; None for an idle host."""
        peer = _partner(pairs, self._me)
        if peer is None:
            return None
        sent, received = self._buffers(size_bytes)
        begin_s = time.perf_counter()
        sending, receiving = self._backend.send([sent], peer, 1), self._backend.recv([received], peer, 1)
        receiving.wait()
        seconds = time.perf_counter() - begin_s
        sending.wait()
        return seconds

    def _buffers(self, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        if size_bytes not in self._messages:
            self._messages[size_bytes] = torch.zeros(size_bytes // 4), torch.zeros(size_bytes // 4)
        return self._messages[size_bytes]

    def _sample(self, kind: str, size_bytes: int, peer: int | None, seconds: float) -> ProbeSample:
        assert peer is not None
        return ProbeSample(kind, size_bytes, self._round, peer, self._me, seconds)


def _partner(pairs: Sequence[Pair], host: int) -> int | None:
    return next((b if a == host else a for a, b in pairs if host in (a, b)), None)


def _key(world: Rendezvous, rank: int) -> str:
    return f"{world.name}/probe/{rank}"


def _collect(world: Rendezvous, addresses: tuple[str, ...], seconds: float) -> ProbeSamples:
    """The samples that all ranks have left in the store, and the dead ranks."""
    samples: list[ProbeSample] = []
    dead: list[int] = []
    end_s = time.monotonic() + LATE_s
    for index, rank in enumerate(world.ranks):
        while True:
            key = _key(world, rank)
            ended, rows = json.loads(world.store.get(key)) if world.store.check([key]) else (False, [])
            if ended or time.monotonic() > end_s:
                break
            time.sleep(0.02)
        samples += [ProbeSample(*fields) for fields in rows]
        if not ended:
            dead.append(index)
    return ProbeSamples(tuple(samples), addresses, seconds, tuple(dead))


def _reach_all(world: Rendezvous) -> tuple[str, ...]:
    """The address of each rank; raises if this one cannot connect to another."""
    own, store = _own_address(world), world.store
    with socket.create_server((own, 0), backlog=len(world.ranks)) as server:
        store.set(f"{world.name}/address/{world.rank}", f"{own} {server.getsockname()[1]}")
        addresses = [store.get(f"{world.name}/address/{rank}").decode().split() for rank in world.ranks]
        faults: list[str] = []
        for rank, (address, port) in zip(world.ranks, addresses, strict=True):
            try:
                socket.create_connection((address, int(port)), REACH_s).close()
            except OSError as error:
                faults.append(f"rank {world.rank} ({own}) cannot reach rank {rank} ({address}): {error}")
        store.set(f"{world.name}/reached/{world.rank}", json.dumps(faults))
        faults_W = [json.loads(store.get(f"{world.name}/reached/{rank}")) for rank in world.ranks]
    if faults := [fault for rank_faults in faults_W for fault in rank_faults]:
        count = f" ({len(faults)} such pairs)" if len(faults) > 1 else ""
        raise SpecError(
            faults[0] + count, "hosts that reach each other", hint="set GLOO_SOCKET_IFNAME to the right interface"
        )
    return tuple(address for address, _ in addresses)


def _own_address(world: Rendezvous) -> str:
    """The address that gloo will use: that of GLOO_SOCKET_IFNAME, or of this host's name."""
    if world.address:
        return world.address
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query, suppress(OSError):
            request = struct.pack("256s", interface.partition(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(query.fileno(), SIOCGIFADDR, request)[20:24])
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise SpecError(
            f"host {socket.gethostname()!r} has no address: {error.strerror}",
            "a host name with an address",
            hint="set GLOO_SOCKET_IFNAME to the name of an interface",
        ) from None
