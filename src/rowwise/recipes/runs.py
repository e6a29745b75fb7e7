"""The verbs of the command line as functions: start a run, resume it, evaluate it, predict with it.

A `TrainingRun` is a recipe that was resolved, its model, its trainer and its folder. What is printed is the caller's
business; everything that lasts is written here. On several ranks all call the same, and the first one writes.
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
from rowwise.comm.seam import Comm
from rowwise.comm.solo import solo
from rowwise.comm.status import all_gather_uneven
from rowwise.errors import CheckpointError, DataError, RowwiseError, SpecError
from rowwise.ingest.transform import sources, to_json
from rowwise.ingest.warehouse.popularity import log_use
from rowwise.plan import Plan
from rowwise.recipes.access import ACCESS, AccessFile
from rowwise.recipes.bad_rows import find_bad_rows
from rowwise.recipes.compose import ResolvedRecipe, make_evaluator, make_job, make_model, make_settings, resolve
from rowwise.recipes.feed import Feed
from rowwise.recipes.first_rank import on_first_rank, resolve_on_first_rank
from rowwise.recipes.id_maps import keep_maps, with_kept_maps
from rowwise.recipes.machine import Environment, NativeLibrary
from rowwise.recipes.outlook import open_start
from rowwise.recipes.place import choose_plan, place_model, step_samples, tables_of, whole_plan
from rowwise.recipes.predict import predict
from rowwise.recipes.recipe import Recipe, UserModel, check_ranks
from rowwise.recipes.rows import RowSelection, open_named
from rowwise.recipes.table_memory import Purpose, check_memory
from rowwise.recipes.text import RECIPE, apply_changes, decode, parse, write
from rowwise.recipes.unused_keys import notes
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
from rowwise.train.trainer import Tell, Trainer, TrainingJob

PLAN, BAD_ROWS = "plan.json", "bad_rows"  # in the folder of a run
TRANSFORMS = "transforms.json"
Warn = Callable[[str], None]  # of what is done otherwise than the recipe says


def ignore_line(line: str) -> None:
    """The callback of a caller that shows no progress."""


class RunResult(Value, frozen=True):
    """The result of a run, as result.json holds it."""

    status: Literal["finished", "stopped", "failed"]
    recipe: str
    run: str
    message: str | None = None
    steps: int = 0
    samples: int = 0
    epochs: int = 0
    wall_s: float = 0.0  # of the process that ended the run
    samples_s: float = 0.0  # while training, over all of the run
    peak_memory_bytes: int = 0
    data_wait: DataWait = DataWait()  # for rows, of the process that ended the run
    workers: int | None = None  # that prepared rows at the end; None: there were none
    bad_rows: int = 0  # that were put aside
    bad_reasons: tuple[str, ...] = ()  # why the first ones were
    best: BestEvaluation | None = None
    test: dict[str, dict[str, float | None]] = msgspec.field(default_factory=dict)
    ceiling: dict[str, dict[str, float | None]] = msgspec.field(
        default_factory=dict
    )  # the best that any model can do, where that is known
    expected: dict[str, float] = msgspec.field(default_factory=dict)
    spread: dict[str, float] = msgspec.field(default_factory=dict)


@final
class TrainingRun:
    """A run that can go on; made by `start` or `resume`, on all of its ranks."""

    def __init__(
        self, resolved: ResolvedRecipe, folder: RunFolder, made: "_BuiltJob", tell: Tell | None, comm: Comm
    ) -> None:
        """Hold the folder, and be ready to go."""
        self.begin_s = perf_counter()
        self.resolved, self.folder, self.model, self.plan = resolved, folder, made.job.model, made.plan
        self.comm, self._first, self._feed = comm, comm.rank == 0, made.feed
        self.match: WarmStartMatch | None = None  # what a warm start took over
        on_first_rank(comm, folder.hold)
        made.feed.start(folder.path / BAD_ROWS)
        recipe = resolved.recipe
        self._access = AccessFile(tables_of(self.model), step_samples(recipe))
        job = replace(made.job, saved=self._write_access)
        self.trainer = Trainer(job, make_settings(recipe), folder, tell, comm, recipe.wire)

    @classmethod
    def start(
        cls, recipe: Recipe, root: Path = Path("runs"), tell: Tell | None = None, comm: Comm | None = None
    ) -> "TrainingRun":
        """A new run, under the next number in root/<recipe>."""
        comm = comm or solo()
        if not recipe.name:
            raise SpecError("the recipe has no name: want one, as the run's folder is called by it")
        check_ranks(recipe, comm.topology.world)
        resolved = resolve_on_first_rank(lambda: resolve(recipe), comm)
        made = _make(resolved, comm)
        with made.feed.closed_by_errors():
            # What can be refused is refused before there is a folder.
            made.job.batches(None)
            match = _warm(resolved, made.job.model)
            folder = _as_first(comm, lambda: RunFolder.create(root, recipe.name))
            try:
                run = cls(resolved, folder, made, tell, comm)
                run.match = match
                if run._first:
                    run._write_beginning()
            except (RowwiseError, OSError):
                if comm.rank == 0:
                    folder.release()
                    shutil.rmtree(folder.path, ignore_errors=True)  # what has not begun leaves nothing
                raise
            return run

    @classmethod
    def resume(
        cls,
        path: Path,
        changes: Sequence[str] = (),
        *,
        which: str = "last",
        tell: Tell | None = None,
        comm: Comm | None = None,
    ) -> "TrainingRun":
        """A run that was stopped or killed, from its last checkpoint; or from the start, if there is none.

        On as many ranks as there are now, however many there were.
        """
        comm = comm or solo()
        folder = _as_first(comm, lambda: RunFolder.open(path))
        resolved = resolve_on_first_rank(lambda: _resolve_saved(path, changes, comm.topology.world), comm)
        made = _make(resolved, comm, "resume")
        with made.feed.closed_by_errors():
            run = cls(resolved, folder, made, tell, comm)
            try:
                run._go_back(which)
            except (RowwiseError, OSError):
                folder.release()
                raise
        if run._first:
            _compare_own(resolved.recipe, folder)
            if changes:
                folder.write(RECIPE, write(resolved.recipe, defaults=True))
            run._write_place()
        return run

    def _go_back(self, which: str) -> None:
        """To where a checkpoint was; what was saved after it is not what comes after it now, and goes."""
        saved = CheckpointFolder(self.folder.checkpoints, self.comm)
        saved.clean()
        if which == "last" and on_first_rank(self.comm, lambda: not saved.steps()):
            if self._first:
                self.folder.cut(0)
            self.match = _warm(self.resolved, self.model)
            return
        try:
            self.trainer.resume(saved.open(which))
        except CheckpointError as error:
            older = saved.steps()[:-1] if which == "last" else []
            if not older or "damaged" not in str(error):
                raise
            out = f"rowwise resume {self.folder.path} --from step-{older[-1]:09} goes on from the one before it"
            raise CheckpointError(f"{error}: {out}") from None
        self._refuse_if_done()

    def _refuse_if_done(self) -> None:
        """Nothing is left to do for a run that has ended, unless it was killed before its test."""
        progress, settings = self.trainer.progress, self.trainer.settings
        if progress.finished and _finished_at(self.folder.path) == progress.step:
            stopped = settings.evaluate.patience is not None and progress.worse >= settings.evaluate.patience
            more = "evaluate.patience=null" if stopped else f"train.epochs={settings.train.epochs + 1}"
            more = f"train.steps={2 * progress.step}" if progress.step == settings.train.steps else more
            out = f"train on with --set {more}, or measure it: rowwise eval {self.folder.path}"
            raise DataError(f"{self.folder.path} has finished at step {progress.step}: {out}")

    def go(self) -> RunResult:
        """Train to the end, then test; whatever happens, the folder says so."""
        self._log_beginning()
        try:
            with closing(self._feed):
                progress = self.trainer.run()
            test, ceiling = self._test() if progress.finished else ({}, {})
            peak_bytes = max(map(int, all_gather_uneven(self.comm, torch.tensor([peak_memory_bytes()]), "memory")))
        except (RowwiseError, OSError) as error:
            with suppress(OSError, RowwiseError):  # the disk may be what failed
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
        """Of the best checkpoint, if there was something to choose it by; else of the last."""
        rows, progress = self.resolved.parts.test, self.trainer.progress
        if rows is None:
            if self._first:
                self.folder.warn("there are no test rows: give data.test or data.test_share")
            return {}, {}
        if progress.best is not None and progress.best.step != progress.step:
            restore_model(CheckpointFolder(self.folder.checkpoints).open("best"), self.model)
        scores = make_evaluator(self.resolved, self.model, rows, comm=self.comm, aside=self._feed.aside)()
        self.trainer.note("test", scores)
        return dict(scores.tasks), best_possible_metrics(self.resolved, rows) if self._first else {}

    def _result(self, status: Literal["finished", "stopped", "failed"], **more: Any) -> RunResult:
        progress, about = self.trainer.progress, self.resolved.recipe.about
        more = _measured(self.trainer, self.folder.path) | more
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
        self.folder.write(RECIPE, write(keep_maps(recipe, self.folder.path), defaults=True))
        if recipe.transforms:  # with the sources of own functions: what serves the model needs nothing else
            self.folder.write(TRANSFORMS, to_json(self.resolved.transforms).decode())
        self._write_place()
        _note_use(self.resolved)
        if isinstance(recipe.model, UserModel):
            path, _ = split_name(recipe.model.module)
            (self.folder.path / "code").mkdir()
            shutil.copyfile(path, self.folder.path / "code" / path.name)
        for line in self.match.lines() if self.match else ():
            self.folder.log(line)

    def _write_place(self) -> None:
        """Where it runs, and which rank has which rows: a run may go on elsewhere."""
        topology, wire = self.comm.topology, msgspec.to_builtins(self.resolved.recipe.wire)
        where = {"started": _now(), "ranks": topology.world, "hosts": topology.hosts, "wire": wire}
        self.folder.write_json(
            "env.json", {**asdict(Environment.read("passive")), **asdict(NativeLibrary.read()), **where}
        )
        self.folder.write(PLAN, self.plan.to_json() + "\n")
        for line in notes(self.resolved, topology):
            self.folder.warn(line)


def _note_use(resolved: ResolvedRecipe) -> None:
    """Leave a note in a warehouse of the columns that are read, so that it can be written for its readers."""
    kind, _, path = resolved.recipe.data.dataset.partition(":")
    if kind == "parquet":
        log_use(path, sources(resolved.transforms, resolved.columns.names), time())


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltJob:
    """The job of a run, its plan and its feed."""

    job: TrainingJob
    plan: Plan
    feed: Feed


def _make(resolved: ResolvedRecipe, comm: Comm, purpose: Purpose = "train") -> _BuiltJob:
    """On all ranks; with several, no rank ever has all tables."""
    _use_threads(resolved.recipe)
    placed = comm.topology.world > 1 or resolved.recipe.plan is not None
    if not placed:
        tables = resolved.stored_tables
        check_memory(resolved, tables, whole_plan(tables), comm, purpose)
    model = make_model(resolved, described=placed)
    plan = on_first_rank(comm, lambda: choose_plan(resolved.recipe, model, comm.topology))
    if placed:
        check_memory(resolved, tables_of(model), plan, comm, purpose)
    place_model(resolved.recipe, model, plan, comm)
    feed = Feed(resolved, comm)
    job = make_job(resolved, model, feed, comm, plan.forecast, feed.aside)
    return _BuiltJob(job=replace(job, health=lambda: feed.health), plan=plan, feed=feed)


def _measured(trainer: Trainer, run: Path) -> dict[str, Any]:
    """Memory, whether rows came in time, and those that did not come at all."""
    health, bad = trainer.job.health(), find_bad_rows(run / BAD_ROWS)
    workers = None if health is None else health.workers
    about_rows = {"workers": workers, "bad_rows": bad.rows, "bad_reasons": bad.reasons}
    return {"peak_memory_bytes": peak_memory_bytes(), "data_wait": trainer.wait, **about_rows}


def _as_first(comm: Comm, find: Callable[[], RunFolder]) -> RunFolder:
    """The folder that the first rank has found; by its absolute path, where it is not called the same."""
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
    warn: Warn = ignore_line,
) -> Scores:
    """Measure a checkpoint of a run on its test rows, or on the rows of other files."""
    resolved, model = load_trained(path, which, warn)
    return make_evaluator(resolved, model, _asked_rows(path, resolved, data), slices)()


def predict_rows(
    path: Path,
    out: Path,
    *,
    which: str = "best",
    data: str | None = None,
    tell: Callable[[int, int], None] | None = None,
    warn: Warn = ignore_line,
) -> int:
    """Predict for the test rows of a run, or for the rows of other files; returns how many there were."""
    resolved, model = load_trained(path, which, warn)
    return predict(resolved, model, _asked_rows(path, resolved, data), out, tell)


def load_trained(path: Path, which: str = "best", warn: Warn = ignore_line) -> tuple[ResolvedRecipe, nn.Module]:
    """The model of a run, as a checkpoint has it."""
    RunFolder.open(path)
    resolved = _resolve_saved(path)
    for line in resolved.notes:
        warn(line)
    _use_threads(resolved.recipe)
    tables = resolved.stored_tables
    check_memory(resolved, tables, whole_plan(tables), solo(), "use")
    model = make_model(resolved)
    restore_model(CheckpointFolder(path / "ckpt").open(which), model)
    return resolved, model


def best_possible_metrics(resolved: ResolvedRecipe, rows: RowSelection) -> dict[str, Values]:
    """What nobody can beat on average: the metrics of the logits that made-up labels were drawn from."""
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


def _warm(resolved: ResolvedRecipe, model: nn.Module) -> WarmStartMatch | None:
    """Start from another run or checkpoint, if the recipe says so."""
    if resolved.recipe.init_from is None:
        return None
    return warm_start(open_start(Path(resolved.recipe.init_from)), model)


def _resolve_saved(path: Path, changes: Sequence[str] = (), world: int = 1) -> ResolvedRecipe:
    source = path / RECIPE
    sections = parse(read_text(source), str(source))
    apply_changes(sections, changes)
    for change in changes:
        if change.startswith("init_from=") and CheckpointFolder(path / "ckpt").steps():
            out = "the weights are those of its checkpoint: begin a new run with rowwise train --init-from"
            raise SpecError(f"--set {change} of a run that goes on: {out}")
    recipe = with_kept_maps(decode(sections, str(source)), path)
    check_ranks(recipe, world)
    if world != _ranks_before(path) and not any(change.startswith("train.threads=") for change in changes):
        # Those of another number of ranks: cores are shared by as many as there are now.
        recipe = structs.replace(recipe, train=structs.replace(recipe.train, threads=None))
    return resolve(recipe)


def _ranks_before(path: Path) -> int:
    try:
        return Plan.from_json(read_bytes(path / PLAN)).world
    except OSError:
        return 1


def _finished_at(path: Path) -> int | None:
    """The step at which a run's result says that it was done, if it says so."""
    try:
        result = decode_json(read_bytes(path / "result.json"), RunResult)
    except (OSError, msgspec.DecodeError):
        return None
    return result.steps if result.status == "finished" else None


def _use_threads(recipe: Recipe) -> None:
    # Sums inside torch's products are split by thread: the same bits want the same number.
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)


def _compare_own(recipe: Recipe, folder: RunFolder) -> None:
    """Say so if the user's module is not what the run began with."""
    if isinstance(recipe.model, UserModel):
        path, _ = split_name(recipe.model.module)
        kept = folder.path / "code" / path.name
        if path.is_file() and kept.is_file() and read_bytes(path) != read_bytes(kept):
            folder.warn(f"{path} has changed since the run began; what it was is in {kept}")


def _asked_rows(path: Path, resolved: ResolvedRecipe, data: str | None) -> RowSelection:
    """Those of other files, if some are named, else the run's test rows."""
    rows = resolved.parts.test if data is None else RowSelection(open_named(data))
    if rows is None:
        raise DataError(f"{path}: its recipe has no test rows: give some with --data parquet:PATH")
    return rows


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
