"""`Timeline`: when a rank's resources worked for which stage, in ten steps of a run.

It keeps the newest ten steps, up to the 30th that this process trains: by then the run is warm. Ranks record the same
steps. A step has all work that was done for it, also before it began: reading its batch, sending its ids. Pauses are
cut out, with the concurrent work of other threads: an evaluation would be longer than all ten steps.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple, final

STEPS = 10
LAST = 30  # of the steps that this process trains
PROCESSOR = "processor"  # the main thread
LINK = "link"  # transfers, which may overlap


class StageInterval(NamedTuple):
    """An interval in which a resource worked for a stage of a step; times are of one clock of this rank."""

    step: int
    resource: str
    stage: str
    begin_s: float
    end_s: float


@final
class Timeline:
    """The intervals of this rank."""

    def __init__(self) -> None:
        self._begins: dict[int, float] = {}  # of the steps that are kept
        # Tuples, as they are made faster than a `StageInterval`.
        self._intervals: defaultdict[int, list[tuple[str, str, float, float]]] = defaultdict(list)
        self._pauses: list[tuple[float, float]] = []  # sorted by time
        self._last: int | None = None
        self.is_on = False  # callers check it before `add`
        self._changed = False

    def begin_step(self, step: int, now_s: float) -> None:
        self._last = step + LAST - 1 if self._last is None else self._last
        self.is_on = step <= self._last
        if not self.is_on:
            return
        self._begins[step], self._changed = now_s, True
        for kept in (self._begins, self._intervals):
            for old in [number for number in kept if number <= step - STEPS]:
                del kept[old]
        self._pauses = [pause for pause in self._pauses if pause[1] > min(self._begins.values())]

    def add(self, step: int, resource: str, stage: str, begin_s: float, end_s: float) -> None:
        self._intervals[step].append((resource, stage, begin_s, end_s))

    def pause(self, begin_s: float, end_s: float) -> None:
        """Cut out an interval of the main thread, an evaluation or a checkpoint; joined with a pause that ends here."""
        if self._pauses and self._pauses[-1][1] == begin_s:
            begin_s = self._pauses.pop()[0]
        self._pauses.append((begin_s, end_s))

    def take_changes(self) -> list[StageInterval]:
        """All intervals, in seconds since the first step began, if a step has begun since the last call."""
        if not self._changed:
            return []
        self._changed = False
        origin_s = min(self._begins.values())
        intervals = [
            StageInterval(step, resource, stage, begin_s - origin_s, end_s - origin_s)
            for step in sorted(self._begins)
            for resource, stage, begin_s, end_s in _join(map(self._without_pauses, self._intervals[step]))
        ]
        return sorted(intervals)

    def _without_pauses(self, interval: tuple[str, str, float, float]) -> tuple[str, str, float, float]:
        resource, stage, *times = interval
        # A time is moved back by all pauses before it, and by the part of a pause that it is in.
        begin_s, end_s = (
            time_s - sum(min(time_s, until_s) - from_s for from_s, until_s in self._pauses if from_s < time_s)
            for time_s in times
        )
        return resource, stage, begin_s, end_s


def _join(intervals: Iterable[tuple[str, str, float, float]]) -> Iterator[tuple[str, str, float, float]]:
    """Merge adjacent intervals of a stage on the main thread; drop empty ones."""
    ends: dict[tuple[str, str], tuple[float, float]] = {}
    for resource, stage, begin_s, end_s in sorted(intervals, key=itemgetter(2)):
        if end_s <= begin_s:
            continue
        open_s = ends.get((resource, stage))
        if open_s is not None and resource == PROCESSOR and open_s[1] == begin_s:
            ends[resource, stage] = open_s[0], end_s
            continue
        if open_s is not None:
            yield resource, stage, *open_s
        ends[resource, stage] = begin_s, end_s
    for key, open_s in ends.items():
        yield *key, *open_s
