"""Starts, resumes and evaluates runs, and predicts with them: the commands as functions that print nothing.

A `TrainingRun` is a resolved recipe, its model, its trainer and its folder. On several ranks all call the same
functions, and the first rank writes the folder.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter, time
from typing import Any, Literal, final

import msgspec
import torch
from msgspec import structs
from torch import nn

from rowwise import report
from rowwise.comm.interface import Comm
from rowwise.comm.solo import solo
from rowwise.comm.status import all_gather_uneven
from rowwise.errors import CheckpointError, DataError, RowwiseError, SpecError
from rowwise.ingest.transform import MapId, sources, to_json
from rowwise.ingest.transform import decode as decode_transforms
from rowwise.ingest.vocabulary import check_grown
from rowwise.ingest.warehouse.popularity import log_use
from rowwise.plan import Plan
from rowwise.recipes.access import ACCESS, AccessFile
from rowwise.recipes.bad_rows import find_bad_rows
from rowwise.recipes.compose import ResolvedRecipe, make_evaluator, make_job, make_model, make_settings, resolve
from rowwise.recipes.feed import Feed
from rowwise.recipes.first_rank import on_first_rank, resolve_on_first_rank
from rowwise.recipes.id_maps import copy_maps, relocate_maps
from rowwise.recipes.machine import Environment, NativeLibrary
from rowwise.recipes.outlook import open_warm_start
from rowwise.recipes.place import choose_plan, place_tables, single_rank_plan, step_samples, tables_of
from rowwise.recipes.predict import predict
from rowwise.recipes.recipe import Recipe, UserModel, check_ranks
from rowwise.recipes.rows import RowSelection, open_reader
from rowwise.recipes.table_memory import Purpose, check_memory
from rowwise.recipes.text import RECIPE, apply_changes, decode, parse, write
from rowwise.recipes.unused_keys import find_notes
from rowwise.recipes.user_model_name import split_name
from rowwise.spec import Value
from rowwise.textfile import decode_json, read_bytes, read_text
from rowwise.train.evaluate import Scores, Values, values_of
from rowwise.train.feeding import DataWait
from rowwise.train.metrics import Metrics
from rowwise.train.progress import BestEvaluation
from rowwise.train.recorder import peak_memory_bytes
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder
from rowwise.train.snapshot import WarmStartMatch, restore_model, warm_start
from rowwise.train.trainer import OnStep, Trainer, TrainingJob

PLAN, BAD_ROWS = "plan.json", "bad_rows"  # in the folder of a run
TRANSFORMS = "transforms.json"
Warn = Callable[[str], None]  # takes a line for each setting that was replaced or has no effect


def ignore_warning(line: str) -> None:
    """The default `warn` of library functions."""


class RunResult(Value, frozen=True):
    """The result of a run: the content of result.json."""

    status: Literal["finished", "stopped", "failed"]
    recipe: str
    run: str
    message: str | None = None
    steps: int = 0
    samples: int = 0
    epochs: int = 0
    wall_s: float = 0.0  # of the last process of the run
    samples_s: float = 0.0  # while training, over the whole run
    peak_memory_bytes: int = 0
    data_wait: DataWait = DataWait()  # waiting for rows, in the last process of the run
    workers: int | None = None  # number of workers at the end; None: rows were prepared by trainers
    bad_rows: int = 0  # quarantined
    bad_reasons: tuple[str, ...] = ()  # of the first quarantined rows
    best: BestEvaluation | None = None
    test: dict[str, dict[str, float | None]] = msgspec.field(default_factory=dict)
    ceiling: dict[str, dict[str, float | None]] = msgspec.field(default_factory=dict)  # best possible, where known
    expected: dict[str, float] = msgspec.field(default_factory=dict)
    spread: dict[str, float] = msgspec.field(default_factory=dict)


@final
class TrainingRun:
    """A run that is ready to train; made by `start` or `resume` on all of its ranks."""

    def __init__(
        self, resolved: ResolvedRecipe, folder: RunFolder, made: "_BuiltJob", tell: OnStep | None, comm: Comm
    ) -> None:
        self.begin_s = perf_counter()
        self.resolved, self.folder, self.model, self.plan = resolved, folder, made.job.model, made.plan
        self.comm, self._first, self._feed = comm, comm.rank == 0, made.feed
        self.match: WarmStartMatch | None = None  # weights that a warm start loaded
        on_first_rank(comm, folder.hold)
        made.feed.start(folder.path / BAD_ROWS)
        recipe = resolved.recipe
        self._access = AccessFile(tables_of(self.model), step_samples(recipe))
        job = replace(made.job, after_save=self._write_access)
        self.trainer = Trainer(job, make_settings(recipe), folder, tell, comm, recipe.wire)

    @classmethod
    def start(
        cls, recipe: Recipe, root: Path = Path("runs"), tell: OnStep | None = None, comm: Comm | None = None
    ) -> "TrainingRun":
        """A new run, in the next numbered folder of root/<recipe>."""
        comm = comm or solo()
        if not recipe.name:
            raise SpecError("the recipe has no name: want one, as it names the run's folder")
        check_ranks(recipe, comm.topology.world)
        resolved = resolve_on_first_rank(lambda: resolve(recipe), comm)
        made = _build_job(resolved, comm)
        with made.feed.closed_by_errors():
            # Errors of data and warm start are raised before the folder is made.
            made.job.batches(None)
            match = _warm_start(resolved, made.job.model)
            folder = _folder_of_first_rank(comm, lambda: RunFolder.create(root, recipe.name))
            try:
                run = cls(resolved, folder, made, tell, comm)
                run.match = match
                if run._first:
                    run._write_beginning()
            except (RowwiseError, OSError):
                if comm.rank == 0:
                    folder.release()
                    shutil.rmtree(folder.path, ignore_errors=True)  # a run that did not start leaves no folder
                raise
            return run

    @classmethod
    def resume(
        cls,
        path: Path,
        changes: Sequence[str] = (),
        *,
        which: str = "last",
        tell: OnStep | None = None,
        comm: Comm | None = None,
    ) -> "TrainingRun":
        """A stopped or killed run, from its last checkpoint or, without one, from the start; on any number of ranks."""
        comm = comm or solo()
        folder = _folder_of_first_rank(comm, lambda: RunFolder.open(path))
        resolved = resolve_on_first_rank(lambda: resolve_saved(path, changes, comm.topology.world), comm)
        made = _build_job(resolved, comm, "resume")
        with made.feed.closed_by_errors():
            run = cls(resolved, folder, made, tell, comm)
            try:
                run._restore(which)
            except (RowwiseError, OSError):
                folder.release()
                raise
        if run._first:
            _warn_if_model_changed(resolved.recipe, folder)
            if changes:
                folder.write(RECIPE, write(resolved.recipe, defaults=True))
            run._write_place()
        return run

    def _restore(self, which: str) -> None:
        """Load a checkpoint; later checkpoints and log lines are removed, as training repeats them."""
        saved = CheckpointFolder(self.folder.checkpoints, self.comm)
        saved.clean()
        if which == "last" and on_first_rank(self.comm, lambda: not saved.steps()):
            if self._first:
                self.folder.drop_after(0)
            self.match = _warm_start(self.resolved, self.model)
            return
        try:
            self.trainer.resume(saved.open(which))
        except CheckpointError as error:
            older = saved.steps()[:-1] if which == "last" else []
            if not older or "damaged" not in str(error):
                raise
            out = f"the one before it: rowwise resume {self.folder.path} --from step-{older[-1]:09}"
            raise CheckpointError(f"{error}: {out}") from None
        self._raise_if_finished()

    def _raise_if_finished(self) -> None:
        """Raise for a finished run, unless it was killed before its test."""
        progress, settings = self.trainer.progress, self.trainer.settings
        if progress.finished and _finished_at(self.folder.path) == progress.step:
            stopped = settings.evaluate.patience is not None and progress.worse >= settings.evaluate.patience
            more = "evaluate.patience=null" if stopped else f"train.epochs={settings.train.epochs + 1}"
            more = f"train.steps={2 * progress.step}" if progress.step == settings.train.steps else more
            out = f"want --set {more} to train longer, or rowwise eval {self.folder.path}"
            raise DataError(f"{self.folder.path} has finished at step {progress.step}: {out}")

    def go(self) -> RunResult:
        """Train to the end, then test; writes result.json and the report, also after an error."""
        self._log_beginning()
        try:
            with closing(self._feed):
                progress = self.trainer.run()
            test, ceiling = self._test() if progress.finished else ({}, {})
            peak_bytes = max(map(int, all_gather_uneven(self.comm, torch.tensor([peak_memory_bytes()]), "memory")))
        except (RowwiseError, OSError) as error:
            with suppress(OSError, RowwiseError):  # the disk itself may have failed
                self._finish(self._result("failed", message=str(error)))
            self.folder.release()
            raise
        status = "finished" if progress.finished else "stopped"
        result = self._result(status, test=test, ceiling=ceiling, peak_memory_bytes=peak_bytes)
        self._finish(result)
        self.folder.release()
        return result

    def _log_beginning(self) -> None:
        topology = self.comm.topology
        pids = [int(pid) for pid in all_gather_uneven(self.comm, torch.tensor([os.getpid()]), "processes")]
        if self._first:
            self.folder.log(f"{_now()} training from step {self.trainer.progress.step} on")
            if topology.world > 1:
                hosts = f"{topology.hosts} hosts" if topology.hosts > 1 else "1 host"
                self.folder.log(f"{_now()} {topology.world} ranks on {hosts}, processes {' '.join(map(str, pids))}")

    def _test(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Test metrics of the best checkpoint, or of the last one without validation, and the best possible metrics."""
        rows, progress = self.resolved.parts.test, self.trainer.progress
        if rows is None:
            if self._first:
                self.folder.warn("no test rows: want data.test or data.test_share")
            return {}, {}
        if progress.best is not None and progress.best.step != progress.step:
            restore_model(CheckpointFolder(self.folder.checkpoints).open("best"), self.model)
        scores = make_evaluator(self.resolved, self.model, rows, comm=self.comm, aside=self._feed.aside)()
        self.trainer.record_evaluation("test", scores)
        return dict(scores.tasks), best_possible_metrics(self.resolved, rows) if self._first else {}

    def _result(self, status: Literal["finished", "stopped", "failed"], **more: Any) -> RunResult:
        progress, about = self.trainer.progress, self.resolved.recipe.about
        more = _measured_fields(self.trainer, self.folder.path) | more
        return RunResult(
            status=status,
            recipe=self.resolved.recipe.name,
            run=str(self.folder.path),
            steps=progress.step,
            samples=progress.samples,
            epochs=progress.position.epoch,
            wall_s=round(perf_counter() - self.begin_s, 3),
            samples_s=round(progress.samples / max(progress.time_s, 1e-9), 1),
            best=progress.best,
            expected=about.expect,
            spread=about.spread,
            **more,
        )

    def _finish(self, result: RunResult) -> None:
        if not self._first:
            return
        self.folder.log(
            f"{_now()} {result.status} at step {result.steps}" + (f": {result.message}" if result.message else "")
        )
        self.folder.write_json("result.json", msgspec.to_builtins(result))
        self._write_access(ended=True)
        report.write(self.folder.path)

    def _write_access(self, *, ended: bool = False) -> None:
        self.folder.write(ACCESS, self._access.text(self.trainer.traffic, ended=ended))

    def _write_beginning(self) -> None:
        recipe = self.resolved.recipe
        self.folder.write(RECIPE, write(copy_maps(recipe, self.folder.path), defaults=True))
        if recipe.transforms:  # includes the source of user functions, so that serving needs only this file
            self.folder.write(TRANSFORMS, to_json(self.resolved.transforms).decode())
        self._write_place()
        _log_columns(self.resolved)
        if isinstance(recipe.model, UserModel):
            path, _ = split_name(recipe.model.module)
            (self.folder.path / "code").mkdir()
            shutil.copyfile(path, self.folder.path / "code" / path.name)
        for line in self.match.lines() if self.match else ():
            self.folder.log(line)

    def _write_place(self) -> None:
        """Write env.json, plan.json and warnings, again after each resume, which may be on other ranks."""
        topology, wire = self.comm.topology, msgspec.to_builtins(self.resolved.recipe.wire)
        where = {"started": _now(), "ranks": topology.world, "hosts": topology.hosts, "wire": wire}
        self.folder.write_json(
            "env.json", {**asdict(Environment.read("passive")), **asdict(NativeLibrary.read()), **where}
        )
        self.folder.write(PLAN, self.plan.to_json() + "\n")
        for line in find_notes(self.resolved, topology):
            self.folder.warn(line)


