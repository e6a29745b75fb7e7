"""Runs the trials that are missing in the folder, and records each as soon as it ends."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import msgspec

from rowwise.base.errors import SpecError
from rowwise.recipes.compress import schedule
from rowwise.recipes.compress.estimate import TimeLimit
from rowwise.recipes.compress.folder import Trial, TrialFolder, TrialFolderSpec
from rowwise.recipes.compress.probe import Histories
from rowwise.recipes.compress.progress import WorkProgress
from rowwise.recipes.compress.results import TrialResults
from rowwise.recipes.compress.schedule import TrialSpec
from rowwise.recipes.compress.selection import TableSelection
from rowwise.recipes.compress.trials import Metrics, run_trial
from rowwise.recipes.compress.window import DataWindow
from rowwise.tables.idmaps import StoredIds
from rowwise.tables.ids.allocate import FULL, Allocation
from rowwise.tables.ids.file import save
from rowwise.tables.ids.idmap import IdMap
from rowwise.tables.ids.methods import make_map, table_bytes
from rowwise.tables.spec import Table

TOGETHER = "*"  # table name of trials with all chosen tables
TRIAL_MAP = ".trial-{}.idmap"
Report = Callable[[float], None]  # takes the completed fraction of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs trials for the selected tables, and holds the recorded ones."""

    window: DataWindow
    selection: TableSelection
    methods: tuple[str, ...]
    spec: TrialFolderSpec
    folder: TrialFolder
    progress: WorkProgress
    histories: Histories
    trials: dict[TrialSpec, Trial]
    limit: TimeLimit
    left_out: list[TrialSpec] = field(default_factory=list)  # skipped trials of other sizes, over the time limit

    @property
    def results(self) -> TrialResults:
        task = self.window.earlier.recipe.evaluate.task
        return TrialResults(trials=self.trials, methods=self.methods, seed=self.spec.seed, task=task)

    def run_schedule(self, ratios: Sequence[float]) -> None:
        """Run the missing trials at these ratios; the first ratio is the target."""
        seed, names = self.spec.seed, self.selection.names
        for trial in schedule.full_model_trials(seed):
            with self.progress.step(f"full model, seed {trial.seed}") as report:
                self._train(trial, {}, report)
        self._compress_tables(schedule.wanted_size_trials(names, self.methods, ratios[0], seed))
        losses = {name: self.results.losses(name, ratios[0]) for name in names}
        self._compress_tables(schedule.other_size_trials(losses, ratios[1:], seed), within_limit=True)

    def compress_together(self, allocation: Allocation) -> TrialSpec | None:
        """Train one model with all chosen tables, to check that the losses of single tables add up."""
        with self.progress.step("all chosen tables") as report:
            maps = make_chosen_maps(self.selection, allocation, self.histories, self.spec.seed)
            if not maps:
                return None
            digest = hashlib.sha256("".join(id_map.digest for id_map in maps.values()).encode()).hexdigest()[:16]
            trial = TrialSpec(table=TOGETHER, method=digest, ratio=0.0, seed=self.spec.seed)
            self._train(trial, maps, report)
        return trial

    def _compress_tables(self, trials: Sequence[TrialSpec], *, within_limit: bool = False) -> None:
        """Run the missing trials, each of one compressed table; `within_limit` skips those over the time limit."""
        for spec in trials:
            with self.progress.step(f"{spec.table} by {spec.method} in 1/{spec.ratio:g}") as report:
                if spec in self.trials:
                    continue
                longest_s = max((trial.took_s for trial in self.trials.values()), default=0.0)
                if within_limit and not self.limit.allows(longest_s):
                    self.left_out.append(spec)
                    continue
                table = self.selection.table(spec.table)
                budget_bytes = int(table_bytes(table, None) / spec.ratio)
                id_map = make_map(spec.method, table, budget_bytes, self.histories[table.name], seed=self.spec.seed)
                same = None if id_map is None else self._find_same_map(spec, id_map.digest)
                if id_map is None:
                    self._record(Trial(spec=spec))
                elif same is not None:
                    self._record(msgspec.structs.replace(same, spec=spec, took_s=0.0))
                else:
                    self._train(spec, {table.name: id_map}, report)

    def _find_same_map(self, spec: TrialSpec, digest: str) -> Trial | None:
        """A recorded trial of the same table, seed and map, made by another method or for another size."""
        candidates = (t for t in self.trials.values() if (t.spec.table, t.spec.seed) == (spec.table, spec.seed))
        return next((trial for trial in candidates if trial.digest == digest), None)

    def _train(self, spec: TrialSpec, maps: Mapping[str, IdMap], report: Report) -> None:
        """Run and record a trial with these maps, unless it is recorded."""
        if spec in self.trials:
            return
        begin_s = perf_counter()
        metrics = self._measure(maps, spec.seed, report)
        trial = Trial(
            spec=spec,
            size_bytes=sum(table_bytes(self.selection.table(name), id_map) for name, id_map in maps.items()),
            map_bytes=sum(id_map.map_bytes for id_map in maps.values()),
            digest=next(iter(maps.values())).digest if len(maps) == 1 else "",
            metrics=metrics,
            took_s=round(perf_counter() - begin_s, 3),
        )
        self._record(trial)

    def _measure(self, maps: Mapping[str, IdMap], seed: int, report: Report) -> Metrics:
        files: dict[str, StoredIds] = {}
        try:
            for name, id_map in maps.items():
                path = self.folder.path / TRIAL_MAP.format(name)
                files[name] = save_map(path, self.selection.table(name), id_map)
            return run_trial(self.window, files, seed, self.spec.rows, report)
        finally:
            for stored in files.values():
                with suppress(OSError):
                    Path(stored.file).unlink()

    def _record(self, trial: Trial) -> None:
        self.folder.add(trial)
        self.trials[trial.spec] = trial


def make_chosen_maps(
    selection: TableSelection, allocation: Allocation, histories: Histories, seed: int
) -> dict[str, IdMap]:
    """The id map of each table that the allocation compresses."""
    spare = selection.budget_bytes - allocation.size_bytes
    maps: dict[str, IdMap] = {}
    for name, option in allocation.chosen.items():
        if option.method == FULL:
            continue
        table = selection.table(name)
        # The whole history has more ids than the rows of the trials, so its map may need spare bytes of the budget.
        max_bytes = table_bytes(table, None) - 1
        budgets = (min(option.size_bytes + extra, max_bytes) for extra in (0, spare))
        candidate_maps = (make_map(option.method, table, budget, histories[name], seed=seed) for budget in budgets)
        id_map = next((id_map for id_map in candidate_maps if id_map is not None), None)
        if id_map is None:
            raise SpecError(
                f"table {name!r} by {option.method} in {option.size_bytes:,} bytes: its map of the whole history does "
                "not fit",
                "a larger budget",
            )
        spare -= max(0, table_bytes(table, id_map) - option.size_bytes)
        maps[name] = id_map
    return maps


def save_map(path: Path, table: Table, id_map: IdMap) -> StoredIds:
    """Write a map to a file; returns its entry for a recipe."""
    save(path, table.name, id_map)
    return StoredIds(file=str(path.absolute()), digest=id_map.digest)
