"""Estimates the time of `rowwise compress` before it begins: rows of all trainings times the measured seconds per row.

Rows are counted in up to three splits of the history, and extrapolated by the sizes of the others. Rows of the small
model and of evaluations count as rows of a training, and no training is assumed to stop early: most commands end
sooner.
"""

import bisect
import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, final

from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_duration
from rowwise.ingest.batcher import Batcher
from rowwise.ingest.reader import Split
from rowwise.recipes.compose import make_job, make_model, make_settings, set_threads
from rowwise.recipes.compress import probe, schedule
from rowwise.recipes.compress.folder import PROBE, SPEC, Trial, TrialFolder, TrialFolderSpec, recorded_rows
from rowwise.recipes.compress.schedule import TrialSpec
from rowwise.recipes.compress.selection import CompressionGoal, TableSelection
from rowwise.recipes.compress.trials import change_recipe
from rowwise.recipes.compress.window import DataWindow
from rowwise.recipes.resolved import make_batcher
from rowwise.tables.spec import Value
from rowwise.train.trainer import RunDisplay, Trainer

SAMPLED = 3  # splits to count
STEPS, WARM_UP = 10, 2  # steps of the timed training, and steps to skip
FOLLOWING = 2  # trainings after the trials of other sizes: all chosen tables, and maps


