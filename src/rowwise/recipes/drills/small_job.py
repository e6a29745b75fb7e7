"""A training job of a few seconds for drills: started by the command line, watched, resumed and compared.

The recipe is the drill's own, or a user's, of which the job takes the first steps.
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

from rowwise.base.errors import CheckpointError, RowwiseError
from rowwise.recipes.find import load
from rowwise.tables.ops.reference.sums import BLOCK
from rowwise.train.saved import CheckpointFolder

STEPS, EVERY, KEPT = 30, 5, 3
LIMIT_S = 300.0  # timeout of a command, so that a hanging job becomes a failed case
COMPARED = ("model/", "rows/", "optimizer/")  # prefixes of the compared tensors
RECIPE = """
name: drill
data: {{dataset: synthetic, rows: {rows}, test_rows: 4096}}
tables: {{all: {{dim: 64, optimizer: {{kind: adam}}}}}}
model: {{kind: dlrm, bottom: [16], top: [16]}}
train: {{batch: {batch}, steps: {steps}, epochs: 9, determinism: elastic, virtual_shards: {shards}, threads: 1}}
save: {{every: {every}, keep: {kept}}}
log: {{every: 1}}
"""
CHANGES = (  # of a user's recipe
    "name=drill",
    f"train.steps={STEPS}",
    f"train.epochs={STEPS}",
    f"save.every={EVERY}",
    f"save.keep={KEPT}",
    "log.every=1",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Exit code and error line of a command."""

    code: int
    error_line: str  # rowwise's error, or the last line

    @property
    def succeeded(self) -> bool:
        return self.code == 0


@dataclass(frozen=True, slots=True)
class DrillJob:
    """The arguments of a training run, a folder for its files, and a number of ranks."""

    folder: Path
    ranks: int
    arguments: tuple[str, ...]  # of `rowwise train`
    cwd: Path
    enter: tuple[str, ...] = ()  # prefix of its commands

    @classmethod
    def make(cls, folder: Path, ranks: int, recipe: str | None = None) -> "DrillJob":
        """The job of a recipe, by path or name; None: the drill's own."""
        if recipe is not None:
            load(recipe, CHANGES)
            changes = (part for change in CHANGES for part in ("--set", change))
            return cls(folder, ranks, (recipe, *changes), Path.cwd())
        shards = 2 * ranks
        batch = BLOCK * shards
        numbers = {"batch": batch, "shards": shards, "steps": STEPS, "every": EVERY, "kept": KEPT}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "drill.yaml").write_text(RECIPE.format(rows=batch * STEPS, **numbers))
        return cls(folder, ranks, ("drill.yaml",), folder)

    def train(self, runs: Path, *options: str) -> CommandResult:
        with self.training(runs, *options) as process:
            return wait_for_end(process)

    def resume(self, run: Path, *options: str) -> CommandResult:
        with self._process("resume", str(run), *options) as process:
            return wait_for_end(process)

    def training(
        self, runs: Path, *options: str, limit: Callable[[], None] | None = None
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        """The process of a new run, killed at the end of the block."""
        return self._process("train", *self.arguments, "--runs", str(runs), *options, limit=limit)

    @contextmanager
    def _process(self, *args: str, limit: Callable[[], None] | None = None) -> Iterator[subprocess.Popen[str]]:
        # nsenter starts commands at the root of the namespace, not in cwd.
        enter = (*self.enter, f"--wd={self.cwd}") if self.enter else ()
        command = [*enter, sys.executable, "-m", "rowwise", *args, "--nproc", str(self.ranks)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=self.cwd, text=True, preexec_fn=limit, **pipes)
        try:
            yield process
        finally:
            process.kill()  # ends its ranks, too
            process.communicate()


def wait_for_end(process: subprocess.Popen[str]) -> CommandResult:
    try:
        _, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return CommandResult(code=-1, error_line=f"timed out after {LIMIT_S:g} s")
    lines = [line for line in err.splitlines() if line.strip()]
    error_lines = [line for line in lines if line.startswith("rowwise: ")] or lines[-1:]
    return CommandResult(code=process.returncode, error_line="; ".join(error_lines))


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool], event: str) -> None:
    """Poll until the condition holds; raises if the process ends first or takes too long."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end_s:
            line = wait_for_end(process).error_line
            raise RowwiseError(f"the drill's job ended or took too long before {event}: {line}")
        time.sleep(0.001)


def rank_processes(run: Path) -> list[int]:
    """Process ids of the ranks from the run's log; empty before they are logged."""
    log = run / "log.txt"
    lines = re.findall(r"processes ([\d ]+)\n", log.read_text()) if log.exists() else []
    return [int(pid) for pid in lines[-1].split()] if lines else []


def last_step(run: Path) -> int:
    path = run / "steps.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    return CheckpointFolder(run / "ckpt").steps()


def find_damage(run: Path) -> str:
    """The first damage in the newest complete checkpoint; empty if there is none."""
    try:
        CheckpointFolder(run / "ckpt").open().verify()
    except CheckpointError as error:
        return str(error).partition("; use another")[0]
    return ""


def find_difference(run: Path, other: Path) -> str:
    """The first bitwise difference of two finished runs; empty if equal."""
    first, second = CheckpointFolder(run / "ckpt").open(), CheckpointFolder(other / "ckpt").open()
    names = [sorted(name for name in x.names() if name.startswith(COMPARED)) for x in (first, second)]
    if names[0] != names[1]:
        return "they have different tensors"
    unequal = [name for name in names[0] if not first.load(name).equal(second.load(name))]
    if unequal:
        return f"{len(unequal)} tensors differ, {unequal[0]} among them"
    return "" if _test(run) == _test(other) else f"the test gives {_test(run)}, and {_test(other)} undisturbed"


def _test(run: Path) -> Mapping[str, object]:
    return msgspec.json.decode((run / "result.json").read_bytes())["test"]
