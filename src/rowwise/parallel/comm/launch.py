"""Connects the ranks of a world: those of torchrun (`meet`, `connect`), and those of `spawn` (`join_local_world`).

A world starts and ends together: no rank joins later, and no single rank restarts.
"""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from msgspec import structs

from rowwise.base.errors import AgreedError, PeerError, RowwiseError, SpecError
from rowwise.base.value import Value
from rowwise.parallel.comm.delayed import delay
from rowwise.parallel.comm.group import TransportComm
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.rank_start import RankStart
from rowwise.parallel.comm.shared import HAS_SHARED_MEMORY, SharedMemoryTransport
from rowwise.parallel.comm.sums import AllReduceSizes
from rowwise.parallel.comm.torch import Rendezvous, TorchTransport
from rowwise.tables.spec import Topology

FAILED = "failed: "
_JOINED = count()  # numbers the worlds of this process, alike on all ranks, as the store keeps their keys


@final
class TorchrunNotes:
    """Key-value notes in torchrun's store, which survives restarts: an attempt leaves them for the next."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def get(self, name: str) -> str | None:
        key = f"rowwise/notes/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def put(self, name: str, text: str) -> None:
        self._store.set(f"rowwise/notes/{name}", text)


def connect(timeout_s: float = 300.0, shared_memory: bool = True, attempt: int = 0) -> Comm:
    """Join the ranks of torch's default group, else of torchrun's variables; those of a host use shared memory.

    No rank waits longer than `timeout_s` for another. `attempt` is torchrun's count of restarts: it is part of the keys
    in the store, where keys of earlier attempts remain.
    """
    return meet(timeout_s, attempt).join(shared_memory=shared_memory)


def default_group() -> object | None:
    """The default group of torch.distributed, if the caller's script has made it."""
    return dist.GroupMember.WORLD if dist.is_initialized() else None


def join_default_group(timeout_s: float = 300.0) -> Comm:
    """Join the ranks of torch.distributed's default group through its store."""
    ranks = tuple(range(dist.get_world_size()))
    name = f"rowwise/group/{next(_JOINED)}"
    store = dist.distributed_c10d._get_default_store()
    world = Rendezvous(store=store, name=name, ranks=ranks, rank=dist.get_rank(), pids={}, timeout_s=timeout_s)
    return _meet(world, _find_host(), None).join()


class ListeningSocket(NamedTuple):
    """Rank 0's socket, opened by the program that starts the ranks, at the address known to all ranks."""

    file: int
    world: int


def meet(timeout_s: float, attempt: int = 0, listener: ListeningSocket | None = None) -> "Meeting":
    """Find the hosts of all ranks, before ranks are connected."""
    try:
        if listener is None and dist.is_initialized() and dist.get_backend() != "fake":  # that of `fsdp.py`
            default: Any = dist.distributed_c10d._get_default_store()
            store, rank, world = default.clone(), dist.get_rank(), dist.get_world_size()
        elif listener is None:
            store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        else:
            store, rank, world = _serve(listener, timeout_s), 0, listener.world
    except ValueError as error:
        raise SpecError(error, hint="start the program with torchrun, which sets these variables") from error
    except dist.DistError as error:
        line = str(error).splitlines()[0]
        raise PeerError(f"ranks did not meet: {line}", hint="start rank 0 there, or give a larger --timeout") from error
    ranks, name = tuple(range(world)), f"rowwise/{attempt}"
    rendezvous = Rendezvous(store=store, name=name, ranks=ranks, rank=rank, pids={}, timeout_s=timeout_s)
    return _meet(rendezvous, _find_host(), None)


def _serve(listener: ListeningSocket, timeout_s: float) -> dist.TCPStore:
    with socket.socket(fileno=os.dup(listener.file)) as duplicate:
        port = duplicate.getsockname()[1]
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore("127.0.0.1", port, listener.world, True, limit, master_listen_fd=listener.file)


def _find_host() -> str:
    """This host's name, boot id and process namespace: containers of one host name do not share memory."""
    parts = [socket.gethostname()]
    if HAS_SHARED_MEMORY:
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


class HostOrder(Value, frozen=True):
    """An order of a job's hosts, by which ranks are numbered instead of by the launcher's."""

    hosts: tuple[str, ...]  # names
    groups: tuple[int, ...] = ()  # hosts of each group, in this order; empty: one group


