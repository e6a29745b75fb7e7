"""The checkpoints of a run: which there are, which to go on from, and which may go.

With several ranks, all call alike what writes or removes; rank 0 looks and tells the others, and it alone removes.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch

from rowwise.checkpoint.background import BackgroundWriter
from rowwise.checkpoint.delta import can_extend, clear, increment, round_shards, stored_bytes
from rowwise.checkpoint.listing import best_step
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.parts import LocalShard
from rowwise.checkpoint.policy import is_full_due
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import PART, own_parts, run_on_all_ranks, write, write_data
from rowwise.comm.seam import Comm
from rowwise.comm.solo import solo
from rowwise.comm.status import broadcast_object
from rowwise.errors import CheckpointError


class CheckpointReduction(NamedTuple):
    """Incremental checkpoints, and the bits of their rows."""

    incremental: bool = False  # only rows that changed, where that costs less; needs marks, see `Arena.track`
    bits: Literal[32, 8, 4] = 32  # of each weight in tables
    tell: Callable[[str], object] = str  # is told why one is not smaller; str: nobody


EVERYTHING = CheckpointReduction()
FAILED = "failed"  # the state before a step that met a bad number
STEP = re.compile(r"step-([0-9]{1,18})")


@final
class CheckpointFolder:
    """The checkpoints in a folder, each called step-<number>.

    Args:
        folder: need not be there yet.
        comm: the ranks that save together; None: this one alone.
        background: `add` returns once it has copied what is to be saved; `wait` before leaving.
        less: how to write less than everything.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm | None = None,
        *,
        background: bool = False,
        less: CheckpointReduction = EVERYTHING,
    ) -> None:
        self.folder, self._comm = folder, comm or solo()
        self._background = BackgroundWriter(self._comm) if background else None
        self._less = less
        self._base: Path | None = None  # the rows that are marked changed since this one

    def steps(self) -> list[int]:
        found = (STEP.fullmatch(path.parent.name) for path in self.folder.glob(f"*/{NAME}"))
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:09}"

    def open(self, which: str = "last") -> Checkpoint:
        """One by its name: last, best, step-<number>, or failed."""
        steps, failed = self.steps(), (self.folder / FAILED / NAME).is_file()
        if which == FAILED and failed:  # a step may fail before anything else was saved
            return Checkpoint.open(self.folder / FAILED)
        if not steps:
            raise CheckpointError(f"{self.folder}: no checkpoint was written yet; start the run again")
        last = Checkpoint.open(self.path(steps[-1]))
        if which == "last":
            return last
        if which == "best":
            best = best_step(last.manifest.data)
            return last if best is None else Checkpoint.open(self.path(best))
        match = STEP.fullmatch(which)
        if not match or int(match[1]) not in steps:
            there = ", ".join([*(self.path(step).name for step in steps), *([FAILED] if failed else [])])
            raise CheckpointError(f"{self.folder} has no checkpoint {which!r}; there are last, best, {there}")
        return Checkpoint.open(self.path(int(match[1])))

    def add(self, step: int, parts: Sequence[LocalShard], data: Mapping[str, Any]) -> None:
        """Write one; of one that is there the data, as nothing is learned between two at the same step."""
        self.wait()
        path = self.path(step)
        if self._ask_first_rank(lambda: step in self.steps()):
            self._run_on_first_rank(lambda: write_data(path, data))
            return
        self._run_on_first_rank(
            lambda: shutil.rmtree(path, ignore_errors=True)
        )  # what is left of one that was on its way out
        own = round_shards(own_parts(parts, self._comm), None if self._less.bits == 32 else self._less.bits)
        base = self._choose(path, own) if self._less.incremental else None
        own = own if base is None else increment(own)
        self._base = None  # if it fails, the next one is full
        if self._background is None:
            write(path, own, data, self._comm, base)
        else:
            self._background.write(path, own, data, base)
        if self._less.incremental:
            self.go_on_from(path, parts)

    def go_on_from(self, former: Path, parts: Sequence[LocalShard]) -> None:
        """The parts are as they are saved there: what changes from now on may be saved on top of that."""
        self._base = former
        clear(parts)

    def _choose(self, path: Path, own: Sequence[LocalShard]) -> Checkpoint | None:
        """The checkpoint that the next one builds on; None for a full one. All ranks choose alike."""
        former = self._base
        if former is None:
            return None
        if not self._ask_first_rank(lambda: _can_link(former, path)):
            self._less.tell(f"{path.name} is a full checkpoint: {former} cannot be linked to")
            return None
        base = run_on_all_ranks(self._comm, f"{path} was not saved", lambda: Checkpoint.open(former))
        other = 0 if can_extend(own, base.manifest) else 1
        mine = torch.tensor([stored_bytes(own, changed=False), stored_bytes(own, changed=True), other])
        told_W3 = self._comm.all_gather(mine, [3] * len(self._comm.ranks), "checkpoint").wait().view(-1, 3)
        full_bytes, increment_bytes, others = told_W3.sum(0).tolist()
        due = others or is_full_due(base.manifest.chain_bytes, full_bytes, increment_bytes)
        return None if due else base

    def add_failed(self, parts: Sequence[LocalShard], data: Mapping[str, Any]) -> None:
        """Keep the state that a bad number was met in; the newest such state only."""
        self.wait()
        self._run_on_first_rank(lambda: shutil.rmtree(self.folder / FAILED, ignore_errors=True))
        write(self.folder / FAILED, parts, data, self._comm)

    def prune(self, keep: int, best: int | None) -> None:
        """Keep the newest and the best; after what is being written, if anything is."""
        if self._background is None:
            self._run_on_first_rank(partial(self._prune, keep, best))
        else:
            self._background.then(partial(self._prune, keep, best))

    def cut(self, step: int) -> None:
        """Remove those of later steps: a run that goes on from here goes another way, and would mix them with its own.

        Newest first, so that after a kill what is left is still a run's past.
        """
        self.wait()
        self._run_on_first_rank(lambda: [self._remove(later) for later in reversed(self.steps()) if later > step])

    def wait(self) -> None:
        """Wait for the save that is under way; its error is raised on all ranks."""
        if self._background is not None:
            base, self._base = self._base, None
            self._background.wait()
            self._base = base  # not, if that raised

    def _prune(self, keep: int, best: int | None) -> None:
        for step in self.steps()[:-keep]:
            if step != best:
                self._remove(step)

    def _ask_first_rank(self, question: Callable[[], bool]) -> bool:
        return broadcast_object(self._comm, self._comm.rank == 0 and question(), 0, "checkpoint")

    def _run_on_first_rank(self, action: Callable[[], object]) -> None:
        """Rank 0 does it; where it fails, all raise the same."""
        run_on_all_ranks(
            self._comm, f"{self.folder} is not as it should be", lambda: action() if self._comm.rank == 0 else None
        )

    def clean(self) -> None:
        """Remove what kills have left half written or half deleted."""
        self.wait()
        self._run_on_first_rank(self._clean)

    def _clean(self) -> None:
        for path in (*self.folder.glob("step-*"), *self.folder.glob(f"{FAILED}*")):
            if path.name.endswith(PART) or not (path / NAME).exists():
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, step: int) -> None:
        # Without a manifest it counts no more, so half of it is never taken for a checkpoint.
        (self.path(step) / NAME).unlink()
        shutil.rmtree(self.path(step), ignore_errors=True)


def _can_link(former: Path, path: Path) -> bool:
    part = path.with_name(path.name + PART)  # which the next write removes
    try:
        part.mkdir(parents=True, exist_ok=True)
        os.link(former / NAME, part / "link")
    except OSError:
        return False
    return True
