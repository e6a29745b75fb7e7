"""Open and served versions of the workers of a server: a pure state machine.

The host process sends events and executes the returned commands. Rows of a version are loaded once, into memory that
all workers map (`LoadRows`); then workers open the version one after the other, as opening delays their requests.
Traffic moves to other versions once all ready workers have opened them, in each worker between two batches. A version
that cannot be loaded or opened is refused permanently; workers continue with their open versions.

The folder may change faster than a version loads. So there is one target at a time: it is reached or refused before
the newest wanted traffic becomes the next target, and those in between are skipped. Else each change would discard an
almost loaded version, without progress. Wanted traffic whose versions are open needs no target. Versions of the target
are not loaded before all others are freed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, final

from rowwise.base.errors import one_line
from rowwise.serve.traffic import Traffic


class TrafficRead(NamedTuple):
    """The folder wants this traffic."""

    traffic: Traffic


class RowsLoaded(NamedTuple):
    """The rows of a version are in memory, and its golden rows were reproduced."""

    version: int


class VersionRefused(NamedTuple):
    """A version cannot be loaded, or a worker could not open it."""

    version: int
    reason: str
    worker: int | None = None

    @classmethod
    def because(cls, version: int, error: Exception, worker: int | None = None) -> "VersionRefused":
        return cls(version, one_line(error) or f"{type(error).__name__}: {error}", worker)


class WorkerStarted(NamedTuple):
    """A worker waits for commands."""

    worker: int


class WorkerEnded(NamedTuple):
    """A worker process has ended."""

    worker: int


class VersionOpened(NamedTuple):
    """A worker has opened a version."""

    worker: int
    version: int


class TrafficMoved(NamedTuple):
    """A worker routes new requests by this traffic."""

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
    """Open a version with loaded rows in a worker."""

    worker: int
    version: int


class CloseVersion(NamedTuple):
    """Close a version in a worker, after its requests in flight."""

    worker: int
    version: int


class MoveTraffic(NamedTuple):
    """Route new requests of a worker to these open versions."""

    worker: int
    traffic: Traffic


class EndWorker(NamedTuple):
    """Kill and replace a worker that cannot open a served version."""

    worker: int


class ReportRefused(NamedTuple):
    """Send the refused versions and reasons to a worker."""

    worker: int
    reasons: dict[int, str]


Command = LoadRows | FreeRows | OpenVersion | CloseVersion | MoveTraffic | EndWorker | ReportRefused

OPEN_DIVISOR = 8  # one of so many ready workers opens a version at a time, and at least one
MAX_DEATHS = 3  # of workers while they open a target, before it is given up for other wanted traffic


@dataclass(slots=True)
class _Worker:
    requested: set[int] = field(default_factory=set)  # versions that it was sent to open, and not to close
    opened: set[int] = field(default_factory=set)
    sent: Traffic | None = None
    moved: Traffic | None = None
    refused: dict[int, str] = field(default_factory=dict)  # last reported to it

    @property
    def opens(self) -> bool:
        """Whether it is opening a version."""
        return not self.requested <= self.opened


@final
class ServedVersions:
    """The versions of one server. `handle` takes an event and returns what to do."""

    def __init__(self) -> None:
        self.wanted: Traffic | None = None  # in the folder
        self.target: Traffic | None = None  # being loaded and opened; None if the active traffic is wanted
        self.active: Traffic | None = None  # routed by workers; None before the first
        self.refused: dict[int, str] = {}  # reason by version
        self._deaths = 0  # of workers while opening the target
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
                self._deaths += bool((ended.requested - ended.opened).intersection(_versions_of(self.target)))
            case VersionOpened(worker, version) if worker in self._workers:
                self._workers[worker].opened.add(version)
            case TrafficMoved(worker, traffic) if worker in self._workers:
                self._workers[worker].moved = traffic
        return list(self._commands())

    def _refuse(self, event: VersionRefused) -> list[Command]:
        version, reason, worker = event
        if worker is None:
            self._loading = None
        elif worker in self._workers:
            self._workers[worker].requested.discard(version)
        if worker is not None and version in _versions_of(self.active):
            self._workers.pop(worker, None)
            return [EndWorker(worker)]
        self.refused[version] = reason
        return []

    def is_ready(self, worker: int) -> bool:
        """Whether a worker answers requests."""
        return worker in self._workers and self._workers[worker].moved is not None

    def _commands(self) -> Iterator[Command]:
        for number, worker in self._workers.items():
            if worker.refused != self.refused:
                worker.refused = dict(self.refused)
                yield ReportRefused(number, worker.refused)
        self._choose_target()
        yield from self._open()
        yield from self._move()
        yield from self._close()
        yield from self._load()

    def _choose_target(self) -> None:
        """Choose the active traffic and the target."""
        # A target is given up if it is refused, or kills workers while other traffic is wanted.
        if reached := self._is_open(self.target):
            self.active = self.target
        if self._is_open(self.wanted):
            self.active = self.wanted
        failed = self._is_refused(self.target) or (self._deaths >= MAX_DEATHS and self.target != self.wanted)
        if self.target is None or reached or failed:
            is_served = self.wanted == self.active or self._is_refused(self.wanted)
            self.target, self._deaths = None if is_served else self.wanted, 0

    def _is_refused(self, traffic: Traffic | None) -> bool:
        return not self.refused.keys().isdisjoint(_versions_of(traffic))

    def _is_open(self, traffic: Traffic | None) -> bool:
        """Whether all ready workers have opened these versions; starting workers open them later."""
        workers = [worker for worker in self._workers.values() if worker.moved] or self._workers.values()
        if traffic is None or not workers or self._is_refused(traffic):
            return False
        return all(worker.opened.issuperset(traffic.versions) for worker in workers)

    def _open(self) -> Iterator[Command]:
        """Workers open active versions; ready workers also those of the target, a few workers at a time."""
        ready = [worker for worker in self._workers.values() if worker.moved]
        free = max(1, len(ready) // OPEN_DIVISOR) - sum(worker.opens for worker in ready)
        for number, worker in self._workers.items():
            needed = _versions_of(self.active)
            if self.active is None or (worker.moved and (worker.opens or free > 0)):
                needed += _versions_of(self.target)
            was_free = not worker.opens
            for version in needed:
                if version in self._loaded - worker.requested:
                    worker.requested.add(version)
                    yield OpenVersion(number, version)
            if worker.moved and worker.opens and was_free:
                free -= 1

    def _move(self) -> Iterator[Command]:
        for number, worker in self._workers.items():
            if self.active is not None and worker.sent != self.active and set(self.active.versions) <= worker.opened:
                worker.sent = self.active
                yield MoveTraffic(number, self.active)

    def _close(self) -> Iterator[Command]:
        """Close versions of neither the active traffic nor the target, in workers whose traffic has moved."""
        kept = {*_versions_of(self.active), *_versions_of(self.target)}
        for number, worker in self._workers.items():
            if worker.moved == self.active:
                for version in sorted(worker.requested & worker.opened - kept):
                    worker.requested.discard(version)
                    worker.opened.discard(version)
                    yield CloseVersion(number, version)
        in_use = kept.union(*(worker.requested for worker in self._workers.values()))
        for version in sorted(self._loaded - in_use):
            self._loaded.discard(version)
            yield FreeRows(version)

    def _load(self) -> Iterator[Command]:
        """Load a version of the target, once memory has only versions of the target and the active traffic."""
        missing = [version for version in _versions_of(self.target) if version not in self._loaded]
        kept = {*_versions_of(self.active), *_versions_of(self.target)}
        if missing and self._loading is None and self._loaded <= kept:
            self._loading = missing[0]
            yield LoadRows(missing[0])


@final
class Lag:
    """Time since the served traffic was last wanted."""

    def __init__(self) -> None:
        self._wanted: Traffic | None = None
        self._until_s: dict[Traffic | None, float] = {}  # when each formerly wanted traffic was replaced

    def seconds(self, wanted: Traffic, active: Traffic | None, target: Traffic | None, now_s: float) -> float:
        """Seconds for which the active traffic is no longer wanted; 0 if it is wanted."""
        if wanted != self._wanted:
            self._until_s[self._wanted], self._wanted = now_s, wanted
        self._until_s = {
            traffic: s for traffic, s in self._until_s.items() if traffic in (active, target) and traffic != wanted
        }
        return now_s - self._until_s.get(active, now_s)


def _versions_of(traffic: Traffic | None) -> tuple[int, ...]:
    return () if traffic is None else traffic.versions
