"""Starts, resumes and evaluates runs, and predicts with them: the commands as functions that print nothing.

A `TrainingRun` is a resolved recipe, its model, its trainer and its folder. All ranks call the same functions, and the
first rank writes the folder.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
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
from rowwise.errors import AgreedError, CheckpointError, DataError, RowwiseError, SpecError, StorageError
from rowwise.ingest.transform import MapId, sources, to_json
from rowwise.ingest.transform import decode as decode_transforms
from rowwise.ingest.vocabulary import check_grown
from rowwise.ingest.warehouse.popularity import log_use
from rowwise.plan import Plan
from rowwise.recipes.access import ACCESS, AccessFile
from rowwise.recipes.bad_rows import find_bad_rows
from rowwise.recipes.compose import (
    ResolvedRecipe,
    make_evaluator,
    make_job,
    make_model,
    make_settings,
    resolve,
    set_threads,
)
from rowwise.recipes.device_tables import room_of_gpus, take_gpu
from rowwise.recipes.disk_tables import has_disk_tables
from rowwise.recipes.feed import Feed
from rowwise.recipes.first_rank import on_first_rank, resolve_on_first_rank
from rowwise.recipes.hosts import ENVIRONMENT, NETWORK, NetworkOfRun, ordered_links
from rowwise.recipes.id_maps import copy_maps, relocate_maps
from rowwise.recipes.label_facts import look_at_labels
from rowwise.recipes.machine import Environment, NativeLibrary
from rowwise.recipes.mirror import RunMirror
from rowwise.recipes.model_configs import SequenceModel, UserModel, kind_of
from rowwise.recipes.outlook import open_warm_start
from rowwise.recipes.predict import Predictor, predict
from rowwise.recipes.recipe import Recipe, check_ranks
from rowwise.recipes.retrieval import share_graph, tower_facts
from rowwise.recipes.rows import RowSelection, open_reader
from rowwise.recipes.sharding import choose_plan, shard_tables, step_samples, tables_of
from rowwise.recipes.start_folder import StartFolder, open_on_all_ranks
from rowwise.recipes.table_memory import Purpose, check_memory, find_memory_notes, measure_memory
from rowwise.recipes.text import RECIPE, apply_changes, decode, parse, write
from rowwise.recipes.unused_keys import find_notes
from rowwise.recipes.user_model_name import split_name
from rowwise.recipes.wires import decide_wire
from rowwise.spec import Value
from rowwise.storage.folder import parse_folder
from rowwise.textfile import decode_json, read_bytes, read_text
from rowwise.train.dense_parallel import ShardedConstruction, shard_dense, shards_of
from rowwise.train.evaluate import Scores, Values, values_of
from rowwise.train.feeding import DataWait
from rowwise.train.metrics import Metrics
from rowwise.train.progress import BestEvaluation, Progress
from rowwise.train.recorder import peak_memory_bytes
from rowwise.train.run_folder import RunFolder, now
from rowwise.train.saved import CheckpointFolder
from rowwise.train.snapshot import WarmStartMatch, restore_model, warm_start
from rowwise.train.stages import PhaseTime
from rowwise.train.trainer import OnStep, Trainer, TrainingJob

PLAN, BAD_ROWS, DISK = "plan.json", "bad_rows", "disk"  # in the folder of a run
TRANSFORMS, TOWERS = "transforms.json", "towers.json"
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
    step: dict[str, PhaseTime] = msgspec.field(default_factory=dict)  # of rank 0, by phase; likewise
    workers: int | None = None  # number of workers at the end; None: rows were prepared by trainers
    bad_rows: int = 0  # quarantined
    bad_reasons: tuple[str, ...] = ()  # of the first quarantined rows
    best: BestEvaluation | None = None
    test: dict[str, dict[str, float | None]] = msgspec.field(default_factory=dict)
    ceiling: dict[str, dict[str, float | None]] = msgspec.field(default_factory=dict)  # best possible, where known
    expected: dict[str, float] = msgspec.field(default_factory=dict)
    spread: dict[str, float] = msgspec.field(default_factory=dict)
    published: dict[str, float] = msgspec.field(default_factory=dict)  # by others, on the same split


@final
class TrainingRun:
    """A run that is ready to train; `start` and `resume` make it on all of its ranks."""

    def __init__(
        self, resolved: ResolvedRecipe, folder: RunFolder, setup: "_JobSetup", tell: OnStep | None, comm: Comm
    ) -> None:
        self.begin_s = perf_counter()
        self._network: NetworkOfRun | None = None
        self.resolved, self.folder, self.model, self.plan = resolved, folder, setup.job.model, setup.plan
        self.comm, self._is_first, self._feed, self._notes = comm, comm.rank == 0, setup.feed, setup.notes
        self.match: WarmStartMatch | None = None  # weights that a warm start loaded
        self.label_notes: tuple[str, ...] = ()  # on the first rank: that rows have no label
        on_first_rank(comm, folder.hold)
        setup.feed.start(folder.path / BAD_ROWS)
        recipe = resolved.recipe
        self._access = AccessFile(tables_of(self.model), step_samples(recipe))
        self._mirror: RunMirror | None = None  # on the first rank
        self.mirror_problem: str | None = None  # what the mirror lacks at the end
        copying = lambda: None if self._mirror is None else self._mirror.copying  # noqa: E731
        job = replace(setup.job, after_save=self._write_access, copying=copying)
        self.trainer = Trainer(job, make_settings(recipe), folder, tell, comm, recipe.wire_types)

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        root: Path | RunFolder = Path("runs"),
        tell: OnStep | None = None,
        comm: Comm | None = None,
        network: NetworkOfRun | None = None,
    ) -> "TrainingRun":
        """A new run, in the next numbered folder of root/<recipe>, or in a RunFolder that is given.

        `network` has ordered the hosts of `comm`.
        """
        comm = comm or solo()
        resolved = _agree_on_recipe(recipe, comm, network)
        with StartFolder(root, recipe.name, comm) as folder:
            setup = _set_up_job(resolved, comm, folder.near, folder.make)
            with setup.feed.closed_by_errors():
                # Without tables on disk, errors of data and warm start are raised before the folder is made.
                setup.job.batches(None)
                match = _warm_start(resolved, setup.job.model)
                run = cls(resolved, folder.make(), setup, tell, comm)
                run.match, run._network = match, network
                if run._is_first:
                    run._write_start()
                on_first_rank(comm, run._open_mirror)
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
        network: NetworkOfRun | None = None,
    ) -> "TrainingRun":
        """A stopped or killed run, from its last checkpoint or, without one, from the start; on any number of ranks."""
        comm = comm or solo()
        folder = open_on_all_ranks(comm, lambda: RunFolder.open(path))
        topology = comm.topology
        resolved = resolve_on_first_rank(
            lambda: decide_wire(resolve_saved(path, changes, topology.world), topology), comm
        )
        setup = _set_up_job(resolved, comm, folder.path, lambda: folder, "resume")
        with setup.feed.closed_by_errors():
            run = cls(resolved, folder, setup, tell, comm)
            run._network = network
            try:
                on_first_rank(comm, run._open_mirror)
                run._restore(which)
                on_first_rank(
                    comm, lambda: (folder.path / "result.json").unlink(missing_ok=True)
                )  # of a former process
            except (RowwiseError, OSError):
                folder.release()
                raise
        if run._is_first:
            _warn_if_model_changed(resolved.recipe, folder)
            if changes:
                folder.write(RECIPE, write(resolved.recipe, defaults=True))
            run._write_environment()
        return run

    def _open_mirror(self) -> None:
        mirror = self.resolved.recipe.save.mirror
        self._mirror = None if mirror is None else RunMirror(mirror, self.folder)

    def _restore(self, which: str) -> None:
        """Load a checkpoint, and remove later checkpoints and log lines, as training repeats them."""
        checkpoints = CheckpointFolder(self.folder.checkpoints, self.comm)
        checkpoints.clean()
        if which == "last" and on_first_rank(self.comm, lambda: not checkpoints.steps()):
            if self._is_first:
                self.folder.drop_after(0)
            self.match = _warm_start(self.resolved, self.model)
            return
        try:
            checkpoint = checkpoints.open(which)
            self._raise_if_finished(self.trainer.read_progress(checkpoint))  # before lines of its test are cut off
            self.trainer.resume(checkpoint)
        except CheckpointError as error:
            older = checkpoints.steps()[:-1] if which == "last" else []
            if not older or "damaged" not in str(error):
                raise
            way_out = f"the one before it: rowwise resume {self.folder.path} --from step-{older[-1]:09}"
            raise CheckpointError(f"{error}: {way_out}") from None

    def _raise_if_finished(self, progress: Progress) -> None:
        """Raise for a finished run, unless it was killed before its test; first complete its mirror."""
        settings = self.trainer.settings
        if progress.finished and finished_step(self.folder.path) == progress.step:
            stopped_early = settings.evaluate.patience is not None and progress.worse >= settings.evaluate.patience
            change = "evaluate.patience=null" if stopped_early else f"train.epochs={settings.train.epochs + 1}"
            change = f"train.steps={2 * progress.step}" if progress.step == settings.train.steps else change
            want = f"want --set {change} to train longer, or rowwise eval {self.folder.path}"
            lacks = on_first_rank(self.comm, lambda: self._mirror and self._mirror.close())
            want += "" if lacks is None else f"; {lacks}"
            raise DataError(f"{self.folder.path} has finished at step {progress.step}: {want}")

    def go(self, *, test: bool = True) -> RunResult:
        """Train to the end, then test if it shall; writes result.json and the report, also after an error."""
        self._log_start()
        try:
            on_first_rank(self.comm, self._start_mirror)
            with closing(self._feed):
                progress = self.trainer.run()
            tested, ceiling = self._test() if progress.finished and test else ({}, {})
            peak_bytes = max(map(int, all_gather_uneven(self.comm, torch.tensor([peak_memory_bytes()]), "memory")))
        except (RowwiseError, OSError) as error:
            with suppress(OSError, RowwiseError):  # the disk itself may have failed
                self._finish(self._make_result("failed", message=str(error)))
            if self._mirror is not None:
                self._mirror.close()
            self.folder.release()
            raise
        except BaseException:
            if self._mirror is not None:
                self._mirror.stop()
            self.folder.release()  # a notebook goes on, and may keep this run in a traceback
            raise
        status = "finished" if progress.finished else "stopped"
        result = self._make_result(status, test=tested, ceiling=ceiling, peak_memory_bytes=peak_bytes)
        try:
            self._finish(result)
        finally:  # other ranks wait for it, so that no launcher ends the first one meanwhile
            self.mirror_problem = on_first_rank(self.comm, lambda: self._mirror and self._mirror.close())
            self.folder.release()
        if self.mirror_problem is not None and status == "finished":
            raise StorageError(self.mirror_problem) if self._is_first else AgreedError(self.mirror_problem)
        return result

    def _start_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.start()

    def _log_start(self) -> None:
        topology = self.comm.topology
        pids = [int(pid) for pid in all_gather_uneven(self.comm, torch.tensor([os.getpid()]), "processes")]
        if self._is_first:
            self.folder.log(f"{now()} training from step {self.trainer.progress.step} on")
            if topology.world > 1:
                hosts = f"{topology.hosts} hosts" if topology.hosts > 1 else "1 host"
                self.folder.log(f"{now()} {topology.world} ranks on {hosts}, processes {' '.join(map(str, pids))}")

    def _test(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Test metrics of the best checkpoint, or of the last one without validation, and the best possible metrics."""
        rows, progress = self.resolved.rows.test, self.trainer.progress
        if rows is None:
            if self._is_first:
                self.folder.warn("no test rows: want data.test or data.test_share")
            return {}, {}
        if progress.best is not None and progress.best.step != progress.step:
            restore_model(CheckpointFolder(self.folder.checkpoints).open("best"), self.model)
        scores = make_evaluator(self.resolved, self.model, rows, comm=self.comm, quarantine=self._feed.quarantine)()
        self.trainer.record_evaluation("test", scores)
        return dict(scores.tasks), best_possible_metrics(self.resolved, rows) if self._is_first else {}

    def _make_result(self, status: Literal["finished", "stopped", "failed"], **fields: Any) -> RunResult:
        progress, about = self.trainer.progress, self.resolved.recipe.about
        fields = _measured_fields(self.trainer, self.folder.path) | fields
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
            published=about.published,
            **fields,
        )

    def _finish(self, result: RunResult) -> None:
        if not self._is_first:
            return
        self.folder.log(
            f"{now()} {result.status} at step {result.steps}" + (f": {result.message}" if result.message else "")
        )
        try:
            self.folder.write_json("result.json", msgspec.to_builtins(result))
            self._write_towers(finished=result.status == "finished")
            self._write_access(ended=True)
            report.write(self.folder.path)
        finally:  # also where the disk is full
            files = [self.folder.path / name for name in (RECIPE, "result.json", "report.html")]
            self.trainer.trackers.end(result.status, [file for file in files if file.is_file()])

    def _write_towers(self, *, finished: bool) -> None:
        facts = tower_facts(self.model, chosen=finished)
        if facts is not None:
            self.folder.write_json(TOWERS, facts)

    def _write_access(self, *, ended: bool = False) -> None:
        self.folder.write(ACCESS, self._access.text(self.trainer.traffic, ended=ended))

    def _write_start(self) -> None:
        recipe = self.resolved.recipe
        self.folder.write(RECIPE, write(copy_maps(recipe, self.folder.path), defaults=True))
        if recipe.transforms:  # includes the source of user functions, so that serving needs only this file
            self.folder.write(TRANSFORMS, to_json(self.resolved.transforms).decode())
        self._write_environment()
        if self.resolved.wire_choice is not None:
            self.folder.log(f"wire {self.resolved.wire_choice.text()}")
        _log_columns(self.resolved)
        self._write_towers(finished=False)
        if isinstance(recipe.model, UserModel):
            path, _ = split_name(recipe.model.module)
            (self.folder.path / "code").mkdir()
            shutil.copyfile(path, self.folder.path / "code" / path.name)
        for line in self.match.lines() if self.match else ():
            self.folder.log(line)

    def _write_environment(self) -> None:
        """Write env.json, plan.json and warnings; a resumed run does so again, as it may have other ranks."""
        topology, wire = self.comm.topology, msgspec.to_builtins(self.resolved.recipe.wire_types)
        ranks = {"started": now(), "ranks": topology.world, "hosts": topology.hosts, "wire": wire}
        machine = {**asdict(Environment.read("passive")), **asdict(NativeLibrary.read())}
        network = self._network
        ordered = {} if network is None else {"network": msgspec.to_builtins(network.ordered)}
        self.folder.write_json(ENVIRONMENT, {**machine, **ranks, **ordered})
        if network is not None:
            self.folder.log(f"{now()} {network.ordered.in_words}")
            for line in network.ordered.notes:
                self.folder.warn(line)
            if network.probed is not None:
                self.folder.write(NETWORK, network.probed.to_json() + "\n")
        self.folder.write(PLAN, self.plan.to_json() + "\n")
        self.label_notes = _label_notes(self.resolved, self.resolved.rows.train)
        for line in (*find_notes(self.resolved, topology), *self.label_notes, *self._notes):
            self.folder.warn(line)


