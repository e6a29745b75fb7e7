"""A service on a Ray cluster: the same coordinator, in an actor, and workers on whatever nodes have room.

Ray starts processes, notices that they or their nodes are gone, and carries bytes: a split is one object, its block,
which reaches a trainer's node once and is mapped there. Which split is whose stays with the coordinator, so that what
is delivered is exactly what one machine would deliver. Nodes must see the same files, and have rowwise installed. Its
own file because nothing else knows of Ray. Gives up: reading frames while they are on their way.

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Self, final

import numpy as np
from msgspec import structs

from rowwise.errors import DataError, PeerError, SpecError
from rowwise.ingest.block import Bytes, Encoded, Layout, private
from rowwise.ingest.prepare import Task
from rowwise.ingest.service.client import Health, sum_of
from rowwise.ingest.service.coordinator import (
    Attached,
    Command,
    Coordinator,
    Event,
    Give,
    Joined,
    Kill,
    Lease,
    Lost,
    Made,
    Place,
    Plan,
    Refused,
    Released,
    Retire,
    Start,
    Tick,
    Vanished,
)
from rowwise.ingest.service.local import Workers
from rowwise.ingest.service.messages import Bad, Prepare, Prepared, Times
from rowwise.ingest.service.worker import prepared

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
            raise SpecError(f"data.workers.address={address!r}: there is no Ray cluster: {error}; {out}") from error
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
        raise SpecError(f"data.workers.address={address!r}: there is no Ray cluster: {error}") from error


@final
class Frames:
    """A worker, as an actor: a split's block as one object, and what is known of it as another."""

    def __init__(self, task: Task) -> None:
        """Hold what to prepare."""
        self._task = task

    def ready(self) -> bool:
        """It is here."""
        return True

    def prepare(self, epoch: int, at: int) -> tuple[Bytes, Prepared | Bad]:
        """A split."""
        blocks: list[Bytes] = []

        def memory(size_bytes: int) -> Bytes:
            blocks.append(private(size_bytes))
            return blocks[-1]

        told = prepared(self._task, Prepare(place=Place(epoch, at), slot=0), memory)
        return (blocks[-1] if isinstance(told, Prepared) else np.empty(0, np.uint8)), told


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A split for a client: where its block is, or why there is none."""

    block: Any  # a reference, in a list so that it is not resolved on the way
    layout: Layout | None = None
    error: str | None = None
    times: Times = field(default_factory=Times)
    workers: int = 0
    ready: int = 0


@dataclass(slots=True)
class _Ready:
    """What a worker has made."""

    block: Any
    told: Prepared


@final
class Board:
    """The coordinator, as an actor: answers clients when their split is there."""

    def __init__(self, plan: Plan, cpus: float) -> None:
        """`cpus`: of a node that a worker takes."""
        self._coordinator, self._cpus = Coordinator(plan), cpus
        self._task: Any = None  # a reference: what clients bring survives an end of this actor
        self._workers: dict[int, Any] = {}
        self._slots: dict[int, _Ready] = {}
        self._given: dict[tuple[int, Place], Give] = {}
        self._news = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._life = uuid.uuid4().hex  # another one, where Ray has started this actor again

    async def attach(self, task: list[Any], client: int, place: Place, waited_s: float) -> str:
        """A client wants the splits from here on; it learns whom it has told.

        Args:
            task: a reference to what there is to prepare, in a list so that it is not resolved on the way.
            client: who it is.
            place: the first split.
            waited_s: before now.
        """
        if self._task is None:
            self._later(self._tick())  # before that there is nothing to start workers with
        self._task = task[0]
        self._given = {key: give for key, give in self._given.items() if key[0] != client}
        self._tell(Attached(client, place, waited_s))
        return self._life

    async def take(self, life: str, client: int, epoch: int, at: int) -> Fetched | None:
        """A split, once it is ready; None to a client that this coordinator does not know."""
        if life != self._life:
            return None
        key = client, Place(epoch, at)
        while key not in self._given:
            await self._news.wait()
        give = self._given[key]
        coordinator = self._coordinator
        about = {"workers": coordinator.workers, "ready": coordinator.ready}
        if give.slot is None:
            return Fetched(block=[], error=give.error, **about)
        made = self._slots[give.slot]
        return Fetched(block=[made.block], layout=made.told.layout, times=made.told.times, **about)

    async def release(self, client: int, epoch: int, at: int, waited_s: float) -> None:
        """A client has a split, and everything before it."""
        self._given.pop((client, Place(epoch, at)), None)
        self._tell(Released(client, Place(epoch, at), waited_s))

    async def vanished(self, epoch: int, at: int) -> None:
        """A split cannot be fetched any more."""
        place = Place(epoch, at)
        self._given = {key: give for key, give in self._given.items() if key[1] != place}
        self._tell(Vanished(place))

    async def workers(self) -> list[int]:
        """Processes of the workers that are ready, for tests to end."""
        return [pid for pid in await asyncio.gather(*map(_pid, self._workers.values())) if pid]

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tell(Tick())

    def _later(self, call: Any) -> None:
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _tell(self, event: Event) -> None:
        for command in self._coordinator.handle(event, time.monotonic()):
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Start(worker=number):
                self._later(self._start(number))
            case Retire(worker=number) | Kill(worker=number):
                self._end(number)
            case Lease():
                self._later(self._lease(command))
            case Give(client=client, place=place):
                self._given[client, place] = command
                news, self._news = self._news, asyncio.Event()
                news.set()

    async def _start(self, number: int) -> None:
        ray = _ray()
        worker = ray.remote(Frames).options(num_cpus=self._cpus, max_restarts=0).remote(self._task)
        self._workers[number] = worker
        try:
            await worker.ready.remote()
        except ray.exceptions.RayError as error:
            self._lost(number, error)
        else:
            self._tell(Joined(number))

    async def _lease(self, lease: Lease) -> None:
        ray = _ray()
        worker = self._workers.get(lease.worker)
        if worker is None:
            return
        place = lease.place
        block, told_later = worker.prepare.options(num_returns=2).remote(place.epoch, place.at)
        try:
            told = await told_later
        except ray.exceptions.RayError as error:
            self._lost(lease.worker, error)
            return
        if isinstance(told, Bad):
            self._tell(Refused(lease.worker, place, told.error))
        else:
            self._slots[lease.slot] = _Ready(block, told)
            self._tell(Made(lease.worker, place, told.times.busy_s))

    def _lost(self, number: int, error: Exception) -> None:
        if self._workers.pop(number, None) is not None:
            self._tell(Lost(number, " ".join(str(error).split())[:200]))

    def _end(self, number: int) -> None:
        ray = _ray()
        worker = self._workers.pop(number, None)
        if worker is not None:
            ray.kill(worker)
            self._later(self._ended(number))

    async def _ended(self, number: int) -> None:
        self._tell(Lost(number, "it took too long, and was killed"))


async def _pid(worker: Any) -> int:
    ray = _ray()
    try:
        return int(await worker.__ray_call__.remote(_own_pid))
    except ray.exceptions.RayError:
        return 0


def _own_pid(_: object) -> int:
    return os.getpid()


@final
class Cluster:
    """What the clients of a service share; closing the one that began it ends it."""

    def __init__(self, task: Task, workers: Workers, clients: int = 1, name: str | None = None) -> None:
        """`name`: of a service that another process has begun; all give the same task."""
        self._ray, self._owns = connect(workers.address), name is None
        self.name = name or f"rowwise-{uuid.uuid4().hex}"
        actor = self._ray.remote(Board).options(
            name=self.name,
            namespace="rowwise",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=1000,
        )
        self._task = [self._ray.put(task)]
        self.board = actor.remote(workers.plan(clients, task), workers.cpus)

    def client(self, number: int = 0) -> "ClusterClient":
        """One trainer's end."""
        return ClusterClient(self._ray, number, self.board, self._task)

    def close(self) -> None:
        """End it, if it was begun here."""
        if self._owns:
            self._ray.kill(self.board)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class ClusterClient:
    """One of the trainers: splits in order, each once, some of them fetched before they are needed."""

    def __init__(self, ray: Any, number: int, board: Any, task: list[Any]) -> None:
        """`board`: the coordinator; `task`: a reference to what there is to prepare, for it."""
        self._ray, self._number, self.board, self._task = ray, number, board, task
        self._life = ""
        self.health = Health()

    def splits(self, epoch: int, at: int, count: int) -> Iterator[Encoded]:
        """Those of an epoch from a place on, up to its end."""
        asked: dict[int, Any] = {}
        self._attach(epoch, at)
        for number in range(at, count):
            begin_s = perf_counter()
            found = self._fetch(asked, Place(epoch, number), count)
            health = self.health
            self.health = structs.replace(
                health, splits=health.splits + 1, waited_s=health.waited_s + perf_counter() - begin_s
            )
            yield found
            self.board.release.remote(self._number, epoch, number, self.health.waited_s)

    def close(self) -> None:
        """There is nothing to hang up."""

    def _fetch(self, asked: dict[int, Any], place: Place, count: int) -> Encoded:
        """One split, whoever is lost meanwhile."""
        errors = self._ray.exceptions
        end_s = perf_counter() + PATIENCE_S
        while perf_counter() < end_s:
            try:
                fetched = self._ask(asked, place, count)
                if fetched is not None:
                    if fetched.error is not None:
                        raise DataError(fetched.error)
                    block = self._ray.get(fetched.block[0])
                    self._note(fetched)
                    assert fetched.layout is not None
                    return Encoded.of(block, fetched.layout)
                self._again(asked, place)
            except errors.ObjectLostError:
                asked.clear()
                self.board.vanished.remote(place.epoch, place.at)
            except errors.RayActorError:
                self._again(asked, place)
        raise PeerError(f"the service that prepares rows does not answer for {PATIENCE_S:.0f} s: see the Ray cluster")

    def _ask(self, asked: dict[int, Any], place: Place, count: int) -> Fetched | None:
        for number in range(place.at, min(place.at + FETCHED_AHEAD, count)):
            if number not in asked:
                asked[number] = self.board.take.remote(self._life, self._number, place.epoch, number)
        found: Fetched | None = self._ray.get(asked.pop(place.at))
        return found

    def _note(self, fetched: Fetched) -> None:
        times = sum_of(self.health.times, fetched.times)
        self.health = structs.replace(self.health, times=times, workers=fetched.workers, ready=fetched.ready)

    def _again(self, asked: dict[int, Any], place: Place) -> None:
        """To a coordinator that does not know where this client stands."""
        asked.clear()
        time.sleep(TICK_S)
        self.health = structs.replace(self.health, restarts=self.health.restarts + 1)
        with contextlib.suppress(self._ray.exceptions.RayActorError):  # it is not back yet
            self._attach(place.epoch, place.at)

    def _attach(self, epoch: int, at: int) -> None:
        place = Place(epoch, at)
        self._life = self._ray.get(self.board.attach.remote(self._task, self._number, place, self.health.waited_s))
