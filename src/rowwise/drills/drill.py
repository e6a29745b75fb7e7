"""Fault drills: inject a fault into a small job, resume it, and compare its result with an undisturbed run bit by bit.

`small_job` starts, watches and compares jobs; here are the faults.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.write import PART
from rowwise.drills.small_disk import small_disk
from rowwise.drills.small_job import (
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
from rowwise.errors import SpecError
from rowwise.spec import Value

Tell = Callable[[str], None]
RUN = Path("drill/1")  # in a folder of runs
TRIES = 5  # to kill a rank during a save


class DrillCase(Value, frozen=True):
    """A fault, and the job's behaviour after it."""

    damage: str
    ended_s: float | None  # from the fault to the end of the job; None: it had ended before
    said: str  # the job's last line on the console
    checkpoint: str  # to resume from
    verified: str  # damage found in it or in the newest one
    resumed: str
    survived: bool


class DrillReport(Value, frozen=True):
    """All cases of a drill."""

    drill: str
    ranks: int
    cases: tuple[DrillCase, ...]

    @property
    def survived(self) -> bool:
        return all(case.survived for case in self.cases)


def run_drill(name: str, ranks: int, folder: Path, tell: Tell) -> DrillReport:
    """Run a drill in its own folder; `tell` takes the current activity."""
    if ranks < 1 or (name == "kill-rank" and ranks < 2):
        raise SpecError(f"--nproc {ranks}: want at least {2 if name == 'kill-rank' else 1}")
    job = DrillJob.make(folder, ranks)
    tell("an undisturbed run")
    whole = job.train(folder / "whole")
    if not whole.well:
        raise SpecError(f"the drill's job fails here even without a fault: {whole.said}")
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
            found = _kill_rank(job, tell, f"rank {rank} in a save", rank, name)
            if list((run / "ckpt").glob(f"*{PART}")):  # else the save was complete before the kill
                cases.append(_resume(job, tell, found, run))
                break
        else:
            raise SpecError(f"{TRIES} saves were too fast to kill rank {rank} in one: want another try")
    return cases


def _kill_rank(job: DrillJob, tell: Tell, whom: str, rank: int, name: str) -> DrillCase:
    run = job.folder / name / RUN
    tell(f"killing {whom}")
    with job.training(job.folder / name) as process:
        wait_until(process, lambda: last_step(run) > 2 * EVERY, "its first checkpoints")
        if "save" in whom:
            wait_until(process, lambda: any((run / "ckpt").glob(f"*{PART}")), "a save")
        begin_s = time.monotonic()
        os.kill(rank_processes(run)[rank], signal.SIGKILL)
        ended = wait_for_end(process)
        ended_s = time.monotonic() - begin_s
    clear = f"rank {rank} was killed by SIGKILL" in ended.said and ended.code == 128 + signal.SIGKILL
    return _make_case(f"SIGKILL of {whom}", ended, ended_s, run, clear=clear)


def fill_disk(job: DrillJob, tell: Tell) -> list[DrillCase]:
    """A disk with room for one and a half checkpoints."""
    tell("filling a disk")
    newest = max((job.folder / "whole" / RUN / "ckpt").glob("step-*"))
    sizes = [path.stat().st_size for path in newest.iterdir()]
    with small_disk(job.folder / "disk", sum(sizes) * 3 // 2, max(sizes) // 2) as disk:
        inside = replace(job, enter=disk.enter)
        with inside.training(disk.folder, limit=disk.limit) as process:
            ended = wait_for_end(process)
        # With a limit on file sizes already the first checkpoint fails.
        none = disk.limit is not None
        clear = ended.code == 2 and "was not saved" in ended.said
        found = _make_case(f"disk full in a save: {disk.how}", ended, None, disk.seen / RUN, clear=clear, none=none)
        disk.grow()
        return [_resume(inside, tell, found, disk.folder / RUN, seen=disk.seen / RUN)]


def corrupt_checkpoint(job: DrillJob, tell: Tell) -> list[DrillCase]:
    """A flipped byte, a truncated file or a missing manifest in the newest checkpoint."""
    tell("a run to damage")
    job.train(job.folder / "begun", "--set", f"train.steps={KEPT * EVERY}")
    harms = (("a flipped byte", _flip_byte), ("a file cut short", _truncate), ("no manifest", _remove_manifest))
    return [_corrupt_newest(job, tell, damage, harm) for damage, harm in harms]


def _corrupt_newest(job: DrillJob, tell: Tell, damage: str, harm: Callable[[Path], None]) -> DrillCase:
    tell(f"{damage} in the newest checkpoint")
    run, more = job.folder / damage.replace(" ", "-") / RUN, ["--set", f"train.steps={STEPS}"]
    shutil.copytree(job.folder / "begun" / RUN, run)
    steps, newest = checkpoint_steps(run), max((run / "ckpt").glob("step-*"))
    harm(newest)
    if harm is _remove_manifest:
        verified, said, seen = "not listed any more", "", checkpoint_steps(run) == steps[:-1] and not find_damage(run)
    else:
        verified, refused = find_damage(run), job.resume(run, *more)
        said, seen = refused.said, newest.name in verified and refused.code == 2
        more += ["--from", f"step-{steps[-2]:09}"]
    found = DrillCase(
        damage=f"{damage} in {newest.name}",
        ended_s=None,
        said=said,
        checkpoint=f"step-{steps[-2]}",
        verified=verified,
        resumed="",
        survived=seen,
    )
    return _resume(job, tell, found, run, *more)


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
    damage: str, ended: CommandResult, ended_s: float | None, run: Path, *, clear: bool, none: bool = False
) -> DrillCase:
    """The case of an ended job. `clear`: its error names the fault; `none`: it may have no checkpoint yet."""
    steps = checkpoint_steps(run)
    wrong = find_damage(run) if steps else ""
    return DrillCase(
        damage=damage,
        ended_s=ended_s,
        said=ended.said,
        checkpoint=f"step-{steps[-1]}" if steps else "none yet",
        verified=wrong or "whole",
        resumed="",
        survived=clear and not wrong and (bool(steps) or none),
    )


def _resume(job: DrillJob, tell: Tell, case: DrillCase, run: Path, *more: str, seen: Path | None = None) -> DrillCase:
    """Resume the job and compare its end; `seen` is the run's path for this process."""
    tell(f"resuming after: {case.damage}")
    ended = job.resume(run, *more)
    wrong = find_difference(seen or run, job.folder / "whole" / RUN) if ended.well else ended.said
    return structs.replace(case, resumed=wrong or "ends equal, bit by bit", survived=case.survived and not wrong)


DRILLS: dict[str, Callable[[DrillJob, Tell], Sequence[DrillCase]]] = {
    "kill-rank": kill_rank,
    "fill-disk": fill_disk,
    "corrupt-ckpt": corrupt_checkpoint,
}