def _log_columns(resolved: ResolvedRecipe) -> None:
    """Log the columns that are read into a warehouse, so that `data convert` can order columns by use."""
    kind, _, path = resolved.recipe.data.dataset.partition(":")
    if kind == "parquet":
        log_use(path, sources(resolved.transforms, resolved.columns.names), time())


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltJob:
    """A training job, the plan of its tables and its feed."""

    job: TrainingJob
    plan: Plan
    feed: Feed


def _build_job(resolved: ResolvedRecipe, comm: Comm, purpose: Purpose = "train") -> _BuiltJob:
    """Build the job of this rank; a collective. On several ranks no rank ever allocates all tables."""
    _set_threads(resolved.recipe)
    placed = comm.topology.world > 1 or resolved.recipe.plan is not None
    if not placed:
        tables = resolved.stored_tables
        check_memory(resolved, tables, single_rank_plan(tables), comm, purpose)
    model = make_model(resolved, described=placed)
    plan = on_first_rank(comm, lambda: choose_plan(resolved.recipe, model, comm.topology))
    if placed:
        check_memory(resolved, tables_of(model), plan, comm, purpose)
    place_tables(resolved.recipe, model, plan, comm)
    feed = Feed(resolved, comm)
    job = make_job(resolved, model, feed, comm, plan.forecast, feed.aside)
    return _BuiltJob(job=replace(job, health=lambda: feed.health), plan=plan, feed=feed)


