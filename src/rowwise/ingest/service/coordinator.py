"""Who prepares which split, and who gets it: the service's decisions, as a pure state machine.

[Note: exactly once] An epoch is one sequence of splits (see [Note: order of rows] in `batcher.py`), and preparing a
split is a function of its number and the epoch alone. So a split may be prepared twice, by whomever, and is the same;
what must not happen is that a client uses it twice or not at all. A client takes splits strictly in order and says
where it stands; everything here can be lost and follows again from where clients stand, which their checkpoints hold.

`handle(event, now_s)` returns commands; nothing here knows of processes, sockets or a clock, so that the same machine
runs on one host (`host.py`) and on a cluster (`cluster.py`), and a test can play years of faults in a second. Splits
are leased to workers for a time; a worker that does not deliver is killed, and the split is leased again. A split is
kept until every client has let it go. Known limits: clients in step: one that is far behind holds up all others.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, final

from rowwise.errors import SpecError
from rowwise.ingest.block import BlockLayout
from rowwise.ingest.prepare import PreparationSeconds
from rowwise.ingest.service.scaling import ServiceLoad, wanted_workers
from rowwise.spec import Value


class ServiceConfig(Value, frozen=True):
    """The number of clients, splits, epochs and workers of a service."""

    clients: int = 1  # ranks that share it; all get every split
    splits: int = 1  # of an epoch
    epochs: int = 1  # what comes after them is prepared when a client asks for it
    workers: int = 1  # to begin with
    least: int = 1
    most: int = 1
    ahead: int = 3  # splits that may be ready beside those that are being made
    lease_s: float = 300.0  # how long a split may take before its worker is given up
    attempts: int = 3  # workers that may be lost over one split
    interval_s: float = 1.0  # between decisions on the number of workers

    def __post_init__(self) -> None:
        counts = (self.clients, self.splits, self.epochs, self.least, self.ahead, self.attempts)
        if min(counts) < 1 or not self.least <= self.workers <= self.most:
            raise SpecError(
                f"a service of {self.workers} workers: want {self.least} to {self.most}, and at least 1 of all"
            )
        if not (self.lease_s > 0 and self.interval_s > 0):
            raise SpecError(f"lease_s={self.lease_s}, interval_s={self.interval_s}: want more than 0")


class SplitId(Value, frozen=True, order=True):
    """A split of the sequence: its epoch, and the number of splits of the epoch before it."""

    epoch: int
    at: int


class WorkerTimes(Value, frozen=True):
    """Seconds of a split in a worker by stage."""

    spent: PreparationSeconds = PreparationSeconds()
    busy_s: float = 0.0
    cpu_s: float = 0.0


class ClientAttached(Value, frozen=True, tag=True):
    """A client is here, and wants the splits from this place on; also one that was here, and wants others."""

    client: int
    place: SplitId
    waited_s: float = 0.0  # before now


class ClientDetached(Value, frozen=True, tag=True):
    """A client is gone."""

    client: int


class SplitReleased(Value, frozen=True, tag=True):
    """A client has copied its rows of a split, and of all before it."""

    client: int
    place: SplitId
    waited_s: float = 0.0  # for splits, of all it has taken


class WorkerJoined(Value, frozen=True, tag=True):
    """A worker that was started is ready."""

    worker: int


class SplitReady(Value, frozen=True, tag=True):
    """A worker has prepared a split: it is in the slot of its lease."""

    worker: int
    place: SplitId
    layout: BlockLayout
    times: WorkerTimes


class SplitRefused(Value, frozen=True, tag=True):
    """A worker has met something in a split that cannot be used."""

    worker: int
    place: SplitId
    error: str


class WorkerLost(Value, frozen=True, tag=True):
    """A worker's process has ended."""

    worker: int
    how: str


class SplitVanished(Value, frozen=True, tag=True):
    """The prepared block of a split is lost, and a client still needs it."""

    place: SplitId


class ClockTick(Value, frozen=True):
    """Time has passed: leases may have run out."""


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
    """Let a worker that does nothing end."""

    worker: int


class KillWorker(Value, frozen=True):
    """End a worker at once; its `WorkerLost` follows."""

    worker: int


class SplitLease(Value, frozen=True, tag=True):
    """Have a worker prepare a split into a slot."""

    worker: int
    place: SplitId
    slot: int


class SplitDelivery(Value, frozen=True, tag=True):
    """Hand a split to a client; with an error there is no slot, and the client ends there."""

    client: int
    place: SplitId
    slot: int | None
    split: SplitReady | None = None
    error: str | None = None
    workers: int = 0  # at work now
    ready: int = 0  # splits that are prepared


Command = StartWorker | RetireWorker | KillWorker | SplitLease | SplitDelivery
State = Literal["waiting", "leased", "ready", "refused"]


