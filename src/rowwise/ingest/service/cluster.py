"""A service on a Ray cluster: the same coordinator, in an actor, and workers on whatever nodes have room.

Ray starts processes, notices that they or their nodes are gone, and carries bytes: a split is one object, its block,
which reaches a trainer's node once and is mapped there. Which split is whose stays with the coordinator, so that what
is delivered is exactly what one machine would deliver. Nodes must see the same files, and have rowwise installed.
Known limits: reading frames while they are on their way.

[Note: a cluster that breaks] A worker that is lost ends its lease. A node that is lost takes splits with it that
nobody has fetched: a client that cannot fetch one says so, and it is prepared again. If the coordinator is lost, Ray
starts it again, and each client that meets the new one tells it where it stands.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import time
import uuid
from time import perf_counter
from typing import Any, Self, final

import numpy as np

from rowwise.errors import PeerError, SpecError
from rowwise.ingest.block import Bytes, private
from rowwise.ingest.prepare import PreparationTask
from rowwise.ingest.service.client import ServiceClient
from rowwise.ingest.service.coordinator import (
    ClientAttached,
    ClockTick,
    Command,
    Coordinator,
    Event,
    KillWorker,
    RetireWorker,
    ServiceConfig,
    SplitDelivery,
    SplitId,
    SplitLease,
    SplitReady,
    SplitRefused,
    SplitReleased,
    SplitVanished,
    StartWorker,
    WorkerJoined,
    WorkerLost,
)
from rowwise.ingest.service.local import Workers
from rowwise.ingest.service.worker import prepare_split

TICK_S = 0.1
KNOCK_S = 5.0
FETCHED_AHEAD = 2  # splits that a client asks for before it needs them
PATIENCE_S = 60.0  # for a coordinator that is being replaced


def connect(address: str | None) -> Any:
    """Ray, connected to a cluster: by its address, or the one this process is part of, or else one of this machine."""
    try:
        ray = _ray()
    except ImportError:
        raise SpecError("workers on Ray need a package that is not here: pip install 'rowwise[cluster]'") from None
    if not ray.is_initialized():
        _knock(address)
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            out = "give the address of one that runs, or start one here: ray start --head"
            raise SpecError(f"data.workers.address={address!r}: no Ray cluster answers: {error}; {out}") from error
    return ray


def _ray() -> Any:
    """Loaded by those only who use it."""
    return importlib.import_module("ray")


def _knock(address: str | None) -> None:
    """Ray tries for minutes to reach what is not there."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()
    except OSError as error:
        raise SpecError(f"data.workers.address={address!r}: no Ray cluster answers: {error}") from error


@final
class WorkerActor:
    """A worker as a Ray actor: a split's block is one object, its metadata another."""

    def __init__(self, task: PreparationTask) -> None:
        self._task = task

    def ready(self) -> bool:
        return True

    def prepare(self, lease: SplitLease) -> tuple[Bytes, SplitReady | SplitRefused]:
        blocks: list[Bytes] = []

        def memory(size_bytes: int) -> Bytes:
            blocks.append(private(size_bytes))
            return blocks[-1]

        event = prepare_split(self._task, lease, memory)
        return (blocks[-1] if isinstance(event, SplitReady) else np.empty(0, np.uint8)), event


@final
class CoordinatorActor:
    """The coordinator, as an actor: answers clients when their split is there."""

    def __init__(self, plan: ServiceConfig, cpus: float) -> None:
        """`cpus`: of a node that a worker takes."""
        self._coordinator, self._cpus = Coordinator(plan), cpus
        self._task: Any = None  # a reference: what clients bring survives an end of this actor
        self._workers: dict[int, Any] = {}
        self._slots: dict[int, Any] = {}  # references to blocks
        self._given: dict[tuple[int, SplitId], SplitDelivery] = {}
        self._news = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._life = uuid.uuid4().hex  # another one, where Ray has started this actor again

    async def attach(self, task: list[Any], event: ClientAttached) -> str:
        """A client wants the splits from here on; it learns whom it has told.

        `task`: a reference to what there is to prepare, in a list so that it is not resolved on the way.
        """
        if self._task is None:
            self._later(self._tick())  # before that there is nothing to start workers with
        self._task = task[0]
        self._given = {key: give for key, give in self._given.items() if key[0] != event.client}
        self._send(event)
        return self._life

    async def take(self, life: str, client: int, place: SplitId) -> tuple[SplitDelivery, list[Any]] | None:
        """A split, once it is ready, with a reference to its block; None to a client that is not known here."""
        if life != self._life:
            return None
        while (client, place) not in self._given:
            await self._news.wait()
        give = self._given[client, place]
        return give, [] if give.slot is None else [self._slots[give.slot]]

    async def release(self, event: SplitReleased) -> None:
        """A client has a split, and everything before it."""
        self._given.pop((event.client, event.place), None)
        self._send(event)

    async def vanished(self, event: SplitVanished) -> None:
        """A split cannot be fetched any more."""
        self._given = {key: give for key, give in self._given.items() if key[1] != event.place}
        self._send(event)

    async def workers(self) -> list[int]:
        """Processes of the workers that are ready, for tests to end."""
        return [pid for pid in await asyncio.gather(*map(_pid, self._workers.values())) if pid]

    async def pid(self) -> int:
        return os.getpid()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._send(ClockTick())

    def _later(self, call: Any) -> None:
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _send(self, event: Event) -> None:
        for command in self._coordinator.handle(event, time.monotonic()):
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case StartWorker(worker=number):
                self._later(self._start(number))
            case RetireWorker(worker=number) | KillWorker(worker=number):
                self._end(number)
            case SplitLease():
                self._later(self._lease(command))
            case SplitDelivery(client=client, place=place):
                self._given[client, place] = command
                news, self._news = self._news, asyncio.Event()
                news.set()

    async def _start(self, number: int) -> None:
        ray = _ray()
        worker = ray.remote(WorkerActor).options(num_cpus=self._cpus, max_restarts=0).remote(self._task)
        self._workers[number] = worker
        try:
            await worker.ready.remote()
        except ray.exceptions.RayError as error:
            self._lost(number, error)
        else:
            self._send(WorkerJoined(number))

    async def _lease(self, lease: SplitLease) -> None:
        ray = _ray()
        worker = self._workers.get(lease.worker)
        if worker is None:
            return
        block, later = worker.prepare.options(num_returns=2).remote(lease)
        try:
            event = await later
        except ray.exceptions.RayError as error:
            self._lost(lease.worker, error)
            return
        if isinstance(event, SplitReady):
            self._slots[lease.slot] = block
        self._send(event)

    def _lost(self, number: int, error: Exception) -> None:
        if self._workers.pop(number, None) is not None:
            self._send(WorkerLost(number, " ".join(str(error).split())[:200]))

    def _end(self, number: int) -> None:
        ray = _ray()
        worker = self._workers.pop(number, None)
        if worker is not None:
            ray.kill(worker)
            self._later(self._ended(number))

    async def _ended(self, number: int) -> None:
        self._send(WorkerLost(number, "it took too long, and was killed"))