def _measured_fields(trainer: Trainer, run: Path) -> dict[str, Any]:
    """Fields of the result: peak memory, waiting for data, workers and quarantined rows."""
    health, bad = trainer.job.health(), find_bad_rows(run / BAD_ROWS)
    workers = None if health is None else health.workers
    about_rows = {"workers": workers, "bad_rows": bad.rows, "bad_reasons": bad.reasons}
    return {"peak_memory_bytes": peak_memory_bytes(), "data_wait": trainer.data_wait, **about_rows}


def _folder_of_first_rank(comm: Comm, find: Callable[[], RunFolder]) -> RunFolder:
    """The folder of the first rank; by its absolute path on ranks with another working directory."""
    own: list[RunFolder] = []

    def first() -> tuple[Path, Path]:
        own.append(find())
        return own[0].path, own[0].path.absolute()

    called, path = on_first_rank(comm, first)
    return own[0] if own else RunFolder(called if called.absolute() == path else path)


def evaluate(
    path: Path,
    *,
    which: str = "best",
    data: str | None = None,
    slices: tuple[str, ...] | None = None,
    warn: Warn = ignore_warning,
) -> Scores:
    """Measure a checkpoint of a run on its test rows, or on the rows of other files."""
    resolved, model = load_trained(path, which, warn)
    return make_evaluator(resolved, model, _choose_rows(path, resolved, data), slices)()


