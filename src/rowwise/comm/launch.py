"""How a world of processes begins: joined from torchrun's environment, or made here on one machine.

Its own file because only this knows hosts, ports and process ids. Gives up: ranks that join later, and restarts of
single ranks; a world begins and ends together.
"""

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rowwise.comm.group import Group
from rowwise.comm.seam import Comm
from rowwise.comm.shared import HAS_SHARED_MEMORY, Memory
from rowwise.comm.torch import Processes, World
from rowwise.errors import PeerError, SpecError
from rowwise.spec import Topology

T = TypeVar("T")
START_S = 30.0  # for processes to begin, on a busy machine
GRACE_S = 5.0  # after the first rank failed, for the others to notice and to say so


def connect(timeout_s: float = 300.0, shared_memory: bool = True, attempt: int = 0) -> Comm:
    """Join the world that torchrun's environment describes; ranks of one host use shared memory where they can.

    No rank waits longer than `timeout_s` for another. `attempt` is torchrun's count of restarts, as its store keeps
    what the ranks of an earlier attempt have left there.
    """
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ValueError as error:
        raise SpecError(f"{error}: start the program with torchrun, which says who is who") from error
    name, ranks = f"rowwise/{attempt}", tuple(range(world))
    world = World(store=store, name=name, ranks=ranks, rank=rank, pids={}, timeout_s=timeout_s)
    return _meet(world, _find_host(), None, shared_memory)


def _find_host() -> str:
    """This host's name, and what tells apart those that share it: its start, and whose processes one sees."""
    told = [socket.gethostname()]
    if HAS_SHARED_MEMORY:
        told += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(told)


def _meet(world: World, host: str, topology: Topology | None, shared_memory: bool) -> Comm:
    """The world, once its ranks have told each other where they are."""
    world.store.set_timeout(timedelta(seconds=world.timeout_s))
    world.store.set(f"{world.name}/{world.rank}", f"{os.getpid()} {host}")
    try:
        told_W = [world.store.get(f"{world.name}/{r}").decode().split(" ", 1) for r in world.ranks]
    except RuntimeError as error:
        raise PeerError(f"rank {world.rank}: not all of {len(world.ranks)} ranks have come: {error}") from error
    topology = topology or find_topology([name for _, name in told_W])
    pids = {r: int(pid) for r, (pid, name) in enumerate(told_W) if name == host}
    transport = Processes(replace(world, pids=pids))
    if shared_memory and HAS_SHARED_MEMORY and topology.devices > 1:
        return Group(Memory(transport, topology), topology, world.rank)
    return Group(transport, topology, world.rank)


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


def run_processes(
    world: int | Topology,
    function: Callable[..., T],
    *args: Any,
    timeout_s: float = 300.0,
    shared_memory: bool = False,
    threads: int = 1,
) -> list[T]:
    """What `function(comm, *args)` gives on each rank of a world of new processes on this machine.

    The function is found by its name, so it belongs to a module; hosts are pretended. If ranks fail, raises what each
    of them said. No rank waits longer than `timeout_s` for another, and soon after that those still there are stopped.
    """
    topology = Topology(devices=world) if isinstance(world, int) else world
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])  # importing torch takes seconds
    ranks: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = pickle.dumps((topology, timeout_s, shared_memory, threads, function, args))
        try:
            for rank in range(topology.world):
                answer, to_parent = context.Pipe(duplex=False)
                process = context.Process(target=_run_rank, args=(rank, folder, work, to_parent), daemon=True)
                process.start()
                to_parent.close()
                ranks.append((process, answer))
            return _collect(ranks, timeout_s)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join(GRACE_S)


def _run_rank(rank: int, folder: str, work: bytes, to_parent: Connection) -> None:
    """The life of one process."""
    try:
        topology, timeout_s, shared_memory, threads, function, args = pickle.loads(work)
        torch.set_num_threads(threads)
        # A file needs no port, nor a name server: without one a look-up of the loopback address may take seconds.
        store, ranks, at = dist.FileStore(f"{folder}/store", topology.world), tuple(range(topology.world)), "127.0.0.1"
        world = World(store=store, name="rowwise", ranks=ranks, rank=rank, pids={}, timeout_s=timeout_s, address=at)
        comm = _meet(world, at, topology, shared_memory)
        result = pickle.dumps(("result", function(comm, *args)))
        comm.close()
    except BaseException as error:
        kind = "reached" if isinstance(error, PeerError) else "own"
        to_parent.send_bytes(pickle.dumps((kind, f"failed: {traceback.format_exc()}")))
        raise SystemExit(1) from error
    to_parent.send_bytes(result)


def _collect(ranks: Sequence[tuple[BaseProcess, Connection]], timeout_s: float) -> list[Any]:
    """What the ranks answer, in rank order; once one failed, the others have little time left."""
    results: dict[int, Any] = {}
    own: dict[int, str] = {}  # what failing ranks said, if it was their own failure
    reached: dict[int, str] = {}  # another's that reached them
    end_s, left = time.monotonic() + START_S + timeout_s, {answer: rank for rank, (_, answer) in enumerate(ranks)}
    while left and (ready := wait(list(left), max(0.0, end_s - time.monotonic()))):
        for rank in sorted(left.pop(answer) for answer in list(left) if answer in ready):
            process, answer = ranks[rank]
            try:
                kind, said = pickle.loads(answer.recv_bytes())
            except EOFError:
                process.join(GRACE_S)
                kind, said = "own", f"ended with exit code {process.exitcode}, and said nothing"
            {"result": results, "own": own, "reached": reached}[kind][rank] = said
            if kind != "result":
                end_s = min(end_s, time.monotonic() + GRACE_S)
    late = {rank: f"has not ended, and was stopped (time limit {timeout_s} s)" for rank in left.values()}
    if own or reached or late:
        raise PeerError("\n".join(f"rank {rank} {said}" for rank, said in (own | reached | late).items()))
    return [results[rank] for rank in range(len(ranks))]