async def _pid(worker: Any) -> int:
    ray = _ray()
    try:
        return int(await worker.__ray_call__.remote(_own_pid))
    except ray.exceptions.RayError:
        return 0


def _own_pid(_: object) -> int:
    return os.getpid()


@final
class ServiceCluster:
    """The cluster that the clients of a service share; closing the one that began it ends it."""

    def __init__(self, task: PreparationTask, workers: Workers, clients: int = 1, name: str | None = None) -> None:
        """`name`: of a service that another process has begun; all give the same task."""
        self._ray, self._owns = connect(workers.address), name is None
        self.name = name or f"rowwise-{uuid.uuid4().hex}"
        actor = self._ray.remote(CoordinatorActor).options(
            name=self.name,
            namespace="rowwise",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=1000,
        )
        self._task = [self._ray.put(task)]
        self.board = actor.remote(workers.plan(clients, task), workers.cpus)

    def client(self, number: int = 0) -> ServiceClient:
        return ServiceClient(ClusterTransport(self._ray, number, self.board, self._task))

    def close(self) -> None:
        """End the cluster if it was started here."""
        if self._owns:
            self._ray.kill(self.board)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class ClusterTransport:
    """To the coordinator of a cluster; some splits are fetched before they are needed."""

    def __init__(self, ray: Any, number: int, board: Any, task: list[Any]) -> None:
        """`board`: the coordinator; `task`: a reference to what there is to prepare, for it."""
        self._ray, self._number, self._board, self._task = ray, number, board, task
        self._life = ""
        self._asked: dict[int, Any] = {}
        self._waited_s = 0.0
        self._taken: SplitId | None = None
        self.restarts = 0

    def attach(self, place: SplitId, waited_s: float) -> None:
        """Tell the coordinator that is there."""
        self._asked.clear()
        self._taken, self._waited_s = None, waited_s
        attached = ClientAttached(self._number, place, waited_s)
        self._life = self._ray.get(self._board.attach.remote(self._task, attached))

    def take(self, place: SplitId, count: int, waited_s: float) -> tuple[SplitDelivery, Bytes | None]:
        """One split, even if workers are lost in between."""
        self._waited_s = waited_s
        if self._taken is not None:
            self._board.release.remote(SplitReleased(self._number, self._taken, waited_s))
        errors = self._ray.exceptions
        end_s = perf_counter() + PATIENCE_S
        while perf_counter() < end_s:
            try:
                found = self._request(place, count)
                if found is not None:
                    give, block = found
                    self._taken = place
                    return give, self._ray.get(block[0]) if block else None
                self._reconnect(place)
            except errors.ObjectLostError:
                self._asked.clear()
                self._board.vanished.remote(SplitVanished(place))
            except errors.RayActorError:
                self._reconnect(place)
        raise PeerError(f"the service that prepares rows does not answer for {PATIENCE_S:.0f} s: see the Ray cluster")

    def close(self) -> None:
        """There is no connection to close."""

    def _request(self, place: SplitId, count: int) -> tuple[SplitDelivery, list[Any]] | None:
        for number in range(place.at, min(place.at + FETCHED_AHEAD, count)):
            if number not in self._asked:
                wanted = SplitId(place.epoch, number)
                self._asked[number] = self._board.take.remote(self._life, self._number, wanted)
        found: tuple[SplitDelivery, list[Any]] | None = self._ray.get(self._asked.pop(place.at))
        return found

    def _reconnect(self, place: SplitId) -> None:
        """To a coordinator that does not know where this client stands."""
        time.sleep(TICK_S)
        self.restarts += 1
        with contextlib.suppress(self._ray.exceptions.RayActorError):  # it is not back yet
            self.attach(place, self._waited_s)
