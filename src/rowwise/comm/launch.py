"""How the ranks of a world find each other: those that torchrun has started, and those that `spawn` has made here.

Known limits: ranks that join later, and restarts of single ranks; a world begins and ends together.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from rowwise.comm.group import TransportComm
from rowwise.comm.rank_start import RankStart
from rowwise.comm.seam import Comm
from rowwise.comm.shared import HAS_SHARED_MEMORY, SharedMemoryTransport
from rowwise.comm.torch import Rendezvous, TorchTransport
from rowwise.errors import PeerError, SpecError
from rowwise.spec import Topology


@final
class TorchrunNotes:
    """Short texts in torchrun's store, which is there as long as torchrun is: attempts leave them for the next."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def get(self, name: str) -> str | None:
        """What was left under a name, if anything was."""
        key = f"rowwise/notes/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def put(self, name: str, text: str) -> None:
        self._store.set(f"rowwise/notes/{name}", text)


def connect(timeout_s: float = 300.0, shared_memory: bool = True, attempt: int = 0) -> Comm:
    """Join the world that torchrun's environment describes; ranks of one host use shared memory where they can.

    No rank waits longer than `timeout_s` for another. `attempt` is torchrun's count of restarts, as its store keeps
    what the ranks of an earlier attempt have left there.
    """
    return connect_with_notes(timeout_s, shared_memory, attempt)[0]


def connect_with_notes(timeout_s: float, shared_memory: bool, attempt: int) -> tuple[Comm, TorchrunNotes]:
    """As `connect`, and what attempts leave for each other."""
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ValueError as error:
        raise SpecError(f"{error}: start the program with torchrun, which says who is who") from error
    ranks, name = tuple(range(world)), f"rowwise/{attempt}"
    found = Rendezvous(store=store, name=name, ranks=ranks, rank=rank, pids={}, timeout_s=timeout_s)
    return _meet(found, _find_host(), None, shared_memory), TorchrunNotes(store)


def _find_host() -> str:
    """This host's name, and what tells apart those that share it: its start, and whose processes one sees."""
    told = [socket.gethostname()]
    if HAS_SHARED_MEMORY:
        told += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(told)


def _meet(world: Rendezvous, host: str, topology: Topology | None, shared_memory: bool) -> Comm:
    """The world, once its ranks have told each other where they are."""
    world.store.set_timeout(timedelta(seconds=world.timeout_s))
    world.store.set(f"{world.name}/{world.rank}", f"{os.getpid()} {host}")
    try:
        told_W = [world.store.get(f"{world.name}/{r}").decode().split(" ", 1) for r in world.ranks]
    except RuntimeError as error:
        raise PeerError(f"rank {world.rank}: not all of {len(world.ranks)} ranks have come: {error}") from error
    topology = topology or find_topology([name for _, name in told_W])
    pids = {r: int(pid) for r, (pid, name) in enumerate(told_W) if name == host}
    transport = TorchTransport(replace(world, pids=pids))
    if shared_memory and HAS_SHARED_MEMORY and topology.devices > 1:
        return TransportComm(SharedMemoryTransport(transport, topology), topology, world.rank)
    return TransportComm(transport, topology, world.rank)


def find_topology(hosts_W: Sequence[str]) -> Topology:
    """Hosts and devices, from the name of each rank's host."""
    runs = [(host, len(list(run))) for host, run in groupby(hosts_W)]
    if len({host for host, _ in runs}) < len(runs):
        names = ", ".join(host.split()[0] for host in hosts_W)
        raise SpecError(f"ranks run on {names}: want the ranks of a host numbered one after the other")
    if len({devices for _, devices in runs}) > 1:
        found = ", ".join(f"{devices} on {host.split()[0]}" for host, devices in runs)
        raise SpecError(f"ranks: {found}: want equally many; start torchrun with one --nproc-per-node everywhere")
    return Topology(hosts=len(runs), devices=runs[0][1])


def join_local_world(rank: int, folder: str, topology: Topology, making: RankStart) -> Comm:
    """Join a world of processes that `spawn` has made; they meet in a folder."""
    torch.set_num_threads(making.threads or max(1, torch.get_num_threads() // topology.world))
    # A file needs no port, nor a name server: without one a look-up of the loopback address may take seconds.
    store, ranks, at = dist.FileStore(f"{folder}/store", topology.world), tuple(range(topology.world)), "127.0.0.1"
    world = Rendezvous(
        store=store, name="rowwise", ranks=ranks, rank=rank, pids={}, timeout_s=making.timeout_s, address=at
    )
    return _meet(world, at, topology, making.shared_memory)
