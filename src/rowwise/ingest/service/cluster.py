"""A service on a Ray cluster: the same coordinator in an actor, and workers as actors on any nodes with free cores.

Ray starts processes, detects lost processes and nodes, and transfers bytes: the block of a split is one object, which
reaches a trainer's node once and is mapped there. The coordinator alone assigns splits, so clients receive the same
splits as from one machine. All nodes must see the same files and have rowwise installed.

[Note: a cluster that breaks] A lost worker ends its lease. A lost node takes its unfetched splits with it: a client
that cannot fetch a split reports it, and the split is prepared again. Ray restarts a lost coordinator; each client
detects the restart and attaches with its position.
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

from rowwise.base.errors import PeerError, SpecError
from rowwise.base.textfile import parse_whole
from rowwise.ingest.block import Bytes, allocate
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
CONNECT_TIMEOUT_S = 5.0
FETCH_AHEAD = 2  # prefetch depth of a client, including the next split
NO_CLUSTER, RUNNING = "no Ray cluster answers", "the address of a running cluster"
START_ONE = "or start one here: ray start --head"
ANSWER_TIMEOUT_S = 60.0  # includes the restart of a coordinator


def connect(address: str | None) -> Any:
    """Ray, connected to the cluster at this address; None for this process's cluster, or a new one on this machine."""
    try:
        ray = _ray()
    except ImportError:
        raise SpecError("data.workers.on=ray needs Ray", hint="pip install 'rowwise[cluster]'") from None
    if not ray.is_initialized():
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise SpecError(
                f"data.workers.address={address!r}: {NO_CLUSTER}: {error}", RUNNING, hint=START_ONE
            ) from error
    return ray


def _ray() -> Any:
    """Ray, imported on first use: it is an optional dependency."""
    return importlib.import_module("ray")


def _check_reachable(address: str | None) -> None:
    """Fail fast if nothing listens; Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    number = parse_whole(port)
    if not colon or number is None or number > 65535 or "/" in host:
        return
    try:
        socket.create_connection((host, number), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise SpecError(f"data.workers.address={address!r}: {NO_CLUSTER}: {error}", RUNNING, hint=START_ONE) from error


@final
class WorkerActor:
    """A worker as a Ray actor. `prepare` returns two objects: the split's block and its event."""

    def __init__(self, task: PreparationTask) -> None:
        self._task = task

    def ready(self) -> bool:
        return True

    def prepare(self, lease: SplitLease) -> tuple[Bytes, SplitReady | SplitRefused]:
        blocks: list[Bytes] = []

        def memory(size_bytes: int) -> Bytes:
            blocks.append(allocate(size_bytes))
            return blocks[-1]

        event = prepare_split(self._task, lease, memory)
        return (blocks[-1] if isinstance(event, SplitReady) else np.empty(0, np.uint8)), event


