"""Fault drills: a small job is damaged on purpose, and what should survive is looked for.

Each drill is a list of cases, and a case says what was done, how long the job took to end, what it said, which
checkpoint was there, and whether going on from it ends where an undisturbed run ends, bit by bit.
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
    damaged,
    difference,
    end,
    processes_of,
    steps_of,
    wait_until,
    whole_steps,
)
from rowwise.errors import SpecError
from rowwise.spec import Value

Tell = Callable[[str], None]
RUN = Path("drill/1")  # in a folder of runs
TRIES = 5  # to meet a save in its middle


class DrillCase(Value, frozen=True):
    """The damage that was done to a job, and its outcome."""

    damage: str
    ended_s: float | None  # from the damage to the job's end; None: it had ended before
    said: str  # on the console
    checkpoint: str  # that was there to go on from
    verified: str  # what was found in it, or in the damaged one
    resumed: str
    survived: bool


class DrillReport(Value, frozen=True):
    """The cases of one drill, and its ranks."""

    drill: str
    ranks: int
    cases: tuple[DrillCase, ...]

    @property
    def survived(self) -> bool:
        return all(case.survived for case in self.cases)


def run_drill(name: str, ranks: int, folder: Path, tell: Tell) -> DrillReport:
    """Do one, in a folder of its own; `tell` hears what is being done."""
    if ranks < 1 or (name == "kill-rank" and ranks < 2):
        raise SpecError(f"--nproc {ranks}: want at least {2 if name == 'kill-rank' else 1}")
    job = DrillJob.make(folder, ranks)
    tell("a run that nobody disturbs")
    whole = job.train(folder / "whole")
    if not whole.well:
        raise SpecError(f"the drill's job does not run here even undisturbed: {whole.said}")
    return DrillReport(drill=name, ranks=ranks, cases=tuple(DRILLS[name](job, tell)))


def kill_rank(job: DrillJob, tell: Tell) -> list[DrillCase]:
    """SIGKILL of a rank in a step, of the first and of the last rank in a save."""
    last = job.ranks - 1
    cases = [_go_on(job, tell, _kill(job, tell, f"rank {last} in a step", last, "step"), job.folder / "step" / RUN)]
    for rank in (0, last):
        for number in range(TRIES):
            name = f"save-{rank}-{number}"
            run = job.folder / name / RUN
            found = _kill(job, tell, f"rank {rank} in a save", rank, name)
            if list((run / "ckpt").glob(f"*{PART}")):  # else the save had ended before the rank had
                cases.append(_go_on(job, tell, found, run))
                break
        else:
            raise SpecError(f"{TRIES} saves were too fast to kill rank {rank} in one: try again")
    return cases


def _kill(job: DrillJob, tell: Tell, whom: str, rank: int, name: str) -> DrillCase:
    run = job.folder / name / RUN
    tell(f"killing {whom}")
    with job.training(job.folder / name) as process:
        wait_until(process, lambda: steps_of(run) > 2 * EVERY, "its first checkpoints")
        if "save" in whom:
            wait_until(process, lambda: any((run / "ckpt").glob(f"*{PART}")), "a save")
        begin_s = time.monotonic()
        os.kill(processes_of(run)[rank], signal.SIGKILL)
        ended = end(process)
        ended_s = time.monotonic() - begin_s
    clear = f"rank {rank} was killed by SIGKILL" in ended.said and ended.code == 128 + signal.SIGKILL
    return _case(f"SIGKILL of {whom}", ended, ended_s, run, clear=clear)


def fill_disk(job: DrillJob, tell: Tell) -> list[DrillCase]:
    """A disk that has room for a checkpoint and a half."""
    tell("filling a disk")
    newest = max((job.folder / "whole" / RUN / "ckpt").glob("step-*"))
    sizes = [path.stat().st_size for path in newest.iterdir()]
    with small_disk(job.folder / "disk", sum(sizes) * 3 // 2, max(sizes) // 2) as disk:
        inside = replace(job, enter=disk.enter)
        with inside.training(disk.folder, limit=disk.limit) as process:
            ended = end(process)
        # A limit on files is met by the first checkpoint already.
        none = disk.limit is not None
        clear = ended.code == 2 and "was not saved" in ended.said
        found = _case(f"full in a save: {disk.how}", ended, None, disk.seen / RUN, clear=clear, none=none)
        disk.grow()
        return [_go_on(inside, tell, found, disk.folder / RUN, seen=disk.seen / RUN)]


def corrupt_checkpoint(job: DrillJob, tell: Tell) -> list[DrillCase]:
    """A flipped byte, a file cut short, a manifest that is gone: of the newest checkpoint."""
    tell("a run to damage")
    job.train(job.folder / "begun", "--set", f"train.steps={KEPT * EVERY}")
    harms = (("a flipped byte", _flip), ("a file cut short", _cut), ("no manifest", _forget))
    return [_corrupt(job, tell, damage, harm) for damage, harm in harms]


def _corrupt(job: DrillJob, tell: Tell, damage: str, harm: Callable[[Path], None]) -> DrillCase:
    tell(f"{damage} in the newest checkpoint")
    run, more = job.folder / damage.replace(" ", "-") / RUN, ["--set", f"train.steps={STEPS}"]
    shutil.copytree(job.folder / "begun" / RUN, run)
    steps, newest = whole_steps(run), max((run / "ckpt").glob("step-*"))
    harm(newest)
    if harm is _forget:
        verified, said, seen = "it counts no more", "", whole_steps(run) == steps[:-1] and not damaged(run)
    else:
        verified, refused = damaged(run), job.resume(run, *more)
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
    return _go_on(job, tell, found, run, *more)


def _flip(checkpoint: Path) -> None:
    path = _largest(checkpoint)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 3 // 4)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _cut(checkpoint: Path) -> None:
    path = _largest(checkpoint)
    os.truncate(path, path.stat().st_size // 2)


def _forget(checkpoint: Path) -> None:
    (checkpoint / NAME).unlink()


def _largest(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def _case(
    damage: str, ended: CommandResult, ended_s: float | None, run: Path, *, clear: bool, none: bool = False
) -> DrillCase:
    """What is there once a job has ended, whose last words were `clear`; `none`: there may be no checkpoint yet."""
    steps = whole_steps(run)
    wrong = damaged(run) if steps else ""
    return DrillCase(
        damage=damage,
        ended_s=ended_s,
        said=ended.said,
        checkpoint=f"step-{steps[-1]}" if steps else "none yet",
        verified=wrong or "whole",
        resumed="",
        survived=clear and not wrong and (bool(steps) or none),
    )


def _go_on(job: DrillJob, tell: Tell, case: DrillCase, run: Path, *more: str, seen: Path | None = None) -> DrillCase:
    """Go on from what is there, and compare; `seen`: where this process finds the run."""
    tell(f"going on after: {case.damage}")
    ended = job.resume(run, *more)
    wrong = difference(seen or run, job.folder / "whole" / RUN) if ended.well else ended.said
    return structs.replace(case, resumed=wrong or "ends equal, bit by bit", survived=case.survived and not wrong)


DRILLS: dict[str, Callable[[DrillJob, Tell], Sequence[DrillCase]]] = {
    "kill-rank": kill_rank,
    "fill-disk": fill_disk,
    "corrupt-ckpt": corrupt_checkpoint,
}