def _label_notes(resolved: ResolvedRecipe, rows: RowSelection) -> tuple[str, ...]:
    """That rows of files have no label, by the first of them."""
    if not resolved.columns.labels or resolved.rows.dataset.ceiling is not None:
        return ()
    note = look_at_labels(rows, resolved.columns, resolved.tables, resolved.transforms).note
    return () if note is None else (note,)


def _log_columns(resolved: ResolvedRecipe) -> None:
    """Log which columns of a warehouse the run reads, so that `data convert` can sort columns by use."""
    kind, _, path = resolved.recipe.data.dataset.partition(":")
    if kind == "parquet":
        log_use(path, sources(resolved.transforms, resolved.columns.names), time())


def _agree_on_recipe(recipe: Recipe, comm: Comm, network: NetworkOfRun | None) -> ResolvedRecipe:
    """The recipe as all ranks run it; a collective."""
    if not recipe.name:
        raise SpecError("the recipe has no name: want one, as it names the run's folder")
    check_ranks(recipe, comm.topology.world)
    topology = comm.topology
    links = lambda: None if network is None else ordered_links(network, topology.hosts)  # noqa: E731 - of the first rank
    return resolve_on_first_rank(lambda: decide_wire(resolve(recipe), topology, links()), comm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobSetup:
    """The training job of a rank, the plan of its tables and its feed."""

    job: TrainingJob
    plan: Plan
    feed: Feed
    notes: tuple[str, ...]  # on the memory of tables


def _set_up_job(
    resolved: ResolvedRecipe, comm: Comm, near: Path, folder: Callable[[], RunFolder], purpose: Purpose = "train"
) -> _JobSetup:
    """Build the job of this rank; a collective. On several ranks no rank ever allocates all tables.

    `folder` is called for that of the run, which is on the file system of `near`, if tables are on disk.
    """
    set_threads(resolved.recipe)
    recipe, topology = resolved.recipe, comm.topology
    take_gpu(recipe.train.device, comm)
    memory = measure_memory(resolved, comm, purpose, near if recipe.disk is None else Path(recipe.disk))
    is_sharded = topology.world > 1 or recipe.plan is not None or (memory.is_short and recipe.train.device == "cpu")
    # Memory is checked before tables are allocated: meta tables when they are sharded, others with the model.
    if not is_sharded:
        check_memory(memory, memory.tables, memory.plan, comm)
    parallel = recipe.train.dense_parallel
    construction = ShardedConstruction(comm, shards_of(parallel, topology))
    with construction:
        model = make_model(resolved, on_meta=is_sharded)
    room = room_of_gpus(recipe.train.device, recipe.memory_bytes, comm)
    plan = on_first_rank(comm, lambda: choose_plan(recipe, model, topology, memory, room))
    if is_sharded:
        check_memory(memory, tables_of(model), plan, comm)
    disk = None
    if has_disk_tables(plan):
        disk = folder().path / DISK if recipe.disk is None else Path(recipe.disk)
    shard_tables(recipe, model, plan, comm, disk)
    share_graph(model, comm)
    shard_dense(model, parallel, comm, construction)
    feed = Feed(resolved, comm)
    job = make_job(resolved, model, feed, comm, plan.forecast, feed.quarantine)
    notes = find_memory_notes(memory, recipe.memory_bytes if recipe.train.device == "cpu" else None, disk)
    return _JobSetup(job=replace(job, health=lambda: feed.health), plan=plan, feed=feed, notes=notes)


def _measured_fields(trainer: Trainer, run: Path) -> dict[str, Any]:
    """Fields of the result: peak memory, waiting for data, workers and quarantined rows."""
    health, bad = trainer.job.health(), find_bad_rows(run / BAD_ROWS)
    workers = None if health is None else health.workers
    rows = {"workers": workers, "bad_rows": bad.rows, "bad_reasons": bad.reasons}
    return {"peak_memory_bytes": peak_memory_bytes(), "data_wait": trainer.data_wait, "step": trainer.mean_step, **rows}


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
    rows = choose_rows(path, resolved, data)
    for line in _label_notes(resolved, rows):
        warn(line)
    return make_evaluator(resolved, model, rows, slices)()


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
    rows = choose_rows(path, resolved, data)
    return predict(_make_predictor(path, resolved, model, warn), rows, out, keep, tell)


def load_predictor(path: Path, which: str = "best", warn: Warn = ignore_warning) -> Predictor:
    """What predicts with a checkpoint of a run."""
    return _make_predictor(path, *load_trained(path, which, warn), warn)


def _make_predictor(path: Path, resolved: ResolvedRecipe, model: nn.Module, warn: Warn) -> Predictor:
    if isinstance(resolved.recipe.model, SequenceModel):
        got = f"model.kind={kind_of(resolved.recipe.model)} ranks all items for a list, and has no logit of a row"
        raise SpecError(f"{path}: {got}: want rowwise eval, or rowwise.NextItem in Python")
    predictor = Predictor.of_run(resolved, model)
    if predictor.blocks.kind != "padded":
        warn(predictor.blocks.describe())
    return predictor


def load_trained(path: Path, which: str = "best", warn: Warn = ignore_warning) -> tuple[ResolvedRecipe, nn.Module]:
    """The resolved recipe of a run, and its model with the weights of a checkpoint."""
    RunFolder.open(path)
    resolved = resolve_saved(path)
    for line in resolved.notes:
        warn(line)
    set_threads(resolved.recipe)
    recipe, comm = structs.replace(resolved.recipe, plan=None), solo()
    folder = path / DISK if recipe.disk is None else Path(recipe.disk)
    memory = measure_memory(resolved, comm, "use", folder)
    on_disk = memory.is_short and recipe.train.device == "cpu"
    if not on_disk:
        check_memory(memory, memory.tables, memory.plan, comm)
    model = make_model(resolved, on_meta=on_disk)
    if on_disk:
        shard_tables(recipe, model, choose_plan(recipe, model, comm.topology, memory), comm, folder)
    restore_model(CheckpointFolder(path / "ckpt").open(which), model)
    return resolved, model


def best_possible_metrics(resolved: ResolvedRecipe, rows: RowSelection) -> dict[str, Values]:
    """Metrics of the true logits that synthetic labels were drawn from: no model is better on average."""
    column = resolved.rows.dataset.ceiling
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
    source = parse_folder(resolved.recipe.init_from)
    if isinstance(source, Path) and (source / TRANSFORMS).is_file():
        # Rows of a vocabulary keep their weights only if the new one appends ids to it.
        transforms = {step.transform.makes: step.transform for step in resolved.transforms.steps}
        for old in decode_transforms(read_bytes(source / TRANSFORMS)):
            new = transforms.get(old.makes)
            if isinstance(old, MapId) and isinstance(new, MapId):
                check_grown(old.column, old.mapping, new.mapping, str(source))
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
        # Ranks share the cores, so another number of ranks needs another number of threads.
        recipe = structs.replace(recipe, train=structs.replace(recipe.train, threads=None))
    return resolve(recipe)


def _ranks_before(path: Path) -> int:
    try:
        return Plan.from_json(read_bytes(path / PLAN)).world
    except OSError:
        return 1


def finished_step(path: Path) -> int | None:
    """The last step of a run that result.json calls finished; None for other runs."""
    try:
        result = decode_json(read_bytes(path / "result.json"), RunResult)
    except (OSError, msgspec.DecodeError):
        return None
    return result.steps if result.status == "finished" else None


def _warn_if_model_changed(recipe: Recipe, folder: RunFolder) -> None:
    """Warn if the user's model file has changed since the run began."""
    if isinstance(recipe.model, UserModel):
        path, _ = split_name(recipe.model.module)
        copy = folder.path / "code" / path.name
        if path.is_file() and copy.is_file() and read_bytes(path) != read_bytes(copy):
            folder.warn(f"{path} has changed since the run began; the old version is {copy}")


def choose_rows(path: Path, resolved: ResolvedRecipe, data: str | None) -> RowSelection:
    """The rows of `data`, or without it the run's test rows."""
    rows = resolved.rows.test if data is None else RowSelection(open_reader(data, text=resolved.recipe.data.text))
    if rows is None:
        raise DataError(f"{path}: its recipe has no test rows: want --data parquet:PATH")
    return rows