@final
class CoordinatorActor:
    """The coordinator as a Ray actor: a client's `take` returns when its split is ready."""

    def __init__(self, config: ServiceConfig, cpus: float) -> None:
        """`cpus`: cores that Ray reserves for each worker."""
        self._coordinator, self._cpus = Coordinator(config), cpus
        self._task: Any = None  # a reference that clients own, so the task survives a restart of this actor
        self._workers: dict[int, Any] = {}
        self._slots: dict[int, Any] = {}  # references to blocks
        self._deliveries: dict[tuple[int, SplitId], SplitDelivery] = {}
        self._delivered = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()  # asyncio itself keeps only weak references
        self._incarnation = uuid.uuid4().hex  # differs after a restart, so clients notice it

    async def attach(self, task: list[Any], event: ClientAttached) -> str:
        """Attach a client, and return this actor's incarnation.

        `task`: a reference to the `PreparationTask`, in a list so that Ray passes the reference and not the task.
        """
        if self._task is None:
            self._run_in_background(self._tick())  # workers cannot start before the first client brings the task
        self._task = task[0]
        self._deliveries = {key: delivery for key, delivery in self._deliveries.items() if key[0] != event.client}
        self._handle(event)
        return self._incarnation

    async def take(self, incarnation: str, client: int, split_id: SplitId) -> tuple[SplitDelivery, list[Any]] | None:
        """Wait for a split: its delivery and a reference to its block. None if the client attached before a restart."""
        if incarnation != self._incarnation:
            return None
        while (client, split_id) not in self._deliveries:
            await self._delivered.wait()
        delivery = self._deliveries[client, split_id]
        return delivery, [] if delivery.slot is None else [self._slots[delivery.slot]]

    async def release(self, event: SplitReleased) -> None:
        self._deliveries.pop((event.client, event.split_id), None)
        self._handle(event)

    async def report_vanished(self, event: SplitVanished) -> None:
        self._deliveries = {key: delivery for key, delivery in self._deliveries.items() if key[1] != event.split_id}
        self._handle(event)

    async def workers(self) -> list[int]:
        """Process ids of the running workers, for tests that kill them."""
        return [pid for pid in await asyncio.gather(*map(_pid, self._workers.values())) if pid]

    async def pid(self) -> int:
        return os.getpid()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(ClockTick())

    def _run_in_background(self, call: Any) -> None:
        task = asyncio.ensure_future(call)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _handle(self, event: Event) -> None:
        for command in self._coordinator.handle(event, time.monotonic()):
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case StartWorker(worker=number):
                self._run_in_background(self._start(number))
            case RetireWorker(worker=number) | KillWorker(worker=number):
                self._kill_worker(number)
            case SplitLease():
                self._run_in_background(self._lease(command))
            case SplitDelivery(client=client, split_id=split_id):
                self._deliveries[client, split_id] = command
                self._delivered.set()  # wakes every waiting `take`; later ones wait on a new event
                self._delivered = asyncio.Event()

    async def _start(self, number: int) -> None:
        ray = _ray()
        worker = ray.remote(WorkerActor).options(num_cpus=self._cpus, max_restarts=0).remote(self._task)
        self._workers[number] = worker
        try:
            await worker.ready.remote()
        except ray.exceptions.RayError as error:
            self._report_lost(number, error)
        else:
            self._handle(WorkerJoined(number))

    async def _lease(self, lease: SplitLease) -> None:
        ray = _ray()
        worker = self._workers.get(lease.worker)
        if worker is None:
            return
        block, pending = worker.prepare.options(num_returns=2).remote(lease)
        try:
            event = await pending
        except ray.exceptions.RayError as error:
            self._report_lost(lease.worker, error)
            return
        if isinstance(event, SplitReady):
            self._slots[lease.slot] = block
        self._handle(event)

    def _report_lost(self, number: int, error: Exception) -> None:
        if self._workers.pop(number, None) is not None:
            self._handle(WorkerLost(number, " ".join(str(error).split())[:200]))

    def _kill_worker(self, number: int) -> None:
        ray = _ray()
        worker = self._workers.pop(number, None)
        if worker is not None:
            ray.kill(worker)
            self._run_in_background(self._report_killed(number))

    async def _report_killed(self, number: int) -> None:
        self._handle(WorkerLost(number, "it exceeded data.workers.lease_s and was killed"))


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
    """A process's handle of a service on Ray; closing the handle that started the service ends it."""

    def __init__(self, task: PreparationTask, workers: Workers, clients: int = 1, name: str | None = None) -> None:
        """`name`: the service to join, with the same task; None starts a new service."""
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
        self.coordinator = actor.remote(workers.service_config(clients, task), workers.cpus)

    def client(self, number: int = 0) -> ServiceClient:
        return ServiceClient(ClusterTransport(self._ray, number, self.coordinator, self._task))

    def close(self) -> None:
        """End the service, if this handle started it."""
        if self._owns:
            self._ray.kill(self.coordinator)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class ClusterTransport:
    """Carries splits from the coordinator of a cluster; prefetches FETCH_AHEAD splits."""

    def __init__(self, ray: Any, number: int, coordinator: Any, task: list[Any]) -> None:
        """`task`: a reference to the `PreparationTask`, in a list: see `CoordinatorActor.attach`."""
        self._ray, self._number, self._coordinator, self._task = ray, number, coordinator, task
        self._incarnation = ""
        self._requests: dict[int, Any] = {}
        self._waited_s = 0.0
        self._last_taken: SplitId | None = None
        self.restarts = 0

    def attach(self, split_id: SplitId, waited_s: float) -> None:
        self._requests.clear()
        self._last_taken, self._waited_s = None, waited_s
        attached = ClientAttached(self._number, split_id, waited_s)
        self._incarnation = self._ray.get(self._coordinator.attach.remote(self._task, attached))

    def take(self, split_id: SplitId, count: int, waited_s: float) -> tuple[SplitDelivery, Bytes | None]:
        """Wait for a split; retry if its block or the coordinator is lost."""
        self._waited_s = waited_s
        if self._last_taken is not None:
            self._coordinator.release.remote(SplitReleased(self._number, self._last_taken, waited_s))
        errors = self._ray.exceptions
        end_s = perf_counter() + ANSWER_TIMEOUT_S
        while perf_counter() < end_s:
            try:
                reply = self._request(split_id, count)
                if reply is not None:
                    delivery, block = reply
                    self._last_taken = split_id
                    return delivery, self._ray.get(block[0]) if block else None
                self._reattach(split_id)
            except errors.ObjectLostError:
                self._requests.clear()
                self._coordinator.report_vanished.remote(SplitVanished(split_id))
            except errors.RayActorError:
                self._reattach(split_id)
        problem = f"the service that prepares rows has not answered for {ANSWER_TIMEOUT_S:.0f} s"
        raise PeerError(problem, hint="check the Ray cluster: ray status")

    def close(self) -> None:
        """Nothing to close: Ray owns the connections."""

    def _request(self, split_id: SplitId, count: int) -> tuple[SplitDelivery, list[Any]] | None:
        for number in range(split_id.index, min(split_id.index + FETCH_AHEAD, count)):
            if number not in self._requests:
                wanted = SplitId(split_id.epoch, number)
                self._requests[number] = self._coordinator.take.remote(self._incarnation, self._number, wanted)
        reply: tuple[SplitDelivery, list[Any]] | None = self._ray.get(self._requests.pop(split_id.index))
        return reply

    def _reattach(self, split_id: SplitId) -> None:
        """Attach to a restarted coordinator, which has lost this client's position."""
        time.sleep(TICK_S)
        self.restarts += 1
        with contextlib.suppress(self._ray.exceptions.RayActorError):  # not restarted yet: `take` retries
            self.attach(split_id, self._waited_s)