def predict_rows(  # noqa: PLR0913 - options of the command
    path: Path,
    out: Path,
    *,
    which: str = "best",
    data: str | None = None,
    keep: Sequence[str] = (),
    tell: Callable[[int, int], None] | None = None,
    warn: Warn = ignore_warning,
) -> int:
    """Predict for the test rows of a run, or for rows of other files, beside `keep` columns; returns their number."""
    resolved, model = load_trained(path, which, warn)
    return predict(resolved, model, _choose_rows(path, resolved, data), out, keep, tell)


def load_trained(path: Path, which: str = "best", warn: Warn = ignore_warning) -> tuple[ResolvedRecipe, nn.Module]:
    """The resolved recipe of a run, and its model with the weights of a checkpoint."""
    RunFolder.open(path)
    resolved = resolve_saved(path)
    for line in resolved.notes:
        warn(line)
    _set_threads(resolved.recipe)
    tables = resolved.stored_tables
    check_memory(resolved, tables, single_rank_plan(tables), solo(), "use")
    model = make_model(resolved)
    restore_model(CheckpointFolder(path / "ckpt").open(which), model)
    return resolved, model


def best_possible_metrics(resolved: ResolvedRecipe, rows: RowSelection) -> dict[str, Values]:
    """Metrics of the true logits that synthetic labels were drawn from: no model is better on average."""
    column = resolved.parts.dataset.ceiling
    if column is None:
        return {}
    task = resolved.tasks[0]
    metrics = Metrics((task,), window=1)
    for split in rows.reader.splits():
        table = rows.reader.read(split, (task, column))
        logits, labels = (torch.from_numpy(table[name].to_numpy().astype("float64")) for name in (column, task))
        metrics.update(logits, labels)
    return {task: values_of(metrics.value()[task])}


