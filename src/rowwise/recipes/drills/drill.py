"""Fault drills: inject a fault into a small job, resume it, and compare its result with an undisturbed run, bitwise.

This module injects the faults; `small_job` starts, watches and compares the jobs.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.write import PART
from rowwise.recipes.drills.small_disk import small_disk
from rowwise.recipes.drills.small_job import (
    EVERY,
    KEPT,
    STEPS,
    CommandResult,
    DrillJob,
    checkpoint_steps,
    find_damage,
    find_difference,
    last_step,
    rank_processes,
    wait_for_end,
    wait_until,
)
from rowwise.tables.spec import Value

Tell = Callable[[str], None]
RUN = Path("drill/1")  # in a folder of runs
TRIES = 5  # to kill a rank during a save


class DrillCase(Value, frozen=True):
    """A fault, and the job's behaviour after it."""

    damage: str
    ended_s: float | None  # from the fault to the end of the job; None: the job had ended before
    error_line: str = msgspec.field(name="said")  # the job's last line on the console
    checkpoint: str  # to resume from
    verified: str  # result of `verify` for that checkpoint, or for the newest one
    resumed: str  # the first difference to the undisturbed run, or "ends equal"
    survived: bool


class DrillReport(Value, frozen=True):
    """All cases of one drill."""

    drill: str
    ranks: int
    cases: tuple[DrillCase, ...]

    @property
    def survived(self) -> bool:
        return all(case.survived for case in self.cases)


def run_drill(name: str, ranks: int, folder: Path, tell: Tell, recipe: str | None = None) -> DrillReport:
    """Run a drill in a new folder, on a recipe or on a job of its own; `tell` takes the current activity."""
    if ranks < 1 or (name == "kill-rank" and ranks < 2):
        raise SpecError(f"--nproc {ranks}", f"at least {(2 if name == 'kill-rank' else 1)}")
    job = DrillJob.make(folder, ranks, recipe)
    tell("an undisturbed run")
    undisturbed = job.train(folder / "whole")
    if not undisturbed.succeeded:
        raise SpecError(f"the drill's job fails here even without a fault: {undisturbed.error_line}")
    return DrillReport(drill=name, ranks=ranks, cases=tuple(DRILLS[name](job, tell)))


def kill_rank(job: DrillJob, tell: Tell) -> list[DrillCase]:
    """SIGKILL of the last rank in a step, and of the first and the last rank in a save."""
    last = job.ranks - 1
    cases = [
        _resume(job, tell, _kill_rank(job, tell, f"rank {last} in a step", last, "step"), job.folder / "step" / RUN)
    ]
    for rank in (0, last):
        for number in range(TRIES):
            name = f"save-{rank}-{number}"
            run = job.folder / name / RUN
            case = _kill_rank(job, tell, f"rank {rank} in a save", rank, name)
            if list((run / "ckpt").glob(f"*{PART}")):  # otherwise the save had ended before the kill
                cases.append(_resume(job, tell, case, run))
                break
        else:
            raise SpecError(f"{TRIES} saves were too fast to kill rank {rank} in one", hint="try again")
    return cases


def _kill_rank(job: DrillJob, tell: Tell, title: str, rank: int, name: str) -> DrillCase:
    run = job.folder / name / RUN
    tell(f"killing {title}")
    with job.training(job.folder / name) as process:
        wait_until(process, lambda: last_step(run) > 2 * EVERY, "its first checkpoints")
        if "save" in title:
            wait_until(process, lambda: any((run / "ckpt").glob(f"*{PART}")), "a save")
        begin_s = time.monotonic()
        os.kill(rank_processes(run)[rank], signal.SIGKILL)
        result = wait_for_end(process)
        ended_s = time.monotonic() - begin_s
    clear = f"rank {rank} was killed by SIGKILL" in result.error_line and result.code == 128 + signal.SIGKILL
    return _make_case(f"SIGKILL of {title}", result, ended_s, run, clear=clear)


