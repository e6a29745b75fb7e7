"""Ranks as processes, connected by torch.distributed's backends: gloo between CPUs, NCCL between GPUs.

Its own file because it is the only transport that leaves the machine. All but all-reduce is an all-to-all, and sums are
added in rank order by the receiver: gloo's own reduce-scatter takes three times as long, its all-gather refuses uneven
sizes, and NCCL adds in an order of its own. What NCCL does is written and has never been run. Gives up: torch's default
group and what needs it. Backends are made by hand, as torch names groups after how many there are, which ranks that
split differently do not agree about.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from rowwise.comm.call import WHOLE, Call, empty, join
from rowwise.comm.seam import Handle
from rowwise.errors import PeerError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How to find the other ranks of a group."""

    store: dist.Store
    name: str
    ranks: tuple[int, ...]
    rank: int  # of the world
    pids: Mapping[int, int]  # processes of those ranks of the world that run on this machine
    timeout_s: float
    address: str = ""  # where to listen; none: where torch's GLOO_SOCKET_IFNAME or the host's name says


def _backends() -> tuple[Any, Any]:
    """Those of gloo and NCCL; torch's stubs know neither all of their methods nor which of them this torch has."""
    return dist.ProcessGroupGloo, getattr(dist, "ProcessGroupNCCL", None)


@final
class Processes:
    """A transport over a backend for each type of device, connected at its first tensor."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._splits = count()
        self._backends: dict[str, Any] = {}

    def start(self, call: Call, send_N: Tensor) -> Handle:
        """Begin a collective."""
        try:
            return _Under(self, call, *self._begin(call, send_N))
        except RuntimeError as error:
            raise self.explain(call, error) from error

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "Processes":
        """The same for a group, under a name of its own."""
        return Processes(replace(self.world, name=f"{self.world.name}/{next(self._splits)}.{group[0]}", ranks=group))

    def close(self) -> None:
        """Disconnect."""
        self._backends.clear()

    def explain(self, call: Call, error: RuntimeError) -> PeerError:
        """What is known about why a collective failed."""
        world = self.world
        others = ", ".join(str(r) for r in world.ranks if r != world.rank)
        dead = [f"rank {r} (process {world.pids[r]}) has ended" for r in self._find_dead()]
        why = str(error).partition("\n")[0].partition(". ")[0]
        return PeerError(f"rank {world.rank}: {call} with rank {others}: {'; '.join([*dead, why])}")

    def _begin(self, call: Call, send_N: Tensor) -> tuple[dist.Work, Tensor]:
        backend, device = self._backend(send_N.device.type), send_N.device.type
        if call.collective == "all_reduce":
            return backend.allreduce([send_N], dist.AllreduceOptions()), send_N
        came_N = empty(sum(call.receives_W), send_N)
        if device == "cuda" and call.collective == "all_gather" and len(set(call.receives_W)) == 1:
            return backend._allgather_base(came_N, send_N), came_N
        given_N = send_N.repeat(len(self.world.ranks)) if call.collective in WHOLE else send_N
        sizes = (list(call.receives_W), list(call.sizes_W))
        return backend.alltoall_base(came_N, given_N, *sizes, dist.AllToAllOptions()), came_N

    def _backend(self, device: str) -> Any:
        if device not in self._backends:
            world = self.world
            # A connection of its own: who waits for an answer of the store keeps all others from asking.
            own: Any = world.store
            store = dist.PrefixStore(f"{world.name}/{device}", own.clone())
            place, size = world.ranks.index(world.rank), len(world.ranks)
            gloo, nccl = _backends()
            kind, options = (nccl, nccl.Options()) if device == "cuda" else (gloo, gloo._Options())
            options._timeout = timedelta(seconds=world.timeout_s)
            if kind is gloo:
                options._devices = [gloo.create_device(hostname=world.address)]
            self._backends[device] = kind(store, place, size, options)
        return self._backends[device]

    def _find_dead(self) -> list[int]:
        """Ranks of this machine that have ended; connections close a little earlier than processes end."""
        world = self.world
        for _ in range(20):
            dead = [r for r in world.ranks if r in world.pids and not is_alive(world.pids[r])]
            if dead:
                return dead
            time.sleep(0.05)
        return []


@final
@dataclass(frozen=True, slots=True)
class _Under:
    """A collective under way."""

    by: Processes
    call: Call
    work: dist.Work
    came_N: Tensor

    def wait(self) -> Tensor:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.by.explain(self.call, error) from error
        if self.call.collective == "reduce_scatter":
            return join(self.call, self.came_N.split(list(self.call.receives_W)))
        return self.came_N


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