def _warm_start(resolved: ResolvedRecipe, model: nn.Module) -> WarmStartMatch | None:
    if resolved.recipe.init_from is None:
        return None
    source = Path(resolved.recipe.init_from)
    if (source / TRANSFORMS).is_file():
        now = {step.transform.makes: step.transform for step in resolved.transforms.steps}
        for before in decode_transforms(read_bytes(source / TRANSFORMS)):
            after = now.get(before.makes)
            if isinstance(before, MapId) and isinstance(after, MapId):
                check_grown(before.column, before.mapping, after.mapping, str(source))
    return warm_start(open_warm_start(source), model)


def resolve_saved(path: Path, changes: Sequence[str] = (), world: int = 1) -> ResolvedRecipe:
    source = path / RECIPE
    sections = parse(read_text(source), str(source))
    apply_changes(sections, changes)
    for change in changes:
        if change.startswith("init_from=") and CheckpointFolder(path / "ckpt").steps():
            want = "its checkpoint has the weights: want a new run with rowwise train --init-from"
            raise SpecError(f"--set {change} for a run that is resumed: {want}")
    recipe = relocate_maps(decode(sections, str(source)), path)
    check_ranks(recipe, world)
    if world != _ranks_before(path) and not any(change.startswith("train.threads=") for change in changes):
        # The thread count was for another number of ranks, which share the cores.
        recipe = structs.replace(recipe, train=structs.replace(recipe.train, threads=None))
    return resolve(recipe)


def _ranks_before(path: Path) -> int:
    try:
        return Plan.from_json(read_bytes(path / PLAN)).world
    except OSError:
        return 1


def _finished_at(path: Path) -> int | None:
    """The last step of a run that result.json calls finished; else None."""
    try:
        result = decode_json(read_bytes(path / "result.json"), RunResult)
    except (OSError, msgspec.DecodeError):
        return None
    return result.steps if result.status == "finished" else None


def _set_threads(recipe: Recipe) -> None:
    # torch splits sums in matrix products by thread: the same bits need the same number.
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)


def _warn_if_model_changed(recipe: Recipe, folder: RunFolder) -> None:
    """Warn if the user's model file has changed since the run began."""
    if isinstance(recipe.model, UserModel):
        path, _ = split_name(recipe.model.module)
        kept = folder.path / "code" / path.name
        if path.is_file() and kept.is_file() and read_bytes(path) != read_bytes(kept):
            folder.warn(f"{path} has changed since the run began; the old version is {kept}")


def _choose_rows(path: Path, resolved: ResolvedRecipe, data: str | None) -> RowSelection:
    """The rows of `data`, or without it the run's test rows."""
    rows = resolved.parts.test if data is None else RowSelection(open_reader(data))
    if rows is None:
        raise DataError(f"{path}: its recipe has no test rows: want --data parquet:PATH")
    return rows


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
