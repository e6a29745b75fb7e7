"""Seconds by phase: every moment of the main thread is charged to exactly one phase, so phases add up to the whole.

Entering a phase pauses the phase around it: a lookup inside a forward counts as `lookup` only. A phase reads the clock
twice, about a microsecond, so every run is measured.

[Note: Stages of sharded tables] `ShardedEmbeddings` calls `phase` for its stages: sending ids (`route`), `lookup`,
sending vectors (`exchange`), and in the backward sending their gradients back (`return`).

[Note: Waiting] A rank that is early waits for the others in every phase with a collective. Shared memory and threads
count that time (`Comm.waited`), and it is charged to `wait` instead of the phase around it. Transports between hosts
cannot tell waiting from sending, and it stays part of that phase.

[Note: Busy and exposed] Exposed seconds of a phase are those of the main thread. The resource that does the work may be
busy for longer, while the main thread computes: the link from the call of a collective until its data have arrived
([Note: Transfers] in `parallel/comm/interface.py`), the disk while reads are in flight, the reader while it makes a
batch. Overlapping intervals of a phase count once. A transfer belongs to the phase and the step in which its collective
was called, a read to the latest step for which rows were prefetched. For phases of the main thread busy and exposed
seconds are equal. The wait of a lookup for rows on disk is charged to `prefetch` instead of `lookup`.

In the timeline the main thread is in `wait` while it waits for the data of a transfer, for other ranks or for the disk.
The waits of a lookup are drawn as a single interval, at its begin.

While a torch profiler records, each phase is a `record_function` of its name.

Known limits: on a GPU, queued kernels are charged to the phase that first synchronises. A collective of another thread,
such as a background checkpoint, belongs to the phase of the main thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from time import perf_counter
from typing import NamedTuple, Protocol, final

from torch.autograd import profiler

from rowwise.parallel.comm.interface import Transfer, TransferObserver, WaitTime
from rowwise.parallel.shard.embeddings import AnyEmbeddings, ShardedEmbeddings
from rowwise.parallel.shard.exchange import no_timing
from rowwise.train.disk_reads import DiskReads
from rowwise.train.timeline import LINK, PROCESSOR, Timeline

# `update` is the update of rows; the update of dense parameters is part of `backward`. `reduce`: all-reduces of dense
# gradients. `status`: the gathers before and after a forward. `prefetch`: waiting for rows on disk.
PHASES = (
    *("data", "route", "prefetch", "lookup", "exchange", "wait", "forward", "backward", "return", "reduce", "status"),
    *("update", "other"),
)
BESIDE = ("data", "route", "prefetch", "exchange", "return", "reduce", "status")  # work of link, disk or reader
PAUSED = "paused"  # evaluations and checkpoints; phases entered inside are charged to it, too


class PhaseSeconds(NamedTuple):
    """Seconds by phase: see [Note: Busy and exposed]."""

    exposed: Mapping[str, float]
    busy: Mapping[str, float]

    def since(self, before: "PhaseSeconds") -> "PhaseSeconds":
        return PhaseSeconds(*({p: now[p] - then[p] for p in PHASES} for now, then in zip(self, before, strict=True)))


class Watch(Protocol):
    """A hook on a module; `remove` ends it."""

    def remove(self) -> None: ...


@final
class _Phase:
    """Charges the seconds of a with block to a phase."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: "Breakdown", name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._clock.leave()


