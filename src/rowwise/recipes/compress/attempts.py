"""Trials one after another: what a folder has not seen yet is made, trained and measured, and written down at once."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from rowwise.recipes.compress.folder import Trial, TrialFolder, TrialFolderSpec
from rowwise.recipes.compress.measured import MeasuredTrials
from rowwise.recipes.compress.probe import Histories
from rowwise.recipes.compress.schedule import TrialSpec
from rowwise.recipes.compress.trials import Metrics, measure
from rowwise.recipes.compress.window import DataWindow
from rowwise.recipes.compress.work import WorkQueue
from rowwise.spec import Table

TOGETHER = "*"  # instead of one table's name: all as chosen
TRIAL_MAP = ".trial-{}.idmap"
Told = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Trains the trials of a schedule, and records each."""

    window: DataWindow
    division: TableDivision
    methods: tuple[str, ...]
    order: TrialFolderSpec
    folder: TrialFolder
    work: WorkQueue
    histories: Histories
    trials: dict[TrialSpec, Trial]

    @property
    def measured(self) -> MeasuredTrials:
        task = self.window.earlier.recipe.evaluate.task
        return MeasuredTrials(trials=self.trials, methods=self.methods, seed=self.order.seed, task=task)

    def make_all(self, ratios: Sequence[float]) -> None:
        seed, names = self.order.seed, self.division.names
        for asked in schedule.full_trials(seed):
            with self.work.piece(f"the whole model, seed {asked.seed}") as told:
                self._once(asked, {}, told)
        self._each(schedule.trials_at_goal(names, self.methods, ratios[0], seed))
        losses = {name: self.measured.losses(name, ratios[0]) for name in names}
        self._each(schedule.trials_at_other_sizes(losses, ratios[1:], seed))

    def together(self, allocation: Allocation) -> TrialSpec | None:
        """All tables as chosen in one model: whether losses that were measured one by one add up."""
        with self.work.piece("all tables as chosen") as told:
            maps = chosen_maps(self.division, allocation, self.histories, self.order.seed)
            if not maps:
                return None
            said = hashlib.sha256("".join(one.digest for one in maps.values()).encode()).hexdigest()[:16]
            asked = TrialSpec(table=TOGETHER, method=said, ratio=0.0, seed=self.order.seed)
            self._once(asked, maps, told)
        return asked

    def _each(self, wanted: Sequence[TrialSpec]) -> None:
        for asked in wanted:
            with self.work.piece(f"{asked.table} by {asked.method} in 1/{asked.ratio:g}") as told:
                if asked in self.trials:
                    continue
                table = self.division.table(asked.table)
                budget_bytes = int(table_bytes(table, None) / asked.ratio)
                made = make_map(asked.method, table, budget_bytes, self.histories[table.name], seed=self.order.seed)
                twin = None if made is None else self._twin(asked, made.digest)
                if made is None:
                    self._keep(Trial(asked=asked))
                elif twin is not None:
                    self._keep(msgspec.structs.replace(twin, asked=asked, took_s=0.0))
                else:
                    self._once(asked, {table.name: made}, told)

    def _twin(self, asked: TrialSpec, digest: str) -> Trial | None:
        """A trial of the same map, which another method or size has made as well."""
        like = (t for t in self.trials.values() if (t.asked.table, t.asked.seed) == (asked.table, asked.seed))
        return next((trial for trial in like if trial.digest == digest), None)

    def _once(self, asked: TrialSpec, maps: Mapping[str, IdMap], told: Told) -> None:
        if asked in self.trials:
            return
        begin_s = perf_counter()
        metrics = self._measure(maps, asked.seed, told)
        trial = Trial(
            asked=asked,
            size_bytes=sum(table_bytes(self.division.table(name), one) for name, one in maps.items()),
            map_bytes=sum(one.map_bytes for one in maps.values()),
            digest=next(iter(maps.values())).digest if len(maps) == 1 else "",
            metrics=metrics,
            took_s=round(perf_counter() - begin_s, 3),
        )
        self._keep(trial)

    def _measure(self, maps: Mapping[str, IdMap], seed: int, told: Told) -> Metrics:
        stored: dict[str, StoredIds] = {}
        try:
            for name, one in maps.items():
                stored[name] = save_map(self.folder.path / TRIAL_MAP.format(name), self.division.table(name), one)
            return measure(self.window, stored, seed, self.order.rows, told)
        finally:
            for one in stored.values():
                with suppress(OSError):
                    Path(one.file).unlink()

    def _keep(self, trial: Trial) -> None:
        self.folder.add(trial)
        self.trials[trial.asked] = trial


def chosen_maps(division: TableDivision, allocation: Allocation, histories: Histories, seed: int) -> dict[str, IdMap]:
    """A map for each table that is not left whole."""
    spare = division.budget_bytes - allocation.size_bytes
    made: dict[str, IdMap] = {}
    for name, option in allocation.chosen.items():
        if option.method == FULL:
            continue
        table = division.table(name)
        # With another history a map may want a little more.
        most = table_bytes(table, None) - 1
        budgets = (min(option.size_bytes + more, most) for more in (0, spare))
        found = (make_map(option.method, table, budget, histories[name], seed=seed) for budget in budgets)
        one = next((one for one in found if one is not None), None)
        if one is None:
            got = f"table {name!r} by {option.method} in {option.size_bytes:,} bytes"
            raise SpecError(f"{got}: all of the history makes it larger than a part did: want a larger budget")
        spare -= max(0, table_bytes(table, one) - option.size_bytes)
        made[name] = one
    return made


def save_map(path: Path, table: Table, one: IdMap) -> StoredIds:
    """A map as a file, and how a recipe says so."""
    save(path, table.name, one)
    return StoredIds(file=str(path.absolute()), digest=one.digest)
