"""Runs the trials that the folder does not have yet, one after another, and records each at once."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import msgspec

from rowwise.errors import SpecError
from rowwise.hashing.allocate import FULL, Allocation
from rowwise.hashing.file import save
from rowwise.hashing.idmap import IdMap
from rowwise.hashing.methods import make_map, table_bytes
from rowwise.idmaps import StoredIds
from rowwise.recipes.compress import schedule
from rowwise.recipes.compress.division import TableDivision
from rowwise.recipes.compress.estimate import TimeLimit
from rowwise.recipes.compress.folder import Trial, TrialFolder, TrialFolderSpec
from rowwise.recipes.compress.measured import MeasuredTrials
from rowwise.recipes.compress.probe import Histories
from rowwise.recipes.compress.schedule import TrialSpec
from rowwise.recipes.compress.trials import Metrics, measure
from rowwise.recipes.compress.window import DataWindow
from rowwise.recipes.compress.work import WorkQueue
from rowwise.spec import Table

TOGETHER = "*"  # in place of a table's name: all chosen tables
TRIAL_MAP = ".trial-{}.idmap"
Report = Callable[[float], None]  # takes the share of a part that is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The trials of a folder, and what is needed to run more."""

    window: DataWindow
    division: TableDivision
    methods: tuple[str, ...]
    order: TrialFolderSpec
    folder: TrialFolder
    work: WorkQueue
    histories: Histories
    trials: dict[TrialSpec, Trial]
    limit: TimeLimit
    left_out: list[TrialSpec] = field(default_factory=list)  # trials of other sizes that had no time

    @property
    def measured(self) -> MeasuredTrials:
        task = self.window.earlier.recipe.evaluate.task
        return MeasuredTrials(trials=self.trials, methods=self.methods, seed=self.order.seed, task=task)

    def make_all(self, ratios: Sequence[float]) -> None:
        """Run all trials of the schedule."""
        seed, names = self.order.seed, self.division.names
        for asked in schedule.full_model_trials(seed):
            with self.work.part(f"full model, seed {asked.seed}") as report:
                self._train_once(asked, {}, report)
        self._try_each(schedule.wanted_size_trials(names, self.methods, ratios[0], seed))
        losses = {name: self.measured.losses(name, ratios[0]) for name in names}
        self._try_each(schedule.other_size_trials(losses, ratios[1:], seed), firm=False)

    def measure_together(self, allocation: Allocation) -> TrialSpec | None:
        """Train one model with all chosen tables, to check that the losses of single tables add up."""
        with self.work.part("all chosen tables") as report:
            maps = make_chosen_maps(self.division, allocation, self.histories, self.order.seed)
            if not maps:
                return None
            digest = hashlib.sha256("".join(one.digest for one in maps.values()).encode()).hexdigest()[:16]
            asked = TrialSpec(table=TOGETHER, method=digest, ratio=0.0, seed=self.order.seed)
            self._train_once(asked, maps, report)
        return asked

    def _try_each(self, wanted: Sequence[TrialSpec], *, firm: bool = True) -> None:
        """Run trials that each compress one table; without `firm` only those that there is time for."""
        for asked in wanted:
            with self.work.part(f"{asked.table} by {asked.method} in 1/{asked.ratio:g}") as report:
                if asked in self.trials:
                    continue
                if not firm and not self.limit.allows(max((one.took_s for one in self.trials.values()), default=0.0)):
                    self.left_out.append(asked)
                    continue
                table = self.division.table(asked.table)
                budget_bytes = int(table_bytes(table, None) / asked.ratio)
                made = make_map(asked.method, table, budget_bytes, self.histories[table.name], seed=self.order.seed)
                same = None if made is None else self._trial_of_map(asked, made.digest)
                if made is None:
                    self._record(Trial(asked=asked))
                elif same is not None:
                    self._record(msgspec.structs.replace(same, asked=asked, took_s=0.0))
                else:
                    self._train_once(asked, {table.name: made}, report)

    def _trial_of_map(self, asked: TrialSpec, digest: str) -> Trial | None:
        """A recorded trial with the same map, made by another method or size."""
        like = (t for t in self.trials.values() if (t.asked.table, t.asked.seed) == (asked.table, asked.seed))
        return next((trial for trial in like if trial.digest == digest), None)

    def _train_once(self, asked: TrialSpec, maps: Mapping[str, IdMap], report: Report) -> None:
        """Run and record a trial unless it is recorded."""
        if asked in self.trials:
            return
        begin_s = perf_counter()
        metrics = self._measure(maps, asked.seed, report)
        trial = Trial(
            asked=asked,
            size_bytes=sum(table_bytes(self.division.table(name), one) for name, one in maps.items()),
            map_bytes=sum(one.map_bytes for one in maps.values()),
            digest=next(iter(maps.values())).digest if len(maps) == 1 else "",
            metrics=metrics,
            took_s=round(perf_counter() - begin_s, 3),
        )
        self._record(trial)

    def _measure(self, maps: Mapping[str, IdMap], seed: int, report: Report) -> Metrics:
        stored: dict[str, StoredIds] = {}
        try:
            for name, one in maps.items():
                stored[name] = save_map(self.folder.path / TRIAL_MAP.format(name), self.division.table(name), one)
            return measure(self.window, stored, seed, self.order.rows, report)
        finally:
            for one in stored.values():
                with suppress(OSError):
                    Path(one.file).unlink()

    def _record(self, trial: Trial) -> None:
        self.folder.add(trial)
        self.trials[trial.asked] = trial


def make_chosen_maps(
    division: TableDivision, allocation: Allocation, histories: Histories, seed: int
) -> dict[str, IdMap]:
    """The id map of each table that the allocation compresses."""
    spare = division.budget_bytes - allocation.size_bytes
    made: dict[str, IdMap] = {}
    for name, option in allocation.chosen.items():
        if option.method == FULL:
            continue
        table = division.table(name)
        # The whole history may need a slightly larger map than the part that was measured.
        most = table_bytes(table, None) - 1
        budgets = (min(option.size_bytes + more, most) for more in (0, spare))
        found = (make_map(option.method, table, budget, histories[name], seed=seed) for budget in budgets)
        one = next((one for one in found if one is not None), None)
        if one is None:
            got = f"table {name!r} by {option.method} in {option.size_bytes:,} bytes"
            raise SpecError(f"{got}: its map of the whole history does not fit: want a larger budget")
        spare -= max(0, table_bytes(table, one) - option.size_bytes)
        made[name] = one
    return made


def save_map(path: Path, table: Table, one: IdMap) -> StoredIds:
    """Write a map to a file; returns its entry for a recipe."""
    save(path, table.name, one)
    return StoredIds(file=str(path.absolute()), digest=one.digest)
