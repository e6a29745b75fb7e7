"""Runs while they train: a `TrainingRun` is a resolved recipe, its model, its trainer and its folder. Prints nothing.

All ranks call the same functions, and the first rank writes the folder.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, final

import msgspec

from rowwise import report
from rowwise.base.errors import AgreedError, CheckpointError, DamageError, DataError, RowwiseError, StorageError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import on_first_rank
from rowwise.recipes.access import ACCESS, AccessFile
from rowwise.recipes.compose import make_evaluator, make_settings
from rowwise.recipes.hosts import NetworkOfRun
from rowwise.recipes.mirror import RunMirror
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.run_files import (
    label_notes,
    log_start,
    write_environment,
    write_resumed,
    write_start,
    write_towers,
)
from rowwise.recipes.run_result import BAD_ROWS, RESULT, RunResult, finished_step, measured_fields, peak_of_ranks
from rowwise.recipes.run_setup import JobSetup, agree_on_recipe, agree_on_saved, set_up_job, start_warm
from rowwise.recipes.sharding import step_samples, tables_of
from rowwise.recipes.start_folder import StartFolder, open_on_all_ranks
from rowwise.recipes.text import RECIPE
from rowwise.recipes.trained import best_possible_metrics
from rowwise.train.progress import Progress
from rowwise.train.run_folder import RunFolder, now
from rowwise.train.saved import CheckpointFolder
from rowwise.train.snapshot import WarmStartMatch, restore_model
from rowwise.train.trainer import OnStep, Trainer


@final
class TrainingRun:
    """A run that is ready to train; `start` and `resume` make it on all of its ranks."""

    def __init__(
        self, resolved: ResolvedRecipe, folder: RunFolder, setup: JobSetup, tell: OnStep | None, comm: Comm
    ) -> None:
        self.begin_s = perf_counter()
        self._network: NetworkOfRun | None = None
        self.resolved, self.folder, self.model, self.plan = resolved, folder, setup.job.model, setup.plan
        self.comm, self._is_first, self._feed, self._notes = comm, comm.rank == 0, setup.feed, setup.notes
        self.match: WarmStartMatch | None = None  # weights that a warm start loaded
        self.label_notes: tuple[str, ...] = ()  # warnings about rows without labels; first rank only
        on_first_rank(comm, folder.hold)
        setup.feed.start(folder.path / BAD_ROWS)
        recipe = resolved.recipe
        self._access = AccessFile(tables_of(self.model), step_samples(recipe))
        self._mirror: RunMirror | None = None  # on the first rank
        self.mirror_problem: str | None = None  # why the mirror is incomplete at the end
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
        """A new run, in the next numbered folder of root/<recipe>, or in `root` if that is a RunFolder.

        `network`: the host order of `comm`.
        """
        comm = comm or solo()
        resolved = agree_on_recipe(recipe, comm, network)
        with StartFolder(root, recipe.name, comm) as folder:
            setup = set_up_job(resolved, comm, folder.near, folder.make)
            with setup.feed.closed_by_errors():
                # Without tables on disk, errors of data and warm start are raised before the folder is made.
                setup.job.batches(None)
                match = start_warm(resolved, setup.job.model)
                run = cls(resolved, folder.make(), setup, tell, comm)
                run.match, run._network = match, network
                if run._is_first:
                    write_start(folder.make(), resolved, run.model, match)
                    run._write_environment()
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
        resolved = agree_on_saved(path, changes, comm)
        setup = set_up_job(resolved, comm, folder.path, lambda: folder, "resume")
        with setup.feed.closed_by_errors():
            run = cls(resolved, folder, setup, tell, comm)
            run._network = network
            try:
                on_first_rank(comm, run._open_mirror)
                run._restore(which)
                on_first_rank(comm, lambda: (folder.path / RESULT).unlink(missing_ok=True))  # of an earlier process
            except (RowwiseError, OSError):
                folder.release()
                raise
        if run._is_first:
            write_resumed(folder, resolved.recipe, changed=bool(changes))
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
            self.match = start_warm(self.resolved, self.model)
            return
        try:
            checkpoint = checkpoints.open(which)
            self._raise_if_finished(self.trainer.read_progress(checkpoint))  # before its test log is cut off
            self.trainer.resume(checkpoint)
        except DamageError as error:
            older = checkpoints.steps()[:-1] if which == "last" else []
            if not older:
                raise
            retry = f"resume from the previous checkpoint: rowwise resume {self.folder.path} --from step-{older[-1]:09}"
            raise CheckpointError(error, hint=retry) from None

    def _raise_if_finished(self, progress: Progress) -> None:
        """Complete the mirror of a finished run, then raise; a run that was killed before its test goes on."""
        settings = self.trainer.settings
        if progress.finished and finished_step(self.folder.path) == progress.step:
            stopped_early = settings.evaluate.patience is not None and progress.worse >= settings.evaluate.patience
            change = "evaluate.patience=null" if stopped_early else f"train.epochs={settings.train.epochs + 1}"
            change = f"train.steps={2 * progress.step}" if progress.step == settings.train.steps else change
            ways = f"--set {change} trains longer, rowwise eval {self.folder.path} measures it"
            mirror_problem = on_first_rank(self.comm, lambda: self._mirror and self._mirror.close())
            raise DataError(
                f"{self.folder.path} has finished at step {progress.step}",
                hint="; ".join(filter(None, (ways, mirror_problem))),
            )

    def go(self, *, test: bool = True) -> RunResult:
        """Train, then test the best checkpoint; writes result.json and the report, even on failure."""
        log_start(self.folder, self.comm, self.trainer.progress.step)
        try:
            on_first_rank(self.comm, self._start_mirror)
            with closing(self._feed):
                progress = self.trainer.run()
            metrics, ceiling = self._test() if progress.finished and test else ({}, {})
            peak_bytes = peak_of_ranks(self.comm)
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
            self.folder.release()  # a notebook lives on, and a traceback may hold this run
            raise
        status = "finished" if progress.finished else "stopped"
        result = self._make_result(status, test=metrics, ceiling=ceiling, peak_memory_bytes=peak_bytes)
        try:
            if self.resolved.recipe.save.mirror is not None:
                on_first_rank(self.comm, lambda: self._mirror and self._mirror.stop())
                self.trainer.prune()
            self._finish(result)
        finally:  # all ranks wait: a launcher may kill the first rank once another exits
            self.mirror_problem = on_first_rank(self.comm, lambda: self._mirror and self._mirror.close())
            self.folder.release()
        if self.mirror_problem is not None and status == "finished":
            raise StorageError(self.mirror_problem) if self._is_first else AgreedError(self.mirror_problem)
        return result

    def _start_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.start()

    def _test(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Test metrics of the best checkpoint, or of the last one without validation, and the best possible metrics."""
        rows, progress = self.resolved.rows.test, self.trainer.progress
        if rows is None:
            if self._is_first:
                self.folder.warn("no test rows: expected data.test or data.test_share")
            return {}, {}
        if progress.best is not None and progress.best.step != progress.step:
            restore_model(CheckpointFolder(self.folder.checkpoints).open("best"), self.model)
        scores = make_evaluator(self.resolved, self.model, rows, comm=self.comm, quarantine=self._feed.quarantine)()
        self.trainer.record_evaluation("test", scores)
        return dict(scores.tasks), best_possible_metrics(self.resolved, rows) if self._is_first else {}

    def _make_result(self, status: Literal["finished", "stopped", "failed"], **fields: Any) -> RunResult:
        progress, about = self.trainer.progress, self.resolved.recipe.about
        fields = measured_fields(self.trainer, self.folder.path) | fields
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
            self.folder.write_json(RESULT, msgspec.to_builtins(result))
            write_towers(self.folder, self.resolved.recipe, self.model, finished=result.status == "finished")
            self._write_access(ended=True)
            report.write(self.folder.path)
        finally:  # even if the disk is full
            files = [self.folder.path / name for name in (RECIPE, RESULT, "report.html")]
            self.trainer.trackers.end(result.status, [file for file in files if file.is_file()])

    def _write_access(self, *, ended: bool = False) -> None:
        self.folder.write(ACCESS, self._access.text(self.trainer.traffic, ended=ended))

    def _write_environment(self) -> None:
        self.label_notes = label_notes(self.resolved, self.resolved.rows.train)
        notes = (*self.label_notes, *self._notes)
        write_environment(self.folder, self.resolved, self.comm, self.plan, self._network, notes)
