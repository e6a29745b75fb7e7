"""`tune`: runs the trials of a study, in this process or in several, and keeps the best.

A trial is a run of the recipe with other settings, without a test. Its objective is the recipe's metric on validation
rows, and it is pruned if it is worse than the median of earlier trials at the same evaluation. The test rows are read
once, for the best trial at the end.

The same command continues a killed study: trials that were running are restarted with their values, others are kept.
"""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import msgspec

from rowwise import report
from rowwise.base.errors import DataError, GradientError, RowwiseError, SpecError
from rowwise.base.records import StudyOutcome, TrialRecord
from rowwise.base.textfile import decode_json, open_regular, read_bytes, read_text
from rowwise.ingest.datasets.files import check_fixed
from rowwise.recipes.find import find
from rowwise.recipes.model_kinds import check_use
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import parse, read, write
from rowwise.recipes.trained import evaluate
from rowwise.recipes.tune.space import Space, changes_of, own_values, search_space, stored, suggest
from rowwise.tables.spec import Value
from rowwise.train.loss_settings import AmountLoss
from rowwise.train.trainer import RunDisplay

JOURNAL, BEST, TEST, STUDY = "journal.log", "best.yaml", "test.json", "study.json"
LOCK, COMMAND, WORKERS = "next.lock", "command.lock", "workers.lock"
STARTUP, WARM = 5, 1  # trials, and evaluations of a trial, without pruning
MAX_BYTES, MAX_JOURNAL_bytes = 1 << 20, 1 << 30
NAME = "trials"
IN_USE = "another command is using it; wait for it, or give another --out"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """The plan of a study, for each of its processes."""

    recipe: str  # name or path
    changes: tuple[str, ...]
    folder: Path
    trials: int
    until_s: float  # of time.monotonic

    def load(self, values: dict[str, Any] | None = None) -> Recipe:
        """The recipe, with the values of a trial."""
        recipe = read(find(self.recipe), [*self.changes, *(changes_of(values) if values else ())])
        return msgspec.structs.replace(recipe, tune={})

    def space(self) -> Space:
        path = find(self.recipe)
        return search_space(read(path, self.changes), parse(read_text(path, MAX_BYTES), str(path)))