def fill_disk(job: DrillJob, tell: Tell) -> list[DrillCase]:
    """A disk with room for one and a half checkpoints."""
    tell("filling a disk")
    newest = max((job.folder / "whole" / RUN / "ckpt").glob("step-*"))
    sizes = [path.stat().st_size for path in newest.iterdir()]
    with small_disk(job.folder / "disk", sum(sizes) * 3 // 2, max(sizes) // 2) as disk:
        job_on_disk = replace(job, enter=disk.enter)
        with job_on_disk.training(disk.folder, limit=disk.limit) as process:
            result = wait_for_end(process)
        clear = result.code == 2 and "was not saved" in result.error_line
        # With a limit on file sizes even the first checkpoint fails.
        no_steps_ok = disk.limit is not None
        title, run = f"disk full in a save: {disk.description}", disk.path_here / RUN
        case = _make_case(title, result, None, run, clear=clear, no_steps_ok=no_steps_ok)
        disk.grow()
        return [_resume(job_on_disk, tell, case, disk.folder / RUN, path_here=run)]


def corrupt_checkpoint(job: DrillJob, tell: Tell) -> list[DrillCase]:
    """A flipped byte, a truncated file or a missing manifest in the newest checkpoint."""
    tell("a run to damage")
    job.train(job.folder / "begun", "--set", f"train.steps={KEPT * EVERY}")
    faults = (("a flipped byte", _flip_byte), ("a file cut short", _truncate), ("no manifest", _remove_manifest))
    return [_corrupt_newest(job, tell, title, damage) for title, damage in faults]


def _corrupt_newest(job: DrillJob, tell: Tell, title: str, damage: Callable[[Path], None]) -> DrillCase:
    tell(f"{title} in the newest checkpoint")
    run, options = job.folder / title.replace(" ", "-") / RUN, ["--set", f"train.steps={STEPS}"]
    shutil.copytree(job.folder / "begun" / RUN, run)
    steps, newest = checkpoint_steps(run), max((run / "ckpt").glob("step-*"))
    damage(newest)
    if damage is _remove_manifest:  # an incomplete checkpoint: the previous one is the newest
        verified, error_line = "not listed any more", ""
        detected = checkpoint_steps(run) == steps[:-1] and not find_damage(run)
    else:
        verified, refusal = find_damage(run), job.resume(run, *options)
        error_line, detected = refusal.error_line, newest.name in verified and refusal.code == 2
        options += ["--from", f"step-{steps[-2]:09}"]
    names = {"damage": f"{title} in {newest.name}", "checkpoint": f"step-{steps[-2]}"}
    case = DrillCase(**names, ended_s=None, error_line=error_line, verified=verified, resumed="", survived=detected)
    return _resume(job, tell, case, run, *options)


def _flip_byte(checkpoint: Path) -> None:
    path = _largest_file(checkpoint)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 3 // 4)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _truncate(checkpoint: Path) -> None:
    path = _largest_file(checkpoint)
    os.truncate(path, path.stat().st_size // 2)


def _remove_manifest(checkpoint: Path) -> None:
    (checkpoint / NAME).unlink()


def _largest_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def _make_case(
    fault: str, result: CommandResult, ended_s: float | None, run: Path, *, clear: bool, no_steps_ok: bool = False
) -> DrillCase:
    """The case of an ended job; `clear`: its error names the fault; `no_steps_ok`: it may have no checkpoint yet."""
    steps = checkpoint_steps(run)
    damage = find_damage(run) if steps else ""
    return DrillCase(
        damage=fault,
        ended_s=ended_s,
        error_line=result.error_line,
        checkpoint=f"step-{steps[-1]}" if steps else "none yet",
        verified=damage or "whole",
        resumed="",
        survived=clear and not damage and (bool(steps) or no_steps_ok),
    )


def _resume(
    job: DrillJob, tell: Tell, case: DrillCase, run: Path, *options: str, path_here: Path | None = None
) -> DrillCase:
    """Resume the job and compare its end; `path_here`: the run's path for this process, if it differs."""
    tell(f"resuming after: {case.damage}")
    result = job.resume(run, *options)
    error = find_difference(path_here or run, job.folder / "whole" / RUN) if result.succeeded else result.error_line
    return structs.replace(case, resumed=error or "ends equal, bit by bit", survived=case.survived and not error)


DRILLS: dict[str, Callable[[DrillJob, Tell], Sequence[DrillCase]]] = {
    "kill-rank": kill_rank,
    "fill-disk": fill_disk,
    "corrupt-ckpt": corrupt_checkpoint,
}
