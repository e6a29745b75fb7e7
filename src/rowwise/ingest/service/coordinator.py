"""The service's decisions as a pure state machine: which worker prepares which split, and which client gets it.

[Note: exactly once] An epoch is one sequence of splits (see [Note: order of rows] in `batcher.py`), and preparing a
split depends on its index and the epoch alone. So preparing a split is idempotent, on any worker. A client takes splits
strictly in order and sends the id of the next split it needs, so it uses no split twice and skips none. The state kept
here may be lost: it follows from the clients' positions, which their checkpoints hold.

`handle(event, now_s)` returns commands. Nothing here knows of processes, sockets or a clock, so the same state machine
runs on one host (`host.py`) and on a cluster (`cluster.py`), and a test simulates years of faults in a second. A worker
leases a split; if the lease expires, the worker is killed and another worker leases the split. A split is kept until
every client has released it. Known limits: clients advance together, at the pace of the slowest.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, final

from rowwise.base.errors import SpecError
from rowwise.ingest.block import BlockLayout
from rowwise.ingest.prepare import PreparationSeconds
from rowwise.ingest.service.scaling import ServiceLoad, wanted_workers
from rowwise.tables.spec import Value


class ServiceConfig(Value, frozen=True):
    """The number of clients, splits, epochs and workers of a service."""

    clients: int = 1  # ranks that share the service; each gets every split
    splits: int = 1  # in an epoch
    epochs: int = 1  # prefetched; a later epoch is prepared when a client attaches to it
    workers: int = 1  # at the start
    min_workers: int = 1
    max_workers: int = 1
    ahead: int = 3  # backlog limit: ready splits beyond one per worker
    lease_s: float = 300.0  # lease of a split; its worker is killed when it expires
    attempts: int = 3  # workers lost while preparing one split, after which the split is refused
    interval_s: float = 1.0  # between scaling decisions

    def __post_init__(self) -> None:
        counts = (self.clients, self.splits, self.epochs, self.min_workers, self.ahead, self.attempts)
        if min(counts) < 1 or not self.min_workers <= self.workers <= self.max_workers:
            raise SpecError(
                f"workers={self.workers}, min_workers={self.min_workers}, max_workers={self.max_workers}",
                "min_workers <= workers <= max_workers, and every count at least 1",
            )
        if not (self.lease_s > 0 and self.interval_s > 0):
            raise SpecError(f"lease_s={self.lease_s}, interval_s={self.interval_s}", "more than 0")


class SplitId(Value, frozen=True, order=True):
    """The position of a split in the sequence: its epoch, and its index in the epoch's order."""

    epoch: int
    index: int


class WorkerTimes(Value, frozen=True):
    """Seconds of a split in a worker by stage."""

    spent: PreparationSeconds = PreparationSeconds()
    busy_s: float = 0.0
    cpu_s: float = 0.0


class ClientAttached(Value, frozen=True, tag=True):
    """A client requests the splits from this one on. A client that attaches again moves to the new position."""

    client: int
    split_id: SplitId
    waited_s: float = 0.0  # seconds that the client has waited for splits so far


class ClientDetached(Value, frozen=True, tag=True):
    """A client's connection has ended."""

    client: int


class SplitReleased(Value, frozen=True, tag=True):
    """A client no longer needs the memory of this split and of all splits before it."""

    client: int
    split_id: SplitId
    waited_s: float = 0.0  # seconds that the client has waited for splits so far


class WorkerJoined(Value, frozen=True, tag=True):
    """A worker has loaded its task and can lease splits."""

    worker: int


class SplitReady(Value, frozen=True, tag=True):
    """A worker has written a prepared split into the slot of its lease."""

    worker: int
    split_id: SplitId
    layout: BlockLayout
    times: WorkerTimes


class SplitRefused(Value, frozen=True, tag=True):
    """A worker could not prepare a split: its data or the user's transforms raised `error`."""

    worker: int
    split_id: SplitId
    error: str


