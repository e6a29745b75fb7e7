"""The folder of a run's checkpoints: save, open by name, prune.

All ranks call the methods that write or remove. Rank 0 reads the folder, broadcasts the outcome, and alone removes.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch

from rowwise.base.errors import CheckpointError
from rowwise.base.storage.folder import Folder
from rowwise.checkpoint.background import BackgroundWriter
from rowwise.checkpoint.delta import changed_rows, clear_changes, matches_base, round_shards, stored_bytes
from rowwise.checkpoint.listing import best_step
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.named import STEP, STEP_DIGITS, step_in
from rowwise.checkpoint.policy import is_full_due
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import PART, assign_shards, run_on_all_ranks, write, write_data
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import broadcast_object


class CheckpointReduction(NamedTuple):
    """Options that reduce the size of checkpoints."""

    incremental: bool = False  # only changed rows, where that costs less; needs `Arena.track`
    bits: Literal[32, 8, 4] = 32  # of each weight in tables
    log: Callable[[str], None] | None = None  # called with the reason for a full checkpoint instead of an increment


EVERYTHING = CheckpointReduction()
FAILED = "failed"  # the state before a step that met NaN or infinity


@final
class CheckpointFolder:
    """The checkpoints in a folder, each in a folder step-<number>.

    Args:
        folder: need not exist yet.
        comm: the ranks that save together; a single rank by default.
        background: `save` returns once it has copied the tensors; call `wait` before the process ends.
        reduction: increments, and tables in fewer bits.
        copying: returns the step of a checkpoint that is being copied elsewhere, which must not be removed, if any.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm | None = None,
        *,
        background: bool = False,
        reduction: CheckpointReduction = EVERYTHING,
        copying: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.folder, self._comm = folder, comm or solo()
        self._background = BackgroundWriter(self._comm) if background else None
        self._reduction, self._copying = reduction, copying
        self._base: Path | None = None  # base of the next increment, since which changed rows are marked, if any

    def steps(self) -> list[int]:
        steps = (step_in(path.parent) for path in self.folder.glob(f"step-*/{NAME}"))
        return sorted(step for step in steps if step is not None)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:0{STEP_DIGITS}}"

    def open(self, which: str = "last") -> Checkpoint:
        """Open a checkpoint by its name: last, best, step-<number>, or failed."""
        steps, failed = self.steps(), (self.folder / FAILED / NAME).is_file()
        if which == FAILED and failed:  # a step may fail before anything else was saved
            return Checkpoint.open(self.folder / FAILED)
        if not steps:
            raise CheckpointError(f"{self.folder} has no checkpoint yet; start the run again")
        last = Checkpoint.open(self.path(steps[-1]))
        if which == "last":
            return last
        if which == "best":
            best = best_step(last.manifest.data)
            return last if best is None else Checkpoint.open(self.path(best))
        match = STEP.fullmatch(which)
        if not match or int(match[1]) not in steps:
            names = ", ".join([*(self.path(step).name for step in steps), *([FAILED] if failed else [])])
            raise CheckpointError(f"{self.folder} has no checkpoint {which!r}", f"one of last, best, {names}")
        return Checkpoint.open(self.path(int(match[1])))

    def save(self, step: int, shards: Sequence[LocalShard], data: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step; if it exists, only its data, as tensors change only in steps."""
        self.wait()
        path = self.path(step)
        if self._decide_on_rank_0(lambda: step in self.steps()):
            self._run_on_rank_0(lambda: write_data(path, data))
            return
        self._run_on_rank_0(lambda: shutil.rmtree(path, ignore_errors=True))  # leftovers of a removal that was killed
        local = round_shards(
            assign_shards(shards, self._comm), None if self._reduction.bits == 32 else self._reduction.bits
        )
        base = self._choose_base(path, local) if self._reduction.incremental else None
        local = local if base is None else changed_rows(local)
        self._base = None  # if this write fails, the next checkpoint is a full one
        if self._background is None:
            write(path, local, data, self._comm, base)
        else:
            self._background.write(path, local, data, base)
        if self._reduction.incremental:
            self.set_base(path, shards)

    def set_base(self, path: Folder, shards: Sequence[LocalShard]) -> None:
        """Clear the marks of changed rows: the tensors equal this checkpoint, a base of the next increment."""
        self._base = path if isinstance(path, Path) else None
        clear_changes(shards)

    def _choose_base(self, path: Path, local: Sequence[LocalShard]) -> Checkpoint | None:
        """The base of the next increment, or None if a full checkpoint is due; the same on all ranks."""
        former = self._base
        if former is None:
            return None
        if not self._decide_on_rank_0(lambda: _can_link(former, path)):
            if self._reduction.log is not None:
                self._reduction.log(f"{path.name} is a full checkpoint: no hard link to files of {former} can be made")
            return None
        base = run_on_all_ranks(self._comm, f"{path} was not saved", lambda: Checkpoint.open(former))
        # All ranks must decide alike, so all decide from the same three sums.
        mismatch = not matches_base(local, base.manifest)
        terms = [stored_bytes(local, changed=False), stored_bytes(local, changed=True), mismatch]
        gathered = self._comm.all_gather(torch.tensor(terms), [3] * len(self._comm.ranks), "checkpoint").wait()
        full_bytes, increment_bytes, cannot_extend = gathered.view(-1, 3).sum(0).tolist()
        due = cannot_extend or is_full_due(base.manifest.chain_bytes, full_bytes, increment_bytes)
        return None if due else base

    def save_failed(self, shards: Sequence[LocalShard], data: Mapping[str, Any]) -> None:
        """Save the state before a failed step; replaces an earlier failed state."""
        self.wait()
        self._run_on_rank_0(lambda: shutil.rmtree(self.folder / FAILED, ignore_errors=True))
        write(self.folder / FAILED, shards, data, self._comm)

    def prune(self, keep: int, best: int | None) -> None:
        """Remove all but the newest `keep` checkpoints and the best, after a write in the background has ended."""
        if self._background is None:
            self._run_on_rank_0(partial(self._prune, keep, best))
        else:
            self._background.then(partial(self._prune, keep, best))

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: a run that resumes here takes other steps.

        Newest first: after a kill in between, the remaining checkpoints still are a prefix of one run.
        """
        self.wait()
        self._run_on_rank_0(lambda: [self._remove(later) for later in reversed(self.steps()) if later > step])

    def wait(self) -> None:
        """Wait for the write in the background; its error is raised on all ranks."""
        if self._background is not None:
            base, self._base = self._base, None
            self._background.wait()
            self._base = base  # stays None if `wait` raised: that checkpoint does not exist

    def _prune(self, keep: int, best: int | None) -> None:
        for step in self.steps()[:-keep]:
            if step not in (best, self._copying()):
                self._remove(step)

    def _decide_on_rank_0(self, question: Callable[[], bool]) -> bool:
        return broadcast_object(self._comm, self._comm.rank == 0 and question(), 0, "checkpoint")

    def _run_on_rank_0(self, action: Callable[[], object]) -> None:
        """Run an action on rank 0; if it fails, all ranks raise its error."""
        first = self._comm.rank == 0
        run_on_all_ranks(self._comm, f"could not update {self.folder}", lambda: action() if first else None)

    def clean(self) -> None:
        """Remove checkpoints that a kill left partly written or partly removed."""
        self.wait()
        self._run_on_rank_0(self._clean)

    def _clean(self) -> None:
        for path in (*self.folder.glob("step-*"), *self.folder.glob(f"{FAILED}*")):
            if path.name.endswith(PART) or not (path / NAME).exists():
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, step: int) -> None:
        # The manifest first: a folder without one is no checkpoint, so a kill in between leaves no partial checkpoint.
        (self.path(step) / NAME).unlink()
        shutil.rmtree(self.path(step), ignore_errors=True)


def _can_link(former: Path, path: Path) -> bool:
    """Whether the file system supports hard links, by which an increment shares files with its base."""
    unfinished = path.with_name(path.name + PART)  # the next write removes it
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        os.link(former / NAME, unfinished / "link")
    except OSError:
        return False
    return True
