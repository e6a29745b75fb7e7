"""How long `rowwise compress` takes, before it begins: the rows of all trainings, times the measured seconds of a row.

Counts of rows follow from up to three splits of the history and the sizes of the others. A row of the small model, and
one to measure on, are taken to be as slow as one of a training, and no training to stop early: most commands end
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

SAMPLED = 3  # splits
STEPS, WARM_UP = 10, 2  # of the measured training
FOLLOWING = 2  # trainings after the trials of other sizes: all chosen tables, and maps


class CompressionWork(Value, frozen=True, kw_only=True):
    """Numbers of rows and trainings that are still to be done."""

    history: int  # rows of a pass
    later: int  # rows to measure on
    step_rows: int
    steps: int  # of a training on all rows
    every: int = 0  # steps from one evaluation of a training to the next; 0: one at its end
    trainings: int
    passes: int  # of the small model over the history

    def trained_rows(self, most: int | None = None) -> int:
        """Rows of each training, if it may train on at most so many."""
        steps = self.steps if most is None else min(self.steps, max(1, -(-most // self.step_rows)))
        return steps * self.step_rows

    def rows(self, most: int | None = None) -> int:
        """Rows of all trainings, evaluations and passes."""
        trained = self.trained_rows(most)
        evaluations = 1 + (trained // self.step_rows // self.every if self.every else 0)
        return self.trainings * (trained + evaluations * self.later) + self.passes * self.history

    def max_rows(self, row_s: float, budget_s: float) -> int:
        """The most rows of a training for which all work takes at most so long; 0: one step is too much."""
        steps = bisect.bisect_right(
            range(1, self.steps + 1), budget_s, key=lambda count: self.rows(count * self.step_rows) * row_s
        )
        return steps * self.step_rows


class RowCount(NamedTuple):
    """Rows of all splits, estimated, and the seconds to prepare one."""

    rows: int
    row_s: float


@final
class TimeLimit:
    """Whether another trial of another size leaves the time for what follows; without a budget it always does."""

    def __init__(self, budget_s: float | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._budget_s, self._clock, self._begin_s = budget_s, clock, clock()

    def allows(self, took_s: float) -> bool:
        """One more trial, if a training takes so long."""
        spent_s = self._clock() - self._begin_s
        return self._budget_s is None or spent_s + (1 + FOLLOWING) * took_s <= self._budget_s


def forecast_work(
    window: DataWindow,
    selection: TableSelection,
    goal: CompressionGoal,
    spec: TrialFolderSpec,
    path: Path,
    minutes: float | None,
) -> tuple[TrialFolderSpec, str]:
    """The spec with the rows that trials have time for, and a line on how long all work takes."""
    set_threads(window.earlier.recipe)
    trainings = count_trainings(selection, goal, spec.seed, TrialFolder(path).read())
    known = minutes is not None and (path / SPEC).is_file()
    if known:  # trials on other rows could not be compared with those that are there
        spec = structs.replace(spec, rows=recorded_rows(path))
    done = probe.REFIT_PASSES + 1 if (path / PROBE).exists() else 0
    work, row_s = measure_work(window, trainings, done, spec.rows)
    if minutes is not None and not known:
        most = work.max_rows(row_s, 60 * minutes)
        if not most:
            least = f"one step in each of {trainings} trainings takes {format_duration(work.rows(1) * row_s)}"
            raise SpecError(f"--minutes {minutes:g}: {least}", "more minutes, or fewer tries by --methods")
        spec = structs.replace(spec, rows=None if most == work.trained_rows() else most)
    what = f"{trainings} trainings on {work.trained_rows(spec.rows):,} rows, {work.passes} passes of a small model"
    return spec, f"takes about {format_duration(work.rows(spec.rows) * row_s)}: {what}; {1 / row_s:,.0f} rows/s"


def count_trainings(selection: TableSelection, goal: CompressionGoal, seed: int, done: dict[TrialSpec, Trial]) -> int:
    """Trainings of the schedule that are not recorded: about, as results decide which methods are tried again."""
    ratios = schedule.ratios_around(selection.ratio)
    firm = [*schedule.full_model_trials(seed)]
    firm += schedule.wanted_size_trials(selection.names, goal.methods, ratios[0], seed)
    others = len(selection.names) * min(schedule.BEST, len(goal.methods)) * (len(ratios) - 1)
    recorded = sum(1 for one in done if one.table in selection.names and one.ratio in ratios[1:])
    return sum(one not in done for one in firm) + max(0, others - recorded) + 1


def measure_work(
    window: DataWindow, trainings: int, passes_done: int, rows: int | None
) -> tuple[CompressionWork, float]:
    """What is to be done, and the seconds of a row, from a few steps of the full model."""
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
    """Seconds of a step of the full model, its rows being prepared."""
    resolved = change_recipe(window.earlier, {}, window.earlier.recipe.seed, None)
    train = structs.replace(resolved.recipe.train, steps=STEPS, epochs=STEPS)
    resolved = replace(resolved, recipe=structs.replace(resolved.recipe, train=train))
    model = make_model(resolved)
    job = make_job(resolved, model, lambda position: make_batcher(resolved, resolved.rows.train, position))
    ends: list[float] = []

    def note(_shown: RunDisplay) -> None:
        ends.append(perf_counter())

    Trainer(replace(job, evaluate=None), make_settings(resolved.recipe), on_step=note).run()
    steps = [end - begin for begin, end in itertools.pairwise(ends)]
    return statistics.median(steps[WARM_UP:])


def count_rows(batcher: Batcher) -> RowCount:
    """From the first, a middle and the last split; exact where there are no more."""
    splits = batcher.task.splits
    chosen = sorted({round(part * (len(splits) - 1) / (SAMPLED - 1)) for part in range(SAMPLED)})
    begin_s, used = perf_counter(), 0
    for index in chosen:
        opened = batcher.task.open(index, 0)
        if opened.rows:
            opened.encode()
        used += opened.rows
    taken_s = perf_counter() - begin_s
    rows = round(used * sum(map(_extent, splits)) / max(1, sum(_extent(splits[index]) for index in chosen)))
    return RowCount(rows, taken_s / max(1, used))


def _extent(split: Split) -> int:
    """Rows where they are known, else bytes."""
    return split.stop - split.start if split.rows is None else split.rows
