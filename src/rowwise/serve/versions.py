"""Which versions the workers of a server have open, and which they answer by: a pure state machine.

The process that starts the workers sends events and executes the commands that come back. Rows of a version are loaded
once, into memory that all workers map (`LoadRows`); then each worker opens the version. Traffic moves to other versions
once all workers that answer have them open, in each worker between two batches. A version that cannot be loaded or
opened is refused, and stays so: workers go on with the versions that they have.

The folder may ask for other versions faster than one loads. So there is one target at a time. It is moved to, or
refused, before the newest wish becomes the next one, and wishes in between are skipped. Else each wish would replace
a version that is nearly there, and the server would stand still. A wish whose versions are open needs no target.
Versions of the target are not loaded before all others are freed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, final

from rowwise.base.errors import one_line
from rowwise.serve.traffic import Traffic


class TrafficRead(NamedTuple):
    """The folder asks for these versions."""

    traffic: Traffic


class RowsLoaded(NamedTuple):
    """The rows of a version are in memory, and its golden rows have come out right."""

    version: int


class VersionRefused(NamedTuple):
    """A version cannot be loaded, or a worker could not open it."""

    version: int
    why: str
    worker: int | None = None

    @classmethod
    def because(cls, version: int, error: Exception, worker: int | None = None) -> "VersionRefused":
        return cls(version, one_line(error) or f"{type(error).__name__}: {error}", worker)


class WorkerStarted(NamedTuple):
    """A worker waits for commands."""

    worker: int


class WorkerEnded(NamedTuple):
    """A worker is gone."""

    worker: int


class VersionOpened(NamedTuple):
    """A worker can answer by a version."""

    worker: int
    version: int


class TrafficMoved(NamedTuple):
    """A worker answers new requests by these versions."""

    worker: int
    traffic: Traffic


Event = TrafficRead | RowsLoaded | VersionRefused | WorkerStarted | WorkerEnded | VersionOpened | TrafficMoved


class LoadRows(NamedTuple):
    """Load the rows of a version into shared memory, and check it."""

    version: int


class FreeRows(NamedTuple):
    """Free the memory of a version that no worker has open."""

    version: int


class OpenVersion(NamedTuple):
    """Let a worker open a version whose rows are loaded."""

    worker: int
    version: int


class CloseVersion(NamedTuple):
    """Let a worker close a version, once its last request by it has an answer."""

    worker: int
    version: int


class MoveTraffic(NamedTuple):
    """Let a worker answer new requests by these versions, which it has open."""

    worker: int
    traffic: Traffic


class EndWorker(NamedTuple):
    """End a worker, which cannot open what the others answer by; another takes its place."""

    worker: int


class TellRefused(NamedTuple):
    """Tell a worker which versions are refused, and why."""

    worker: int
    why: dict[int, str]


Command = LoadRows | FreeRows | OpenVersion | CloseVersion | MoveTraffic | EndWorker | TellRefused

ENDS = 3  # of workers while they open a target, before another that is wanted takes its place


@dataclass(slots=True)
class _Worker:
    asked: set[int] = field(default_factory=set)  # versions that it was told to open, and not to close
    opened: set[int] = field(default_factory=set)
    told: Traffic | None = None
    moved: Traffic | None = None
    refused: dict[int, str] = field(default_factory=dict)  # that it knows of


@final
class ServedVersions:
    """The versions of one server. `handle` takes an event and returns what to do."""

    def __init__(self) -> None:
        self.wanted: Traffic | None = None  # by the folder
        self.target: Traffic | None = None  # that is loaded and opened; None: nothing else than the active is wanted
        self.active: Traffic | None = None  # by which workers answer; None: by none yet
        self.refused: dict[int, str] = {}  # why, by version
        self._ends = 0  # of workers while they opened the target
        self._loading: int | None = None
        self._loaded: set[int] = set()
        self._workers: dict[int, _Worker] = {}

    def handle(self, event: Event) -> list[Command]:
        match event:
            case TrafficRead(traffic):
                self.wanted = traffic
            case RowsLoaded(version):
                self._loading = None
                self._loaded.add(version)
            case VersionRefused():
                return [*self._refuse(event), *self._commands()]
            case WorkerStarted(worker):
                self._workers[worker] = _Worker()
            case WorkerEnded(worker) if worker in self._workers:
                ended = self._workers.pop(worker)
                self._ends += bool((ended.asked - ended.opened).intersection(_versions_of(self.target)))
            case VersionOpened(worker, version) if worker in self._workers:
                self._workers[worker].opened.add(version)
            case TrafficMoved(worker, traffic) if worker in self._workers:
                self._workers[worker].moved = traffic
        return list(self._commands())

    def _refuse(self, event: VersionRefused) -> list[Command]:
        version, why, worker = event
        if worker is None:
            self._loading = None
        elif worker in self._workers:
            self._workers[worker].asked.discard(version)
        if worker is not None and version in _versions_of(self.active):
            self._workers.pop(worker, None)
            return [EndWorker(worker)]
        self.refused[version] = why
        return []

    def is_ready(self, worker: int) -> bool:
        """Whether a worker answers requests."""
        return worker in self._workers and self._workers[worker].moved is not None

    def _commands(self) -> Iterator[Command]:
        for number, worker in self._workers.items():
            if worker.refused != self.refused:
                worker.refused = dict(self.refused)
                yield TellRefused(number, worker.refused)
        self._aim()
        yield from self._open()
        yield from self._move()
        yield from self._close()
        yield from self._load()

    def _aim(self) -> None:
        """Choose what to answer by, and the target."""
        if reached := self._is_open(self.target):
            self.active = self.target
        if self._is_open(self.wanted):
            self.active = self.wanted
        lost = self._is_refused(self.target) or (self._ends >= ENDS and self.target != self.wanted)
        if self.target is None or reached or lost:
            arrived = self.wanted == self.active or self._is_refused(self.wanted)
            self.target, self._ends = None if arrived else self.wanted, 0

    def _is_refused(self, traffic: Traffic | None) -> bool:
        return not self.refused.keys().isdisjoint(_versions_of(traffic))

    def _is_open(self, traffic: Traffic | None) -> bool:
        """Whether all workers that answer can answer by these versions; those that start open them later."""
        workers = [worker for worker in self._workers.values() if worker.moved] or self._workers.values()
        if traffic is None or not workers or self._is_refused(traffic):
            return False
        return all(worker.opened.issuperset(traffic.versions) for worker in workers)

    def _open(self) -> Iterator[Command]:
        """Let workers open what they answer by; then the target, if they answer."""
        for number, worker in self._workers.items():
            ready = worker.moved is not None or self.active is None
            needed = (*_versions_of(self.active), *_versions_of(self.target if ready else None))
            for version in needed:
                if version in self._loaded - worker.asked:
                    worker.asked.add(version)
                    yield OpenVersion(number, version)

    def _move(self) -> Iterator[Command]:
        for number, worker in self._workers.items():
            if self.active is not None and worker.told != self.active and set(self.active.versions) <= worker.opened:
                worker.told = self.active
                yield MoveTraffic(number, self.active)

    def _close(self) -> Iterator[Command]:
        """Close what neither the traffic nor the target needs, in workers whose traffic has moved."""
        kept = {*_versions_of(self.active), *_versions_of(self.target)}
        for number, worker in self._workers.items():
            if worker.moved == self.active:
                for version in sorted(worker.asked & worker.opened - kept):
                    worker.asked.discard(version)
                    worker.opened.discard(version)
                    yield CloseVersion(number, version)
        in_use = kept.union(*(worker.asked for worker in self._workers.values()))
        for version in sorted(self._loaded - in_use):
            self._loaded.discard(version)
            yield FreeRows(version)

    def _load(self) -> Iterator[Command]:
        """Load a version of the target, once memory has no others than those of the target and the traffic."""
        missing = [version for version in _versions_of(self.target) if version not in self._loaded]
        kept = {*_versions_of(self.active), *_versions_of(self.target)}
        if missing and self._loading is None and self._loaded <= kept:
            self._loading = missing[0]
            yield LoadRows(missing[0])


@final
class Lag:
    """How long a server has been behind what is wanted."""

    def __init__(self) -> None:
        self._wanted: Traffic | None = None
        self._until_s: dict[Traffic | None, float] = {}  # when each of what was wanted no longer was

    def seconds(self, wanted: Traffic, active: Traffic | None, target: Traffic | None, now_s: float) -> float:
        """Since something else than what answers is wanted, whatever was wanted meanwhile; 0: nothing else is."""
        if wanted != self._wanted:
            self._until_s[self._wanted], self._wanted = now_s, wanted
        self._until_s = {one: s for one, s in self._until_s.items() if one in (active, target) and one != wanted}
        return now_s - self._until_s.get(active, now_s)


def _versions_of(traffic: Traffic | None) -> tuple[int, ...]:
    return () if traffic is None else traffic.versions