class WorkerLost(Value, frozen=True, tag=True):
    """A worker's process has ended."""

    worker: int
    reason: str


class SplitVanished(Value, frozen=True, tag=True):
    """The prepared block of a split is lost with its node, and a client still needs it."""

    split_id: SplitId


class ClockTick(Value, frozen=True):
    """Time has passed: leases may have expired."""


Event = (
    ClientAttached
    | ClientDetached
    | SplitReleased
    | WorkerJoined
    | SplitReady
    | SplitRefused
    | WorkerLost
    | SplitVanished
    | ClockTick
)


class StartWorker(Value, frozen=True):
    """Start one more worker process."""

    worker: int


class RetireWorker(Value, frozen=True):
    """Stop an idle worker."""

    worker: int


class KillWorker(Value, frozen=True):
    """Kill a worker; its `WorkerLost` event follows."""

    worker: int


class SplitLease(Value, frozen=True, tag=True):
    """Have a worker prepare a split into a slot."""

    worker: int
    split_id: SplitId
    slot: int


class SplitDelivery(Value, frozen=True, tag=True):
    """Send a prepared split to a client; a refused split has an error instead of a slot, and the client raises it."""

    client: int
    split_id: SplitId
    slot: int | None
    split: SplitReady | None = None
    error: str | None = None
    workers: int = 0  # running now
    ready: int = 0  # backlog of prepared splits


Command = StartWorker | RetireWorker | KillWorker | SplitLease | SplitDelivery
State = Literal["waiting", "leased", "ready", "refused"]


@dataclass(slots=True)
class _SplitTask:
    """A split between the slowest client's position and the last split that may be prepared."""

    state: State = "waiting"
    slot: int | None = None
    split: SplitReady | None = None
    deadline_s: float = 0.0
    failures: list[str] = field(default_factory=list)  # exit reasons of the workers lost while they leased it
    error: str | None = None
    delivered_to: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _ClientState:
    split_id: SplitId  # first unreleased split
    waited_s: float = 0.0


@dataclass(slots=True)
class _WorkerState:
    joined: bool = False
    split_id: SplitId | None = None  # its lease
    stopping: bool = False


