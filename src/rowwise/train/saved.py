"""The checkpoints of a run: which there are, which to go on from, and which may go.

Its own file because a kill may come at any moment: a checkpoint counts once its manifest is there, a new one is whole
before an old one goes, and of one that goes the manifest goes first.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor

from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import PART, write, write_data
from rowwise.errors import CheckpointError

FAILED = "failed"  # the state before a step that met a bad number
STEP = re.compile(r"step-(\d+)")


@final
class Saved:
    """The checkpoints in a folder, each called step-<number>."""

    def __init__(self, folder: Path) -> None:
        """The folder need not be there yet."""
        self.folder = folder

    def steps(self) -> list[int]:
        """Of those that are complete, oldest first."""
        found = (STEP.fullmatch(path.parent.name) for path in self.folder.glob(f"*/{NAME}"))
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
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
            best = last.manifest.data.get("progress", {}).get("best")
            return last if best is None else Checkpoint.open(self.path(best["step"]))
        match = STEP.fullmatch(which)
        if not match or int(match[1]) not in steps:
            there = ", ".join([*(self.path(step).name for step in steps), *([FAILED] if failed else [])])
            raise CheckpointError(f"{self.folder} has no checkpoint {which!r}; there are last, best, {there}")
        return Checkpoint.open(self.path(int(match[1])))

    def add(self, step: int, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Write one; of one that is there the data, as nothing is learned between two at the same step."""
        if step in self.steps():
            write_data(self.path(step), data)
        else:
            shutil.rmtree(self.path(step), ignore_errors=True)  # what is left of one that was on its way out
            write(self.path(step), tensors, data)

    def add_failed(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Keep the state that a bad number was met in; the newest such state only."""
        shutil.rmtree(self.folder / FAILED, ignore_errors=True)
        write(self.folder / FAILED, tensors, data)

    def prune(self, keep: int, best: int | None) -> None:
        """Keep the newest and the best."""
        for step in self.steps()[:-keep]:
            if step != best:
                self._remove(step)

    def cut(self, step: int) -> None:
        """Remove those of later steps: a run that goes on from here goes another way, and would mix them with its own.

        Newest first, so that after a kill what is left is still a run's past.
        """
        for later in reversed(self.steps()):
            if later > step:
                self._remove(later)

    def clean(self) -> None:
        """Remove what kills have left half written or half deleted."""
        for path in (*self.folder.glob("step-*"), *self.folder.glob(f"{FAILED}*")):
            if path.name.endswith(PART) or not (path / NAME).exists():
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, step: int) -> None:
        # Without a manifest it counts no more, so half of it is never taken for a checkpoint.
        (self.path(step) / NAME).unlink()
        shutil.rmtree(self.path(step), ignore_errors=True)
