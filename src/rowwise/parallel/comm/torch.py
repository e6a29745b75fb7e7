"""`TorchTransport`: torch.distributed's backends, gloo between CPUs and NCCL between GPUs.

All collectives but all-reduce are an all-to-all, and the receiver adds sums in rank order: gloo's own reduce-scatter
takes three times as long, its all-gather needs even sizes, and NCCL adds in its own order. The NCCL path is untested.
Backends are created directly, without torch's default group: torch names a group by a counter, which differs between
ranks that were split differently.
"""

import os
import re
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

from rowwise.base.errors import PeerError
from rowwise.parallel.comm.call import SENDS_FULL_TENSOR, CollectiveCall, combine_segments
from rowwise.parallel.comm.group import PendingCollective, ReceivedTensor
from rowwise.parallel.comm.interface import WaitTime
from rowwise.parallel.comm.sums import AllReduceSizes, HostSums
from rowwise.tables.ops.output_cache import empty_cached

SOURCE = re.compile(r"^\[[^]]*:\d+\] ")  # file and line of gloo, before its messages


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store, name and members through which a group of ranks connects."""

    store: dist.Store
    name: str
    ranks: tuple[int, ...]
    rank: int  # of the world
    pids: Mapping[int, int]  # process id by rank of the world, of the ranks on this machine
    timeout_s: float
    address: str = ""  # host name to listen on; by default of GLOO_SOCKET_IFNAME or the host


def connect_backend(world: Rendezvous, device: str) -> Any:
    """A backend for a type of device; `Any`, as torch's stubs lack some of its methods."""
    store: Any = world.store
    backends: Any = dist
    # A connection of its own: a request that waits for a key blocks all others on its connection.
    store = dist.PrefixStore(f"{world.name}/{device}", store.clone())
    rank_and_size, limit = (world.ranks.index(world.rank), len(world.ranks)), timedelta(seconds=world.timeout_s)
    if device != "cuda" and not world.address:
        return backends.ProcessGroupGloo(store, *rank_and_size, limit)
    kind = backends.ProcessGroupNCCL if device == "cuda" else backends.ProcessGroupGloo
    options = kind.Options() if device == "cuda" else kind._Options()
    options._timeout = limit
    if device != "cuda":
        options._devices = [kind.create_device(hostname=world.address)]
    return kind(store, *rank_and_size, options)


@final
class TorchTransport:
    """Transport over one backend per device type, which connects at the first tensor of that type."""

    def __init__(self, world: Rendezvous, waited: WaitTime | None = None, sums: Sequence[AllReduceSizes] = ()) -> None:
        """`sums`: the algorithms of all-reduces between CPUs of all ranks, in groups of all of them too."""
        self.world = world
        self._sizes = tuple(sums)
        connect = partial(connect_backend, replace(world, name=f"{world.name}/sums"), "cpu")
        self._sums = HostSums(connect, world.rank, sums) if sums else None
        self.waited = waited or WaitTime()  # stays 0: backends do not report when the other ranks have begun
        self._splits = count()
        self._backends: dict[str, Any] = {}
        self._groups: list[TorchTransport] = []  # split from this one

    def start(self, call: CollectiveCall, send_N: Tensor) -> PendingCollective:
        try:
            if self._sums is not None and call.collective == "all_reduce" and send_N.device.type == "cpu":
                sizes = self._sums.choose(send_N)
                if sizes is not None:
                    return PendingCollective(partial(self._finish_sum, call, self._sums.start(sizes, send_N)))
            work, received_N = self._begin(call, send_N)
        except RuntimeError as error:
            raise self._explain(call, error) from error
        ends_s: list[float] = []
        if send_N.device.type == "cpu":  # a future of NCCL calls back when its kernel is queued
            work.get_future().add_done_callback(lambda _: ends_s.append(time.perf_counter()))
        return PendingCollective(partial(self._finish, call, work, received_N, ends_s))

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "TorchTransport":
        name = f"{self.world.name}/{next(self._splits)}.{group[0]}"
        sums = self._sizes if group == self.world.ranks else ()
        self._groups.append(TorchTransport(replace(self.world, name=name, ranks=group), self.waited, sums))
        return self._groups[-1]

    def close(self) -> None:
        """Close the connections of this group and of its split groups; collective, as NCCL's close together."""
        for group in self._groups:
            group.close()
        if self._sums is not None:
            self._sums.close()
        if "cuda" in self._backends:
            self._backends["cuda"].shutdown()
        self._backends.clear()

    def _finish(
        self, call: CollectiveCall, work: dist.Work, received_N: Tensor, ends_s: Sequence[float]
    ) -> ReceivedTensor:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explain(call, error) from error
        arrived_s = ends_s[0] if ends_s else time.perf_counter()
        if call.collective != "reduce_scatter":
            return ReceivedTensor(received_N, arrived_s)
        return ReceivedTensor(combine_segments(call, received_N.split(list(call.output_splits))), arrived_s)

    def _finish_sum(self, call: CollectiveCall, pending: PendingCollective) -> ReceivedTensor:
        try:
            return pending.finish()
        except RuntimeError as error:
            raise self._explain(call, error) from error

    def _explain(self, call: CollectiveCall, error: RuntimeError) -> PeerError:
        """The error with its likely cause: which ranks have ended."""
        # Poll for up to a second, as the connections of a process close shortly before it ends.
        world, end_s = self.world, time.monotonic() + 1
        while not (dead := [r for r in world.ranks if r in world.pids and not is_alive(world.pids[r])]):
            if time.monotonic() > end_s:
                break
            time.sleep(0.05)
        peers = ", ".join(str(r) for r in world.ranks if r != world.rank)
        causes = [f"rank {r} (process {world.pids[r]}) has ended" for r in dead]
        causes.append(SOURCE.sub("", str(error).partition("\n")[0].partition(". ")[0]))
        return PeerError(f"rank {world.rank}: {call} with rank {peers}: {'; '.join(causes)}")

    def _begin(self, call: CollectiveCall, send_N: Tensor) -> tuple[dist.Work, Tensor]:
        device = send_N.device.type
        if device not in self._backends:
            self._backends[device] = connect_backend(self.world, device)
        backend = self._backends[device]
        if call.collective == "all_reduce":
            return backend.allreduce([send_N], dist.AllreduceOptions()), send_N
        received_N = empty_cached((sum(call.output_splits),), send_N)
        if device == "cuda" and call.collective == "all_gather" and len(set(call.output_splits)) == 1:
            return backend._allgather_base(received_N, send_N), received_N
        input_N = send_N.repeat(len(self.world.ranks)) if call.collective in SENDS_FULL_TENSOR else send_N
        sizes = (list(call.output_splits), list(call.input_splits))
        return backend.alltoall_base(received_N, input_N, *sizes, dist.AllToAllOptions()), received_N


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:  # not Linux, or it ended just now, which the next call will see
        return True
