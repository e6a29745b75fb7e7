"""Time of each phase on each rank between two written lines, beside the plan's forecast.

The first rank gets the seconds of all with what else they tell it, so a line costs no message more. Known limits:
steps one by one; a line has their mean.
"""

from collections.abc import Mapping, Sequence
from typing import final

from rowwise.plan import Forecast
from rowwise.train.breakdown import PHASES, Breakdown
from rowwise.train.feeding import AskHealth, DataWait, cells, no_service
from rowwise.train.progress import Progress
from rowwise.train.run_folder import Cell
from rowwise.train.settings import Training

Seconds = Mapping[str, float]  # by phase
STAGES = ("lookup", "exchange", "wait", "update")  # of a forecast; its exchange is `route`, too


@final
class Stages:
    """The seconds of one rank since the last line, and the lines of all.

    Args:
        clock: where the time of this rank goes.
        forecast: what the plan is expected to take; None: nobody knows.
        how: the samples of a step, which have to be those of the forecast.
        health: how the workers keep up that prepare rows, if there are any.
    """

    def __init__(
        self, clock: Breakdown, forecast: Forecast | None, how: Training, health: AskHealth = no_service
    ) -> None:
        self.clock, self._health = clock, health
        self._begin, self._samples, self._step = clock.seconds(), 0, 0
        self._first: Seconds | None = None  # when the first step had ended,
        self._last = self._begin  # and the last
        self._spent: Seconds = dict.fromkeys(PHASES, 0.0)
        fits = forecast is not None and forecast.batch == how.batch * how.accumulate
        self._expected = forecast.stages_s if forecast is not None and fits else {}

    def begin(self, progress: Progress) -> None:
        """Start the next line here."""
        self._begin, self._samples, self._step = self.clock.seconds(), progress.samples, progress.step
        self._first = None

    def stepped(self) -> None:
        self._last = self.clock.seconds()
        self._first = self._first or self._last

    @property
    def wait(self) -> DataWait:
        """For rows, in all steps since `begin` but the first: what that waits for is that everything starts."""
        first = self._first or self._last
        spent = {phase: self._last[phase] - first[phase] for phase in PHASES}
        return DataWait(seconds=spent["data"], of_s=sum(spent.values()))

    def of_workers(self) -> dict[str, Cell]:
        """The columns on workers of a line of steps.csv."""
        return cells(self._health())

    def so_far(self) -> dict[str, float]:
        """Seconds of training since the last line, by phase."""
        now = self.clock.seconds()
        return {phase: now[phase] - self._begin[phase] for phase in PHASES}

    def end_line(self, progress: Progress) -> tuple[int, int]:
        """End a line, whose times are then in `spent`, and begin the next; returns its steps and samples."""
        now = self.clock.seconds()
        self._spent = {phase: now[phase] - self._begin[phase] for phase in PHASES}
        steps, samples = progress.step - self._step, progress.samples - self._samples
        self._begin, self._samples, self._step = now, progress.samples, progress.step
        return steps, samples

    @property
    def spent(self) -> Seconds:
        """The seconds of the line that was ended last."""
        return self._spent

    def rows(self, step: int, steps: int, spent_W: Sequence[Seconds]) -> list[dict[str, Cell]]:
        """The lines of stages.csv at a step: of each rank and phase, seconds a step over so many steps."""
        found: list[dict[str, Cell]] = []
        for rank, spent in enumerate(spent_W):
            for phase in PHASES:
                measured_s = spent[phase] / max(steps, 1)
                row: dict[str, Cell] = {"step": step, "rank": rank, "phase": phase, "measured_s": measured_s}
                found.append(row | {"predicted_s": self._forecast(phase, rank)})
        return found

    def _forecast(self, phase: str, rank: int) -> float | None:
        expected_W = self._expected.get(phase, ()) if phase in STAGES else ()
        return expected_W[rank] if rank < len(expected_W) else None