class CompressionWork(Value, frozen=True, kw_only=True):
    """Rows and trainings that remain."""

    history: int  # rows per pass
    later: int  # rows to measure on
    step_rows: int
    steps: int  # steps of a training on all rows
    every: int = 0  # steps between evaluations of a training; 0: one evaluation at its end
    trainings: int
    passes: int  # passes of the small model over the history

    def trained_rows(self, max_rows: int | None = None) -> int:
        """Rows of each training, with a limit of `max_rows`."""
        steps = self.steps if max_rows is None else min(self.steps, max(1, -(-max_rows // self.step_rows)))
        return steps * self.step_rows

    def rows(self, max_rows: int | None = None) -> int:
        """Rows of all trainings, evaluations and passes."""
        trained = self.trained_rows(max_rows)
        evaluations = 1 + (trained // self.step_rows // self.every if self.every else 0)
        return self.trainings * (trained + evaluations * self.later) + self.passes * self.history

    def max_rows(self, row_s: float, budget_s: float) -> int:
        """Largest number of rows per training within the time budget for all work; 0: not even one step."""
        steps = bisect.bisect_right(
            range(1, self.steps + 1), budget_s, key=lambda count: self.rows(count * self.step_rows) * row_s
        )
        return steps * self.step_rows


class RowCount(NamedTuple):
    """Estimated rows of all splits, and the seconds to prepare a row."""

    rows: int
    row_s: float


@final
class TimeLimit:
    """Whether one more trial of another size leaves time for the final trainings; always true without a budget."""

    def __init__(self, budget_s: float | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._budget_s, self._clock, self._begin_s = budget_s, clock, clock()

    def allows(self, training_s: float) -> bool:
        """Whether a trial of `training_s` seconds fits."""
        spent_s = self._clock() - self._begin_s
        return self._budget_s is None or spent_s + (1 + FOLLOWING) * training_s <= self._budget_s


def forecast_work(
    window: DataWindow,
    selection: TableSelection,
    goal: CompressionGoal,
    spec: TrialFolderSpec,
    path: Path,
    minutes: float | None,
) -> tuple[TrialFolderSpec, str]:
    """The spec with the rows per training that fit into `minutes`, and a line with the expected time."""
    set_threads(window.earlier.recipe)
    trainings = count_trainings(selection, goal, spec.seed, TrialFolder(path).read())
    resumed = minutes is not None and (path / SPEC).is_file()
    if resumed:  # trials on other rows are not comparable with the recorded ones
        spec = structs.replace(spec, rows=recorded_rows(path))
    done = probe.REFIT_PASSES + 1 if (path / PROBE).exists() else 0
    work, row_s = measure_work(window, trainings, done, spec.rows)
    if minutes is not None and not resumed:
        max_rows = work.max_rows(row_s, 60 * minutes)
        if not max_rows:
            problem = f"one step in each of {trainings} trainings takes {format_duration(work.rows(1) * row_s)}"
            raise SpecError(f"--minutes {minutes:g}: {problem}", "more minutes, or fewer --methods")
        spec = structs.replace(spec, rows=None if max_rows == work.trained_rows() else max_rows)
    summary = f"{trainings} trainings on {work.trained_rows(spec.rows):,} rows, {work.passes} passes of a small model"
    return spec, f"takes about {format_duration(work.rows(spec.rows) * row_s)}: {summary}; {1 / row_s:,.0f} rows/s"


def count_trainings(selection: TableSelection, goal: CompressionGoal, seed: int, done: dict[TrialSpec, Trial]) -> int:
    """Approximate number of trainings that are not recorded yet; results decide which methods are tried again."""
    ratios = schedule.ratios_around(selection.ratio)
    certain = [*schedule.full_model_trials(seed)]
    certain += schedule.wanted_size_trials(selection.names, goal.methods, ratios[0], seed)
    others = len(selection.names) * min(schedule.BEST, len(goal.methods)) * (len(ratios) - 1)
    recorded = sum(1 for trial in done if trial.table in selection.names and trial.ratio in ratios[1:])
    return sum(trial not in done for trial in certain) + max(0, others - recorded) + 1


def measure_work(
    window: DataWindow, trainings: int, passes_done: int, rows: int | None
) -> tuple[CompressionWork, float]:
    """The remaining work, and the seconds per row, measured in a few steps of the full model."""
    earlier = window.earlier
    train, evaluate = earlier.recipe.train, earlier.recipe.evaluate
    history = count_rows(make_batcher(earlier, earlier.rows.train))
    later = count_rows(make_batcher(earlier, window.later))
    step_rows = train.batch * train.accumulate
    steps = max(1, -(-history.rows * train.epochs // step_rows))
    steps = min(steps, train.steps or steps)
    every = evaluate.every or max(1, steps // train.epochs)
    passes = (probe.REFIT_PASSES + 1) * (2 if window.whole is not None else 1) - passes_done
    work = CompressionWork(
        history=history.rows,
        later=later.rows,
        step_rows=step_rows,
        steps=steps,
        every=every if window.validates else 0,
        trainings=trainings,
        passes=passes,
    )
    if rows is not None:
        work = structs.replace(work, steps=work.trained_rows(rows) // step_rows)
    return work, history.row_s + measure_step(window) / step_rows


def measure_step(window: DataWindow) -> float:
    """Seconds of a step of the full model, without the preparation of its rows."""
    resolved = change_recipe(window.earlier, {}, window.earlier.recipe.seed, None)
    train = structs.replace(resolved.recipe.train, steps=STEPS, epochs=STEPS)
    resolved = replace(resolved, recipe=structs.replace(resolved.recipe, train=train))
    model = make_model(resolved)
    job = make_job(resolved, model, lambda position: make_batcher(resolved, resolved.rows.train, position))
    ends: list[float] = []

    def record_time(_display: RunDisplay) -> None:
        ends.append(perf_counter())

    Trainer(replace(job, evaluate=None), make_settings(resolved.recipe), on_step=record_time).run()
    steps = [end - begin for begin, end in itertools.pairwise(ends)]
    return statistics.median(steps[WARM_UP:])


def count_rows(batcher: Batcher) -> RowCount:
    """Rows extrapolated from the first, a middle and the last split; exact for up to three splits."""
    splits = batcher.task.splits
    chosen = sorted({round(part * (len(splits) - 1) / (SAMPLED - 1)) for part in range(SAMPLED)})
    begin_s, read = perf_counter(), 0
    for index in chosen:
        opened = batcher.task.open(index, 0)
        if opened.rows:
            opened.encode()
        read += opened.rows
    taken_s = perf_counter() - begin_s
    rows = round(read * sum(map(_extent, splits)) / max(1, sum(_extent(splits[index]) for index in chosen)))
    return RowCount(rows, taken_s / max(1, read))


def _extent(split: Split) -> int:
    """Rows if known, else bytes."""
    return split.stop - split.start if split.rows is None else split.rows
