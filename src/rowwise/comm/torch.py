"""Ranks as processes, connected by torch.distributed's backends: gloo between CPUs, NCCL between GPUs.

All but all-reduce is an all-to-all, and sums are added in rank order by the receiver: gloo's own reduce-scatter takes
three times as long, its all-gather refuses uneven sizes, and NCCL adds in an order of its own. What NCCL does is
written and has never been run. Known limits: torch's default group and what needs it. Backends are made by hand, as
torch names groups after how many there are, which ranks that split differently do not agree about.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from rowwise.comm.call import WHOLE, CollectiveCall, join
from rowwise.comm.group import PendingCollective
from rowwise.comm.seam import Handle, WaitTime
from rowwise.errors import PeerError
from rowwise.ops.output_cache import empty_cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The store, names and process ids by which ranks of a group find each other."""

    store: dist.Store
    name: str
    ranks: tuple[int, ...]
    rank: int  # of the world
    pids: Mapping[int, int]  # processes of those ranks of the world that run on this machine
    timeout_s: float
    address: str = ""  # where to listen; none: where torch's GLOO_SOCKET_IFNAME or the host's name says


def _connect(world: Rendezvous, device: str) -> Any:
    """A backend for a type of device; torch's stubs know neither all of its methods nor which this torch has."""
    own: Any = world.store
    backends: Any = dist
    # A connection of its own: who waits for an answer of the store keeps all others from asking.
    store = dist.PrefixStore(f"{world.name}/{device}", own.clone())
    at, limit = (world.ranks.index(world.rank), len(world.ranks)), timedelta(seconds=world.timeout_s)
    if device != "cuda" and not world.address:
        return backends.ProcessGroupGloo(store, *at, limit)
    kind = backends.ProcessGroupNCCL if device == "cuda" else backends.ProcessGroupGloo
    options = kind.Options() if device == "cuda" else kind._Options()
    options._timeout = limit
    if device != "cuda":
        options._devices = [kind.create_device(hostname=world.address)]
    return kind(store, *at, options)


@final
class TorchTransport:
    """A transport over a backend for each type of device, connected at its first tensor."""

    def __init__(self, world: Rendezvous, waited: WaitTime | None = None) -> None:
        self.world = world
        self.waited = waited or WaitTime()  # backends do not tell when the first byte has come
        self._splits = count()
        self._backends: dict[str, Any] = {}

    def start(self, call: CollectiveCall, send_N: Tensor) -> Handle:
        try:
            work, came_N = self._begin(call, send_N)
        except RuntimeError as error:
            raise self._explain(call, error) from error
        return PendingCollective(partial(self._finish, call, work, came_N))

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "TorchTransport":
        """The same for a group, under a name of its own."""
        name = f"{self.world.name}/{next(self._splits)}.{group[0]}"
        return TorchTransport(replace(self.world, name=name, ranks=group), self.waited)

    def close(self) -> None:
        self._backends.clear()

    def _finish(self, call: CollectiveCall, work: dist.Work, came_N: Tensor) -> Tensor:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explain(call, error) from error
        return join(call, came_N.split(list(call.receives_W))) if call.collective == "reduce_scatter" else came_N

    def _explain(self, call: CollectiveCall, error: RuntimeError) -> PeerError:
        """What is known about why a collective failed; connections close a little earlier than processes end."""
        world, end_s = self.world, time.monotonic() + 1
        while not (dead := [r for r in world.ranks if r in world.pids and not is_alive(world.pids[r])]):
            if time.monotonic() > end_s:
                break
            time.sleep(0.05)
        others = ", ".join(str(r) for r in world.ranks if r != world.rank)
        why = [f"rank {r} (process {world.pids[r]}) has ended" for r in dead]
        why.append(str(error).partition("\n")[0].partition(". ")[0])
        return PeerError(f"rank {world.rank}: {call} with rank {others}: {'; '.join(why)}")

    def _begin(self, call: CollectiveCall, send_N: Tensor) -> tuple[dist.Work, Tensor]:
        device = send_N.device.type
        if device not in self._backends:
            self._backends[device] = _connect(self.world, device)
        backend = self._backends[device]
        if call.collective == "all_reduce":
            return backend.allreduce([send_N], dist.AllreduceOptions()), send_N
        came_N = empty_cached((sum(call.receives_W),), send_N)
        if device == "cuda" and call.collective == "all_gather" and len(set(call.receives_W)) == 1:
            return backend._allgather_base(came_N, send_N), came_N
        given_N = send_N.repeat(len(self.world.ranks)) if call.collective in WHOLE else send_N
        sizes = (list(call.receives_W), list(call.sizes_W))
        return backend.alltoall_base(came_N, given_N, *sizes, dist.AllToAllOptions()), came_N


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that ended and was not yet asked for its exit code does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:  # not Linux, or it ended just now: then the next look tells
        return True
