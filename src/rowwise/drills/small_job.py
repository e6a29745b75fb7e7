"""A job of a few seconds that can be damaged: started as users start one, watched, resumed, compared.

The recipe is elastic, so that what survived can be told from what nearly did: bit by bit.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rowwise.errors import CheckpointError, RowwiseError
from rowwise.ops.reference.sums import BLOCK
from rowwise.train.saved import CheckpointFolder

STEPS, EVERY, KEPT = 30, 5, 3
LIMIT_S = 300.0  # of a command; a job that hangs is a finding, not a reason to hang
OURS = ("model/", "rows/", "optimizer/")
RECIPE = """
name: drill
data: {{dataset: synthetic, rows: {rows}, test_rows: 4096}}
tables: {{all: {{dim: 64, optimizer: {{kind: adam}}}}}}
model: {{kind: dlrm, bottom: [16], top: [16]}}
train: {{batch: {batch}, steps: {steps}, epochs: 9, determinism: elastic, virtual_shards: {shards}, threads: 1}}
save: {{every: {every}, keep: {kept}}}
log: {{every: 1}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    said: str  # the line that says why, or the last one

    @property
    def well(self) -> bool:
        return self.code == 0


@dataclass(frozen=True, slots=True)
class DrillJob:
    """A folder with the recipe, and a number of ranks; `enter`: what its commands begin with."""

    folder: Path
    ranks: int
    enter: tuple[str, ...] = ()

    @classmethod
    def make(cls, folder: Path, ranks: int) -> "DrillJob":
        shards = 2 * ranks
        batch = BLOCK * shards
        numbers = {"batch": batch, "shards": shards, "steps": STEPS, "every": EVERY, "kept": KEPT}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "drill.yaml").write_text(RECIPE.format(rows=batch * STEPS, **numbers))
        return cls(folder, ranks)

    def train(self, runs: Path, *more: str) -> CommandResult:
        """A new run, to its end."""
        with self.training(runs, *more) as process:
            return end(process)

    def resume(self, run: Path, *more: str) -> CommandResult:
        """Go on with a run, to its end."""
        with self._started("resume", str(run), *more) as process:
            return end(process)

    def training(
        self, runs: Path, *more: str, limit: Callable[[], None] | None = None
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        """A new run, while it goes on."""
        return self._started("train", "drill.yaml", "--runs", str(runs), *more, limit=limit)

    @contextmanager
    def _started(self, *args: str, limit: Callable[[], None] | None = None) -> Iterator[subprocess.Popen[str]]:
        # By the words, as who enters a namespace of mounts stands at its root.
        enter = (*self.enter, f"--wd={self.folder}") if self.enter else ()
        command = [*enter, sys.executable, "-m", "rowwise", *args, "--nproc", str(self.ranks)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=self.folder, text=True, preexec_fn=limit, **pipes)
        try:
            yield process
        finally:
            process.kill()  # its ranks end with it
            process.communicate()


def end(process: subprocess.Popen[str]) -> CommandResult:
    try:
        _, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return CommandResult(code=-1, said=f"has not ended after {LIMIT_S:g} s")
    lines = [line for line in err.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("rowwise: ")] or lines[-1:]
    return CommandResult(code=process.returncode, said="; ".join(said))


def wait_until(process: subprocess.Popen[str], there: Callable[[], bool], what: str) -> None:
    """Until something is so, while the process goes on."""
    end_s = time.monotonic() + LIMIT_S
    while not there():
        if process.poll() is not None or time.monotonic() > end_s:
            raise RowwiseError(f"the drill's job ended, or took too long, before {what}: {end(process).said}")
        time.sleep(0.001)


def processes_of(run: Path) -> list[int]:
    log = run / "log.txt"
    found = re.findall(r"processes ([\d ]+)\n", log.read_text()) if log.exists() else []
    return [int(pid) for pid in found[-1].split()] if found else []


def steps_of(run: Path) -> int:
    """The last step that was written down."""
    path = run / "steps.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def whole_steps(run: Path) -> list[int]:
    """The checkpoints that count."""
    return CheckpointFolder(run / "ckpt").steps()


def damaged(run: Path) -> str:
    """What is wrong with the newest of the checkpoints that count; nothing, if nothing is."""
    try:
        CheckpointFolder(run / "ckpt").open().verify()
    except CheckpointError as error:
        return str(error).partition("; use another")[0]  # the first of what may be many places
    return ""


def difference(run: Path, other: Path) -> str:
    """What two runs that have ended do not have in common, bit by bit; nothing, if nothing is."""
    one, two = CheckpointFolder(run / "ckpt").open(), CheckpointFolder(other / "ckpt").open()
    names = [sorted(name for name in x.names() if name.startswith(OURS)) for x in (one, two)]
    if names[0] != names[1]:
        return "they hold other tensors"
    unequal = [name for name in names[0] if not one.load(name).equal(two.load(name))]
    if unequal:
        return f"{len(unequal)} tensors differ, {unequal[0]} among them"
    return "" if _test(run) == _test(other) else f"the test gives {_test(run)}, and {_test(other)} undisturbed"


def _test(run: Path) -> Mapping[str, object]:
    return msgspec.json.decode((run / "result.json").read_bytes())["test"]