@final
class Coordinator:
    """Turns events into commands; `host.py` and `cluster.py` feed the events and execute the commands."""

    def __init__(self, config: ServiceConfig, workers: int | None = None) -> None:
        """`workers`: worker count of the previous coordinator; None for the configured count."""
        self.config = config
        self.target = min(max(workers or config.workers, config.min_workers), config.max_workers)
        self._clients: dict[int, _ClientState] = {}
        self._workers: dict[int, _WorkerState] = {}
        self._tasks: dict[SplitId, _SplitTask] = {}
        self._free_slots: deque[int] = deque()
        self._slot_count = self._last_worker = 0
        self._load = ServiceLoad()
        self._scaled_s: float | None = None  # time of the last scaling decision
        self._failed_starts: list[str] = []  # exit reasons of workers that never joined, since the last join

    @property
    def workers(self) -> int:
        return sum(not worker.stopping for worker in self._workers.values())

    @property
    def ready(self) -> int:
        """Backlog: splits that are prepared and not yet released by every client."""
        return sum(task.state == "ready" for task in self._tasks.values())

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case ClientAttached():
                self._on_client_attached(event)
            case ClientDetached(client=client):
                self._clients.pop(client, None)
            case SplitReleased():
                self._on_split_released(event, now_s)
            case SplitVanished(split_id=split_id):
                self._on_split_vanished(split_id)
            case WorkerJoined(worker=worker):
                self._on_worker_joined(worker)
            case SplitReady():
                self._on_split_ready(event)
            case SplitRefused():
                self._on_split_refused(event)
            case WorkerLost(worker=worker, reason=reason):
                self._on_worker_lost(worker, reason)
            case ClockTick():
                pass
        self._scale(now_s)
        # Order matters: kill before start, so that the replacement is started; lease before deliver, for new refusals.
        return [*self._kill_expired(now_s), *self._start_and_retire(), *self._lease(now_s), *self._deliver()]

    def _on_client_attached(self, event: ClientAttached) -> None:
        start = event.split_id
        if start.index >= self.config.splits:
            start = SplitId(start.epoch + 1, 0)
        self._clients[event.client] = _ClientState(start, event.waited_s)
        for task in self._tasks.values():  # deliver unreleased splits again to a client that reattaches
            task.delivered_to.discard(event.client)

    def _on_worker_joined(self, worker: int) -> None:
        self._failed_starts.clear()
        if worker in self._workers:
            self._workers[worker].joined = True

    def _on_split_released(self, event: SplitReleased, now_s: float) -> None:
        client = self._clients.get(event.client)
        if client is None or event.split_id < client.split_id:
            return  # a duplicate, or sent before the client went back to an earlier split
        self._load = self._load.count_taken(event.waited_s - client.waited_s, now_s)
        client.split_id, client.waited_s = self._next_split(event.split_id), event.waited_s

    def _on_split_ready(self, event: SplitReady) -> None:
        task = self._end_lease(event.worker, event.split_id)
        if task is not None:
            task.state, task.split = "ready", event
            self._load = self._load.count_prepared(event.times.busy_s)

    def _on_split_refused(self, event: SplitRefused) -> None:
        task = self._end_lease(event.worker, event.split_id)
        if task is not None:
            task.state, task.error = "refused", event.error
            self._free_slot(task)

    def _end_lease(self, worker: int, split_id: SplitId) -> _SplitTask | None:
        """End a lease and return its task, or None if the lease or the task no longer exists."""
        if worker not in self._workers or self._workers[worker].split_id != split_id:
            return None
        self._workers[worker].split_id = None
        return self._tasks.get(split_id)

    def _on_worker_lost(self, worker: int, reason: str) -> None:
        lost = self._workers.pop(worker, None)
        if lost is not None and not lost.joined:
            self._failed_starts.append(reason)
        if lost is None or lost.split_id is None:
            return
        task = self._tasks.get(lost.split_id)
        if task is None:
            return
        task.state = "waiting"
        self._free_slot(task)
        task.failures.append(reason)
        if len(task.failures) >= self.config.attempts:
            # The split itself may kill its workers, for instance by exhausting their memory.
            task.state = "refused"
            failures, hint = "; ".join(task.failures), "make smaller splits, or give a worker more memory"
            task.error = f"{len(task.failures)} workers ended while preparing this split: {failures}: {hint}"

    def _on_split_vanished(self, split_id: SplitId) -> None:
        task = self._tasks.get(split_id)
        if task is not None and task.state == "ready":
            self._free_slot(task)
            self._tasks[split_id] = _SplitTask()

    def _free_slot(self, task: _SplitTask) -> None:
        if task.slot is not None:
            self._free_slots.append(task.slot)
            task.slot = None

    def _scale(self, now_s: float) -> None:
        """Update the target number of workers, once per interval."""
        if self._scaled_s is None:
            self._scaled_s = now_s
            self._load = ServiceLoad(since_s=now_s)
        elif now_s - self._scaled_s >= self.config.interval_s:
            load = self._load.end_interval(now_s, self.ready)
            self.target, self._load = wanted_workers(
                self.target, load, self.config.min_workers, self.config.max_workers
            )
            self._scaled_s = now_s

    def _kill_expired(self, now_s: float) -> Iterator[Command]:
        """Kill workers whose lease has expired."""
        for number, worker in self._workers.items():
            task = self._tasks.get(worker.split_id) if worker.split_id is not None else None
            if task is not None and now_s >= task.deadline_s and not worker.stopping:
                worker.stopping = True
                yield KillWorker(number)

    def _start_and_retire(self) -> Iterator[Command]:
        """Start missing workers; retire idle ones above the target."""
        for _ in range(0 if self._cannot_start else self.target - self.workers):
            self._last_worker += 1
            self._workers[self._last_worker] = _WorkerState()
            yield StartWorker(self._last_worker)
        for number in self._idle_workers()[::-1][: max(self.workers - self.target, 0)]:
            self._workers[number].stopping = True
            yield RetireWorker(number)

    def _idle_workers(self) -> list[int]:
        return [n for n, w in self._workers.items() if w.joined and w.split_id is None and not w.stopping]

    @property
    def _cannot_start(self) -> bool:
        """Whether the budget of consecutive failed starts is spent."""
        return len(self._failed_starts) >= self.config.attempts

    def _lease(self, now_s: float) -> Iterator[Command]:
        """Lease the first waiting splits to idle workers, while slots are free."""
        self._drop_released()
        idle = self._idle_workers()
        for split_id in self._splits_to_prepare():
            task = self._tasks.setdefault(split_id, _SplitTask())
            if task.state != "waiting":
                continue
            if self._cannot_start and not self._workers:
                task.state, task.error = "refused", f"no worker could start: {self._failed_starts[-1]}"
                continue
            slot = self._allocate_slot() if idle else None
            if slot is None:
                break
            worker = idle.pop(0)
            self._workers[worker].split_id = split_id
            task.state, task.slot, task.deadline_s = "leased", slot, now_s + self.config.lease_s
            yield SplitLease(worker, split_id, slot)

    def _splits_to_prepare(self) -> list[SplitId]:
        """The prefetch window, from the slowest client's position on; empty until all clients are attached."""
        if len(self._clients) < self.config.clients:
            return []
        first = min(client.split_id for client in self._clients.values())
        epochs = max(self.config.epochs, first.epoch + 1)  # a client may continue beyond the announced epochs
        split_ids = self._consecutive_splits(first, self.target + self.config.ahead)
        return [split_id for split_id in split_ids if split_id.epoch < epochs]

    def _consecutive_splits(self, first: SplitId, count: int) -> list[SplitId]:
        split_ids = [first]
        while len(split_ids) < count:
            split_ids.append(self._next_split(split_ids[-1]))
        return split_ids

    def _allocate_slot(self) -> int | None:
        if self._free_slots:
            return self._free_slots.popleft()
        if self._slot_count >= self.config.max_workers + self.config.ahead:
            return None
        self._slot_count += 1
        return self._slot_count - 1

    def _drop_released(self) -> None:
        """Free the slots of splits that every client has released, or that lie beyond the prefetch window."""
        if len(self._clients) < self.config.clients:
            return
        first = min(client.split_id for client in self._clients.values())
        last = self._consecutive_splits(first, self.config.max_workers + self.config.ahead)[-1]
        for split_id, task in list(self._tasks.items()):
            # A leased slot is still being written: it is freed when the lease ends.
            if task.state != "leased" and not first <= split_id <= last:
                self._free_slot(task)
                del self._tasks[split_id]

    def _deliver(self) -> Iterator[Command]:
        """Deliver to each client, in order, the ready splits not yet delivered to it."""
        status = {"workers": self.workers, "ready": self.ready}
        for number, client in self._clients.items():
            split_id = client.split_id
            while (task := self._tasks.get(split_id)) is not None and task.state in ("ready", "refused"):
                if number not in task.delivered_to:
                    task.delivered_to.add(number)
                    yield SplitDelivery(number, split_id, task.slot, task.split, task.error, **status)
                split_id = self._next_split(split_id)

    def _next_split(self, split_id: SplitId) -> SplitId:
        last = split_id.index + 1 >= self.config.splits
        return SplitId(split_id.epoch + 1, 0) if last else SplitId(split_id.epoch, split_id.index + 1)