@dataclass(frozen=True, slots=True)
class Meeting:
    """Ranks that know their hosts, before they are connected."""

    world: Rendezvous
    topology: Topology
    hosts: tuple[str, ...]  # names, in the order of the launcher

    @property
    def first_ranks(self) -> Rendezvous | None:
        """The first rank of each host; None on the others."""
        ranks = tuple(self.world.ranks[:: self.topology.devices])
        return replace(self.world, ranks=ranks, name=f"{self.world.name}/hosts") if self.world.rank in ranks else None

    def agree(self, what: str, decide: Callable[[], str]) -> str:
        """The text that `decide` returns on the first rank, on all ranks; its error is raised on all ranks."""
        key = f"{self.world.name}/{what}"
        if self.world.rank > 0:
            text = self.world.store.get(key).decode()
            if text.startswith(FAILED):
                raise AgreedError(f"rank 0 ({what}): {text.removeprefix(FAILED)}")
            return text
        try:
            text = decide()
        except RowwiseError as error:
            self.world.store.set(key, f"{FAILED}{error}")
            raise
        self.world.store.set(key, text)
        return text

    def join(
        self, order: HostOrder | None = None, *, shared_memory: bool = True, sums: Sequence[AllReduceSizes] = ()
    ) -> TransportComm:
        """Connect the ranks, numbered by an order of hosts if given; the devices of a host stay together.

        `sums`: algorithms of all-reduces by size, for hosts with one rank each; by default gloo's ring.
        """
        world, topology = self.world, self.topology
        if order is not None:
            devices = topology.devices
            hosts_H = [self.hosts.index(name) for name in order.hosts]
            ranks_W = [host * devices + device for host in hosts_H for device in range(devices)]
            pids = {ranks_W.index(rank): pid for rank, pid in world.pids.items()}
            world = replace(world, name=f"{world.name}/ordered", rank=ranks_W.index(world.rank), pids=pids)
            topology = structs.replace(topology, groups=order.groups)
        # A saved order of sums is of hosts: it is one of ranks only where each host has one.
        transport = TorchTransport(world, sums=sums if topology.devices == 1 else ())
        if shared_memory and HAS_SHARED_MEMORY and topology.devices > 1:
            return TransportComm(SharedMemoryTransport(transport, topology), topology, world.rank)
        return TransportComm(transport, topology, world.rank)


def _meet(world: Rendezvous, host: str, topology: Topology | None) -> Meeting:
    """Exchange process id and host of all ranks through the store."""
    world.store.set_timeout(timedelta(seconds=world.timeout_s))
    try:
        world.store.set(f"{world.name}/{world.rank}", f"{os.getpid()} {host}")
        pid_and_host_W = [world.store.get(f"{world.name}/{r}").decode().split(" ", 1) for r in world.ranks]
    except RuntimeError as error:
        late = f"not all of {len(world.ranks)} ranks have joined in {world.timeout_s:g} s: {error}"
        raise PeerError(f"rank {world.rank}: {late}", hint="start all ranks, or give a larger --timeout") from error
    names_W = [name for _, name in pid_and_host_W]
    topology = topology or find_topology(names_W)
    pids = {r: int(pid) for r, (pid, name) in enumerate(pid_and_host_W) if name == host}
    names = tuple(name.split()[0] for name in names_W[:: topology.devices])
    return Meeting(replace(world, pids=pids), topology, names)


def find_topology(hosts_W: Sequence[str]) -> Topology:
    """Hosts and devices per host, from the host name of each rank."""
    counts = [(host, len(list(ranks))) for host, ranks in groupby(hosts_W)]
    if len({host for host, _ in counts}) < len(counts):
        names = ", ".join(host.split()[0] for host in hosts_W)
        raise SpecError(f"ranks run on {names}", "consecutive ranks on each host")
    if len({devices for _, devices in counts}) > 1:
        devices_H = ", ".join(f"{devices} on {host.split()[0]}" for host, devices in counts)
        raise SpecError(
            f"ranks: {devices_H}",
            "equally many on each host",
            hint="start torchrun with one --nproc-per-node everywhere",
        )
    return Topology(hosts=len(counts), devices=counts[0][1])


def join_local_world(rank: int, folder: str, topology: Topology, settings: RankStart) -> Comm:
    """Join a world of processes started by `spawn`, through a store in `folder`."""
    torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // topology.world))
    # A file store needs no port, and no name server: without one, resolving the host's name may take seconds.
    store, ranks, address = dist.FileStore(f"{folder}/store", topology.world), tuple(range(topology.world)), "127.0.0.1"
    world = Rendezvous(store, "rowwise", ranks, rank, {}, settings.timeout_s, address)
    comm = _meet(world, address, topology).join(shared_memory=settings.shared_memory)
    return comm if settings.link is None else delay(comm, settings.link)