@final
class Breakdown:
    """Seconds by phase; `other` is the time outside all phases."""

    __slots__ = (
        *("_busy", "_busy_until", "_now", "_observer", "_ranges", "_seconds", "_since", "_stack", "_step", "_waited"),
        *("_reads", "_reads_for", "_thread", "_waited_s", "_waits", "timeline"),
    )

    def __init__(
        self,
        now: Callable[[], float] = perf_counter,
        waited: WaitTime | None = None,
        observer: TransferObserver | None = None,
    ) -> None:
        """The clock starts at once. `waited`: see [Note: Waiting]. `observer`: of the transfers to count."""
        self._now, self._waited, self._observer = now, waited or WaitTime(), observer or TransferObserver()
        self._waited_s = self._waited.seconds
        self._seconds = dict.fromkeys((*PHASES, PAUSED), 0.0)
        self._busy = dict.fromkeys(BESIDE, 0.0)
        self._busy_until = dict.fromkeys(BESIDE, 0.0)
        self._stack = ["other"]
        self._ranges: dict[int, profiler.record_function] = {}  # by depth of the stack
        self._step = self._reads_for = 0
        self._reads: DiskReads | None = None  # None without tables on disk
        self._thread = get_ident()
        self._waits: list[tuple[float, float]] = []  # for transfers, since the last charge
        self.timeline = Timeline()
        self._since = now()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Charge the seconds of the with block to a phase."""
        return _Phase(self, name)

    def enter(self, name: str) -> None:
        """Begin a phase inside the current one."""
        self._charge()
        if self._reads is not None and name in ("prefetch", PAUSED):
            self._count_reads()
            self._reads_for = max(self._reads_for, self._step)
        if self._reads is not None and name == "lookup":
            self._reads.take_wait_s()  # drop waits of the last update for evicted rows: they are part of the update
        self._stack.append(PAUSED if self._stack[-1] == PAUSED else name)
        self._observer.stage = self._stack[-1]
        if profiler._is_profiler_enabled:
            self._ranges[len(self._stack)] = profiler_range = profiler.record_function(name)
            profiler_range.__enter__()

    def leave(self) -> None:
        """End the innermost phase."""
        self._charge()
        if self._reads is not None and self._stack[-1] == PAUSED:
            self._count_reads()
        if self._ranges:
            profiler_range = self._ranges.pop(len(self._stack), None)
            if profiler_range is not None:
                profiler_range.__exit__(None, None, None)
        self._stack.pop()
        self._observer.stage = self._stack[-1]

    def begin_step(self, step: int) -> None:
        """Begin a training step; later work belongs to it, except in `working_for`."""
        self._set_step(step)
        self.timeline.begin_step(step, self._since)

    @contextmanager
    def working_for(self, step: int) -> Iterator[None]:
        """Attribute the work of the with block to this step instead of the current one."""
        before = self._step
        self._set_step(step)
        try:
            yield
        finally:
            self._set_step(before)

    def add_busy(self, phase: str, resource: str, begin_s: float, end_s: float, step: int | None = None) -> None:
        """Count an interval in which a resource worked for a phase; call in order of `begin_s` within a phase."""
        if phase in self._busy:
            self._busy[phase] += max(0.0, end_s - max(begin_s, self._busy_until[phase]))
            self._busy_until[phase] = max(end_s, self._busy_until[phase])
        if self.timeline.is_on:
            self.timeline.add(self._step if step is None else step, resource, phase, begin_s, end_s)

    def add_read(self, begin_s: float, end_s: float) -> None:
        """Count the interval in which the reader made a batch."""
        self.add_busy("data", "reader", begin_s, end_s)

    def seconds(self) -> dict[str, float]:
        """Exposed seconds by phase."""
        self._charge()
        self._count_reads()
        return dict(self._seconds)

    def phase_seconds(self) -> PhaseSeconds:
        """Exposed and busy seconds by phase, without `PAUSED`."""
        exposed = self.seconds()
        exposed.pop(PAUSED)
        return PhaseSeconds(exposed, exposed | self._busy)

    def training_s(self) -> float:
        return sum(seconds for phase, seconds in self.seconds().items() if phase != PAUSED)

    def watch(self, tables: Sequence[AnyEmbeddings]) -> list[Watch]:
        """Install hooks that charge lookups of these tables to phases and count transfers.

        See [Note: Stages of sharded tables].
        """
        reads = DiskReads(tables)
        self._reads = reads if reads.any else None
        watches: list[Watch] = [_AttributeHook(self._observer, "report", self._add_transfer, None)]
        for module in tables:
            watches.append(module.register_forward_pre_hook(lambda *_: self.enter("lookup")))
            # `always_call`: a lookup that raises must leave its phase, too, or the stack of phases would be wrong.
            watches.append(module.register_forward_hook(lambda *_: self.leave(), always_call=True))
            if isinstance(module, ShardedEmbeddings):
                watches.append(_AttributeHook(module, "phase", self.phase, no_timing))
        return watches

    def _add_transfer(self, transfer: Transfer) -> None:
        if transfer.stage != PAUSED:
            self.add_busy(transfer.stage, LINK, transfer.begin_s, transfer.end_s, transfer.step)
        if self.timeline.is_on and self._stack[-1] != PAUSED and get_ident() == self._thread:
            self._waits.append(transfer.waited)

    def _count_reads(self) -> None:
        if self._reads is None:
            return
        intervals = self._reads.take_intervals()
        if self._stack[-1] != PAUSED:
            for begin_s, end_s in intervals:
                self.add_busy("prefetch", "disk", begin_s, end_s, self._reads_for)

    def _set_step(self, step: int) -> None:
        self._charge()
        self._step = self._observer.step = step

    def _charge(self) -> None:
        now, phase = self._now(), self._stack[-1]
        # A GPU's backward has a thread of its own, and waiting is counted by thread.
        waited_s = self._waited.seconds if get_ident() == self._thread else self._waited_s
        spent_s = now - self._since
        wait_s = 0.0 if phase == PAUSED else min(waited_s - self._waited_s, spent_s)
        disk_s = 0.0
        if self._reads is not None and phase == "lookup":
            disk_s = min(self._reads.take_wait_s(), spent_s - wait_s)
        self._seconds[phase] += spent_s - wait_s - disk_s
        self._seconds["wait"] += wait_s
        self._seconds["prefetch"] += disk_s
        if self.timeline.is_on and phase == PAUSED:
            self.timeline.pause(self._since, now)
        elif self.timeline.is_on:
            self._record(phase, now, wait_s, disk_s)
        self._since, self._waited_s = now, waited_s

    def _record(self, phase: str, now: float, wait_s: float, disk_s: float) -> None:
        """Add the intervals since the last charge."""
        begin_s, add = self._since, self.timeline.add
        waits = self._waits.copy()
        self._waits.clear()
        if wait_s and not waits:  # no transfer has ended, so all waiting is drawn where the last wait was
            end_s = min(max(self._waited.end_s, begin_s + wait_s), now)
            waits.append((end_s - wait_s, end_s))
        if disk_s:
            waits.append((begin_s, begin_s + disk_s))
        # Waits split the time since the last charge: phase, wait, phase, ..., phase until now.
        for from_s, until_s in sorted(waits):
            from_s, until_s = max(from_s, begin_s), min(until_s, now)
            if from_s < until_s:
                add(self._step, PROCESSOR, phase, begin_s, from_s)
                add(self._step, PROCESSOR, "wait", from_s, until_s)
                begin_s = until_s
        add(self._step, PROCESSOR, phase, begin_s, now)


@final
class _AttributeHook:
    """A callback stored as an attribute; `remove` restores the default."""

    def __init__(self, owner: object, name: str, callback: object, default: object) -> None:
        setattr(owner, name, callback)
        self._owner, self._name, self._default = owner, name, default

    def remove(self) -> None:
        setattr(self._owner, self._name, self._default)