def tune(  # noqa: PLR0913 - options of the command
    recipe: str,
    folder: Path,
    *,
    trials: int = 25,
    minutes: float | None = None,
    changes: Sequence[str] = (),
    processes: int = 1,
    tell: Callable[[TrialRecord, int], None] = lambda trial, done: None,
) -> StudyOutcome:
    """Search settings until `trials` have ended, or `minutes` have passed.

    Args:
        recipe: a recipe by name or path.
        folder: folder of the study; an existing study continues.
        trials: total trials of the study, with those of earlier calls.
        minutes: no trial begins later; None: no limit.
        changes: --set changes of the recipe.
        processes: number of concurrent trials.
        tell: called with each finished trial of this process, and the number of finished trials.
    """
    optuna = import_optuna()
    until_s = float("inf") if minutes is None else monotonic() + 60 * minutes
    plan = StudyPlan(recipe=recipe, changes=tuple(changes), folder=folder, trials=trials, until_s=until_s)
    base = plan.load()
    check_recipe(base)
    claim(plan)
    with locked(folder / COMMAND, IN_USE):
        with locked(folder / WORKERS):
            pass  # processes of a killed command have ended
        study = open_study(plan)
        _requeue_interrupted(study, optuna)
        if not study.trials:
            space = plan.space()
            study.enqueue_trial(stored(own_values(space, base), space))
        if processes == 1:
            run_trials(plan, tell)
        else:
            _run_processes(plan, processes)
        return finish(plan)


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SpecError("tuning needs Optuna", hint="pip install 'rowwise[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def check_recipe(recipe: Recipe) -> None:
    """Raise for recipes whose runs are not measured on validation rows."""
    if recipe.data.valid is None and not recipe.data.valid_share and recipe.data.dataset.partition(":")[1]:
        raise SpecError("tune needs validation rows", "data.valid or data.valid_share in the recipe")
    check_fixed((recipe.data.dataset, recipe.data.valid, recipe.data.test), "tune")
    if recipe.evaluate.metric == "ne":
        check_use(recipe.model, "ne")
    loss = recipe.train.objective
    if isinstance(loss, AmountLoss) and recipe.evaluate.metric == "ne":
        raise SpecError(
            f"train.objective.kind={loss.__struct_config__.tag} has no ne", "another evaluate.metric, such as rmse"
        )


T = TypeVar("T")


class _StudyOwner(Value, frozen=True):
    """The recipe and changes of a study."""

    recipe: str
    changes: tuple[str, ...]


class _TestResult(Value, frozen=True):
    """Test metrics of a trial."""

    trial: int
    test: dict[str, dict[str, float | None]]


def _read(path: Path, kind: type[T]) -> T:
    try:
        return decode_json(read_bytes(path), kind)
    except msgspec.DecodeError as error:
        raise SpecError(f"{path}: {error}", hint="remove it, or give another --out") from None


def claim(plan: StudyPlan) -> None:
    """Make the folder of the study; raises if it belongs to another study."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    path, owner = plan.folder / STUDY, _StudyOwner(recipe=plan.recipe, changes=tuple(plan.changes))
    if path.exists():
        saved = _read(path, _StudyOwner)
        if saved != owner:
            problem = f"{plan.folder} is the study of {saved.recipe} {' '.join(saved.changes)}".rstrip()
            raise SpecError(problem, "another --out")
    elif any(plan.folder.iterdir()):
        raise SpecError(f"{plan.folder} has other files", "a new folder for --out")
    path.write_bytes(msgspec.json.encode(owner))


def open_study(plan: StudyPlan, worker: int = 0) -> Any:
    optuna = import_optuna()
    recipe = plan.load()
    study = optuna.create_study(
        study_name=NAME,
        storage=_open_journal(plan.folder / JOURNAL),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=WARM),
        direction="minimize" if _is_minimized(recipe) else "maximize",
        load_if_exists=True,
    )
    # Another seed for each process and continuation: an equal seed would draw equal values.
    seed = (recipe.seed + 7919 * worker + 104_729 * len(study.get_trials(deepcopy=False))) % (1 << 32)
    study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    return study


def _open_journal(path: Path) -> Any:
    """Open the journal, which may be untrusted; raises if it is not one of Optuna's."""
    storages = import_optuna().storages
    if os.path.lexists(path):
        with open_regular(path, links=False) as file:
            if os.fstat(file.fileno()).st_size > MAX_JOURNAL_bytes:
                raise SpecError(f"{path}: more than {MAX_JOURNAL_bytes >> 20} MB", "another --out")
    try:
        return storages.JournalStorage(storages.journal.JournalFileBackend(str(path)))
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        fault = f"{type(error).__name__} {error}".strip()
        raise SpecError(f"{path}: not a journal of Optuna, or damaged ({fault})", "another --out") from None


def _is_minimized(recipe: Recipe) -> bool:
    return recipe.evaluate.is_better(0.0, 1.0)


def _requeue_interrupted(study: Any, optuna: Any) -> None:
    """Requeue trials whose process was killed, with their values."""
    states = optuna.trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        study.tell(trial.number, state=states.FAIL)
        study.enqueue_trial(trial.params, user_attrs={"again": trial.number})


def run_trials(plan: StudyPlan, tell: Callable[[TrialRecord, int], None], worker: int = 0) -> None:
    """Run trials of the study until it has all its trials, or the time is up."""
    study, space = open_study(plan, worker), plan.space()
    while monotonic() < plan.until_s:
        with locked(plan.folder / LOCK):
            if len(records(study)) + _running_trials(study) >= plan.trials:
                return
            trial = study.ask()
            values = suggest(trial, space)
        _run_trial(plan, study, trial, values)
        ended = records(study)
        record = next((r for r in ended if r.number == trial.number), None)
        if record is not None:
            tell(record, len(ended))


@contextlib.contextmanager
def locked(path: Path, refused: str | None = None, *, shared: bool = False) -> Iterator[None]:
    """An exclusive or a shared file lock; waits for it, or raises at once with the text `refused`."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (fcntl.LOCK_NB if refused else 0))
        except BlockingIOError:
            raise SpecError(f"{path.parent}: {refused}") from None
        yield


def _running_trials(study: Any) -> int:
    running = import_optuna().trial.TrialState.RUNNING
    return len(study.get_trials(deepcopy=False, states=(running,)))


def _run_trial(plan: StudyPlan, study: Any, trial: Any, values: dict[str, Any]) -> None:
    states = import_optuna().trial.TrialState
    folder = plan.folder / NAME / f"{trial.number:04}"
    shutil.rmtree(folder, ignore_errors=True)
    runs: list[TrainingRun] = []
    evaluated, evaluations, pruned = 0, 0, False

    def watch(display: RunDisplay) -> None:
        """Report each evaluation to the study, on the next step, and stop the run if it is pruned."""
        nonlocal evaluated, evaluations, pruned
        progress = display.progress
        if progress.best is None or progress.evaluated == evaluated or pruned:
            return
        evaluated, evaluations = progress.evaluated, evaluations + 1
        trial.report(progress.best.value, evaluations)
        pruned = trial.should_prune()
        if pruned:
            runs[0].trainer.stop()

    try:
        recipe = _without_mirror(plan.load(values), plan.folder.name)
        run = TrainingRun.start(recipe, folder, watch)
        runs.append(run)
        trial.set_user_attr("run", str(run.folder.path.relative_to(plan.folder)))
        run.go(test=False)
    except (GradientError, SpecError) as error:
        if not study.get_trials(deepcopy=False, states=(states.COMPLETE,)) and trial.number == 0:
            study.tell(trial, state=states.FAIL)
            raise
        trial.set_user_attr("why", str(error))
        trial.set_user_attr("ended", True)
        study.tell(trial, state=states.FAIL)
        return
    best = run.trainer.progress.best
    if best is None:
        study.tell(trial, state=states.FAIL)
        raise DataError(f"{run.folder.path} was not evaluated", "validation rows, and evaluate.every in its steps")
    trial.set_user_attr("best", best.value)
    trial.set_user_attr("ended", True)
    if pruned:
        study.tell(trial, state=states.PRUNED)
    else:
        study.tell(trial, best.value)
    _keep_best_checkpoints(plan, study)


def _without_mirror(recipe: Recipe, study: str) -> Recipe:
    """The recipe of a trial: without a mirror, and grouped by study in remote trackers."""
    recipe = msgspec.structs.replace(recipe, save=msgspec.structs.replace(recipe.save, mirror=None))
    log = recipe.log
    if log.group is not None or not log.is_remote:
        return recipe
    return msgspec.structs.replace(recipe, log=msgspec.structs.replace(log, group=study))


def _keep_best_checkpoints(plan: StudyPlan, study: Any) -> None:
    """Delete the checkpoints of all trials but the best."""
    ended = records(study)
    best = best_of(ended, smaller=study.direction.name == "MINIMIZE")
    for record in ended:
        if record.run and record.number != (best and best.number):
            shutil.rmtree(plan.folder / record.run / "ckpt", ignore_errors=True)


def records(study: Any) -> list[TrialRecord]:
    """The finished trials, without interrupted ones."""
    finished = []
    for trial in study.get_trials(deepcopy=False):
        if not trial.user_attrs.get("ended") or not trial.state.is_finished():
            continue
        seconds = trial.duration.total_seconds() if trial.duration else 0.0
        finished.append(
            TrialRecord(
                number=trial.number,
                state={"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower()),
                value=trial.user_attrs.get("best"),
                values=dict(trial.params),
                run=trial.user_attrs.get("run", ""),
                seconds=round(seconds, 3),
                why=trial.user_attrs.get("why", ""),
            )
        )
    return finished


def best_of(trials: Sequence[TrialRecord], *, smaller: bool) -> TrialRecord | None:
    complete = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
    return min(complete, key=lambda trial: trial.value if smaller else -trial.value, default=None)  # type: ignore[operator]


def _run_processes(plan: StudyPlan, processes: int) -> None:
    """Run trials in several processes; raises if one of them fails."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_run_worker, args=(plan, number)) for number in range(processes)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException:
        for worker in workers:
            worker.terminate()
            worker.join()
        raise
    if any(worker.exitcode for worker in workers):
        raise DataError(f"a process of the study failed: the same command continues {plan.folder}")


def _run_worker(plan: StudyPlan, number: int) -> None:
    parent = multiprocessing.parent_process()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if parent is None or not parent.is_alive():
        return
    with locked(plan.folder / WORKERS, shared=True), contextlib.suppress(KeyboardInterrupt):
        run_trials(plan, lambda trial, done: None, number)


def _end_with_parent() -> None:
    """Exit when the command has ended or was killed, as nobody would record the trial."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def finish(plan: StudyPlan) -> StudyOutcome:
    """Write the best recipe, test it unless that was done, and write the report."""
    study, recipe = open_study(plan), plan.load()
    ended = records(study)
    best = best_of(ended, smaller=_is_minimized(recipe))
    test: dict[str, dict[str, float | None]] = {}
    if best is not None:
        space = plan.space()
        values = {key: _decode_value(space, key, value) for key, value in best.values.items()}
        (plan.folder / BEST).write_text(write(plan.load(values)), "utf-8")
        test = _test(plan, best)
    outcome = StudyOutcome(
        recipe=plan.recipe,
        metric=recipe.evaluate.metric,
        smaller_is_better=_is_minimized(recipe),
        trials=tuple(ended),
        best=None if best is None else best.number,
        importance=_importance(study, ended),
        test=test,
    )
    report.write_study(plan.folder, outcome)
    return outcome


def _decode_value(space: Space, key: str, value: Any) -> Any:
    return msgspec.json.decode(value) if space[key].choices else value


def _test(plan: StudyPlan, best: TrialRecord) -> dict[str, dict[str, float | None]]:
    """Test metrics of the best trial, cached in the folder."""
    path = plan.folder / TEST
    if path.exists():
        measured = _read(path, _TestResult)
        if measured.trial == best.number:
            return measured.test
    try:
        test = dict(evaluate(plan.folder / best.run).tasks)
    except RowwiseError as error:
        if "no test rows" not in str(error):
            raise
        return {}
    path.write_bytes(msgspec.json.encode(_TestResult(trial=best.number, test=test)))  # type: ignore[arg-type]
    return test  # type: ignore[return-value]


def _importance(study: Any, ended: Sequence[TrialRecord]) -> dict[str, float]:
    """Importance of each setting for the metric, by PED-ANOVA; empty for too few trials."""
    optuna = import_optuna()
    if sum(trial.state == "complete" for trial in ended) < 4:
        return {}
    with contextlib.suppress(ValueError, RuntimeError, UserWarning), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the warning that all are equally important
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return {key: float(x) for key, x in optuna.importance.get_param_importances(study, evaluator=evaluator).items()}
    return {}
