"""The lines of stages.csv: seconds per step of each rank and phase, beside the planner's forecast.

Seconds and timelines travel to rank 0 in the gather of the metrics, so they cost no further message. A line of
stages.csv holds the mean over the steps since the line before.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import final

from rowwise.parallel.plan import Forecast
from rowwise.tables.spec import Value
from rowwise.train.breakdown import PHASES, Breakdown, PhaseSeconds
from rowwise.train.feeding import DataWait, ReadHealth, no_service, worker_cells
from rowwise.train.progress import Progress
from rowwise.train.run_folder import Cell
from rowwise.train.settings import Training
from rowwise.train.timeline import StageInterval

STAGES = ("lookup", "exchange", "wait", "update")  # phases of a forecast; its `exchange` includes `route`


class PhaseTime(Value, frozen=True):
    """Seconds of a phase in a step: [Note: Busy and exposed] in `breakdown.py`."""

    exposed_s: float
    busy_s: float


@final
class Stages:
    """The seconds of this rank since the last line, and the lines of all ranks.

    Args:
        clock: seconds of this rank by phase.
        forecast: expected seconds of the plan, if known.
        training: batch size of a step; a forecast for another batch size is ignored.
        health: reports the workers that prepare rows.
    """

    def __init__(
        self, clock: Breakdown, forecast: Forecast | None, training: Training, health: ReadHealth = no_service
    ) -> None:
        self.clock, self._health = clock, health
        self._begin, self._samples, self._step = clock.phase_seconds(), 0, 0
        self._first: PhaseSeconds | None = None  # the clock at the end of the first step
        self._last = self._begin  # the clock at the end of the last step
        self._ended = 0  # number of ended steps
        self.spent = self._begin.since(self._begin)  # seconds of the last complete line
        fits = forecast is not None and forecast.batch == training.batch * training.accumulate
        self._expected = forecast.stages_s if forecast is not None and fits else {}

    def begin(self, progress: Progress) -> None:
        """Begin a line now: earlier seconds are not part of it."""
        self._begin, self._samples, self._step = self.clock.phase_seconds(), progress.samples, progress.step
        self._first, self._ended = None, 0

    def end_step(self) -> None:
        self._last, self._ended = self.clock.phase_seconds(), self._ended + 1
        self._first = self._first or self._last

    @property
    def data_wait(self) -> DataWait:
        """Waiting for data in all steps since `begin` but the first, which waits for readers and workers to start."""
        spent = self._last.since(self._first or self._last).exposed
        return DataWait(seconds=spent["data"], of_s=sum(spent.values()))

    def mean_step(self) -> dict[str, PhaseTime]:
        """Mean seconds of a step by phase, over the steps of `data_wait`; empty before the second step."""
        steps, spent = self._ended - 1, self._last.since(self._first or self._last)
        if steps < 1:
            return {}
        return {p: PhaseTime(exposed_s=spent.exposed[p] / steps, busy_s=spent.busy[p] / steps) for p in PHASES}

    def worker_cells(self) -> dict[str, Cell]:
        """The cells of steps.csv about workers."""
        return worker_cells(self._health())

    def end_line(self, progress: Progress) -> tuple[int, int]:
        """End a line, and begin the next; returns the line's steps and samples."""
        now = self.clock.phase_seconds()
        self.spent = now.since(self._begin)
        steps, samples = progress.step - self._step, progress.samples - self._samples
        self._begin, self._samples, self._step = now, progress.samples, progress.step
        return steps, samples

    def rows(self, step: int, steps: int, spent_W: Sequence[PhaseSeconds]) -> list[dict[str, Cell]]:
        """The lines of stages.csv: for each rank and phase the mean seconds of a step, over `steps` steps."""
        lines: list[dict[str, Cell]] = []
        for rank, spent in enumerate(spent_W):
            for phase in PHASES:
                measured_s, busy_s = (seconds[phase] / max(steps, 1) for seconds in spent)
                line: dict[str, Cell] = {"step": step, "rank": rank, "phase": phase}
                line |= {"measured_s": measured_s, "busy_s": busy_s, "predicted_s": self._forecast_s(phase, rank)}
                lines.append(line)
        return lines

    def timeline_rows(self, intervals_W: Sequence[Sequence[StageInterval]]) -> list[dict[str, Cell]]:
        """The lines of timeline.csv, sorted by step and rank."""
        entries = [(work.step, rank, work) for rank, intervals in enumerate(intervals_W) for work in intervals]
        lines: list[dict[str, Cell]] = []
        for step, rank, work in sorted(entries, key=itemgetter(0, 1)):
            line: dict[str, Cell] = {"step": step, "rank": rank, "resource": work.resource, "stage": work.stage}
            lines.append(line | {"begin_s": round(work.begin_s, 9), "end_s": round(work.end_s, 9)})
        return lines

    def _forecast_s(self, phase: str, rank: int) -> float | None:
        expected_W = self._expected.get(phase, ()) if phase in STAGES else ()
        return expected_W[rank] if rank < len(expected_W) else None