@dataclass(slots=True)
class _SplitTask:
    """A split that somebody wants."""

    state: State = "waiting"
    worker: int | None = None
    slot: int | None = None
    split: SplitReady | None = None
    due_s: float = 0.0
    lost: list[str] = field(default_factory=list)  # how the workers ended that had it
    error: str | None = None
    given: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _ClientState:
    place: SplitId  # the first that it has not released
    waited_s: float = 0.0


@dataclass(slots=True)
class _WorkerState:
    joined: bool = False
    place: SplitId | None = None  # what it has leased
    ending: bool = False


@final
class Coordinator:
    """Decides without side effects; its host delivers events and executes commands, one at a time."""

    def __init__(self, plan: ServiceConfig, workers: int | None = None) -> None:
        """`workers`: as many as a coordinator before this one had come to."""
        self.plan = plan
        self.target = min(max(workers or plan.workers, plan.least), plan.most)
        self._clients: dict[int, _ClientState] = {}
        self._workers: dict[int, _WorkerState] = {}
        self._tasks: dict[SplitId, _SplitTask] = {}
        self._free: deque[int] = deque()
        self._slots = self._started = 0
        self._seen = ServiceLoad()
        self._decided_s: float | None = None
        self._stillborn: list[str] = []  # how workers ended that never came to be ready

    @property
    def workers(self) -> int:
        return sum(not worker.ending for worker in self._workers.values())

    @property
    def ready(self) -> int:
        """Splits that are prepared and not released by everybody."""
        return sum(task.state == "ready" for task in self._tasks.values())

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self._hear_clients(event, now_s)
        self._hear_workers(event)
        self._scale(now_s)
        return [*self._expire(now_s), *self._staff(), *self._lease(now_s), *self._give()]

    def _hear_clients(self, event: Event, now_s: float) -> None:
        match event:
            case ClientAttached(client=client, place=place, waited_s=waited_s):
                place = place if place.at < self.plan.splits else SplitId(place.epoch + 1, 0)
                self._clients[client] = _ClientState(place, waited_s)
                for task in self._tasks.values():
                    task.given.discard(client)
            case ClientDetached(client=client):
                self._clients.pop(client, None)
            case SplitReleased():
                self._on_released(event, now_s)
            case SplitVanished(place=place):
                self._on_vanished(place)
            case WorkerJoined() | SplitReady() | SplitRefused() | WorkerLost() | ClockTick():
                pass

    def _hear_workers(self, event: Event) -> None:
        match event:
            case WorkerJoined(worker=worker):
                self._on_joined(worker)
            case SplitReady():
                self._on_prepared(event)
            case SplitRefused(worker=worker, place=place, error=error):
                self._end_of_lease(worker, place, error)
            case WorkerLost(worker=worker, how=how):
                self._lost(worker, how)
            case ClientAttached() | ClientDetached() | SplitReleased() | SplitVanished() | ClockTick():
                pass

    def _on_joined(self, worker: int) -> None:
        self._stillborn.clear()
        if worker in self._workers:
            self._workers[worker].joined = True

    def _on_released(self, event: SplitReleased, now_s: float) -> None:
        client = self._clients.get(event.client)
        if client is None or event.place < client.place:
            return  # said twice, or by one that has gone back since
        self._seen = self._seen.taken(event.waited_s - client.waited_s, now_s)
        client.place, client.waited_s = self._after(event.place), event.waited_s

    def _on_prepared(self, event: SplitReady) -> None:
        task = self._leased_task(event.worker, event.place)
        if task is not None:
            task.state, task.worker, task.split = "ready", None, event
            self._seen = self._seen.made(event.times.busy_s)

    def _end_of_lease(self, worker: int, place: SplitId, error: str) -> None:
        task = self._leased_task(worker, place)
        if task is not None:
            task.state, task.worker, task.error = "refused", None, error
            self._take_slot(task)

    def _leased_task(self, worker: int, place: SplitId) -> _SplitTask | None:
        """The split that a worker has, if it still has it; it is free for another."""
        if worker not in self._workers or self._workers[worker].place != place:
            return None
        self._workers[worker].place = None
        return self._tasks.get(place)

    def _lost(self, worker: int, how: str) -> None:
        gone = self._workers.pop(worker, None)
        if gone is not None and not gone.joined:
            self._stillborn.append(how)
        if gone is None or gone.place is None:
            return
        task = self._tasks.get(gone.place)
        if task is None:
            return
        task.worker, task.state = None, "waiting"
        self._take_slot(task)
        task.lost.append(how)
        if len(task.lost) >= self.plan.attempts:
            task.state, task.error = "refused", f"{len(task.lost)} workers were lost over it: {'; '.join(task.lost)}"

    def _on_vanished(self, place: SplitId) -> None:
        task = self._tasks.get(place)
        if task is not None and task.state == "ready":
            self._take_slot(task)
            self._tasks[place] = _SplitTask()

    def _take_slot(self, task: _SplitTask) -> None:
        if task.slot is not None:
            self._free.append(task.slot)
            task.slot = None

    def _scale(self, now_s: float) -> None:
        """Once an interval, as many workers as it takes."""
        if self._decided_s is None:
            self._decided_s = now_s
            self._seen = ServiceLoad(since_s=now_s)
        elif now_s - self._decided_s >= self.plan.interval_s:
            self._seen = self._seen.until(now_s, self.ready)
            self.target, self._seen = wanted_workers(self.target, self._seen, self.plan.least, self.plan.most)
            self._decided_s = now_s

    def _expire(self, now_s: float) -> list[Command]:
        """Give workers up that hold a split for too long."""
        late: list[Command] = []
        for number, worker in self._workers.items():
            task = self._tasks.get(worker.place) if worker.place is not None else None
            if task is not None and now_s >= task.due_s and not worker.ending:
                worker.ending = True
                late.append(KillWorker(number))
        return late

    def _staff(self) -> list[Command]:
        """Start workers that are missing, let those go that are not needed and have nothing."""
        commands: list[Command] = []
        for _ in range(0 if self._hopeless else self.target - self.workers):
            self._started += 1
            self._workers[self._started] = _WorkerState()
            commands.append(StartWorker(self._started))
        idle = [n for n, w in self._workers.items() if w.joined and w.place is None and not w.ending]
        for number in idle[::-1][: max(self.workers - self.target, 0)]:
            self._workers[number].ending = True
            commands.append(RetireWorker(number))
        return commands

    @property
    def _hopeless(self) -> bool:
        """No worker starts, however often it is tried."""
        return len(self._stillborn) >= self.plan.attempts

    def _lease(self, now_s: float) -> list[Command]:
        """The first splits that nobody has to workers that have none, as long as there is room."""
        self._forget()
        commands: list[Command] = []
        idle = [n for n, w in self._workers.items() if w.joined and w.place is None and not w.ending]
        for place in self._wanted_splits():
            task = self._tasks.setdefault(place, _SplitTask())
            if task.state != "waiting":
                continue
            if self._hopeless and not self._workers:
                task.state, task.error = "refused", f"no worker starts: {self._stillborn[-1]}"
                continue
            slot = self._slot() if idle else None
            if slot is None:
                break
            worker = idle.pop(0)
            self._workers[worker].place = place
            task.state, task.worker, task.slot, task.due_s = "leased", worker, slot, now_s + self.plan.lease_s
            commands.append(SplitLease(worker, place, slot))
        return commands

    def _wanted_splits(self) -> list[SplitId]:
        """The splits that may be there at once, from the client on that is the last; none until all are here."""
        if len(self._clients) < self.plan.clients:
            return []
        place = min(client.place for client in self._clients.values())
        asked = max(self.plan.epochs, place.epoch + 1)
        places = self._places(place, self.target + self.plan.ahead)
        return [place for place in places if place.epoch < asked]

    def _places(self, place: SplitId, count: int) -> list[SplitId]:
        places = [place]
        while len(places) < count:
            places.append(self._after(places[-1]))
        return places

    def _slot(self) -> int | None:
        if self._free:
            return self._free.popleft()
        if self._slots >= self.plan.most + self.plan.ahead:
            return None
        self._slots += 1
        return self._slots - 1

    def _forget(self) -> None:
        """Drop splits that every client has released or no client wants any more."""
        if len(self._clients) < self.plan.clients:
            return
        first = min(client.place for client in self._clients.values())
        last = self._places(first, self.plan.most + self.plan.ahead)[-1]
        for place, task in list(self._tasks.items()):
            if task.state != "leased" and not first <= place <= last:
                self._take_slot(task)
                del self._tasks[place]

    def _give(self) -> list[Command]:
        """Each client gets what is ready, in order and once."""
        commands: list[Command] = []
        about = {"workers": self.workers, "ready": self.ready}
        for number, client in self._clients.items():
            place = client.place
            while (task := self._tasks.get(place)) is not None and task.state in ("ready", "refused"):
                if number not in task.given:
                    task.given.add(number)
                    commands.append(SplitDelivery(number, place, task.slot, task.split, task.error, **about))
                place = self._after(place)
        return commands

    def _after(self, place: SplitId) -> SplitId:
        last = place.at + 1 >= self.plan.splits
        return SplitId(place.epoch + 1, 0) if last else SplitId(place.epoch, place.at + 1)
