"""The whole state of a run as a checkpoint, and back: model, optimizers, metrics, progress, where the data stands.

All ranks save and restore together. Known limits: another number of ranks for runs whose ranks read data of their own,
as nobody could tell which rows come next.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from rowwise.checkpoint.parts import LocalShard
from rowwise.checkpoint.read import Checkpoint, reading_data
from rowwise.comm.status import gather_object
from rowwise.errors import AgreedError, CheckpointError
from rowwise.ingest.batcher import Position
from rowwise.ops.linear import choose_library, current_library, has_onednn
from rowwise.processor import Products
from rowwise.train.dense import DenseGradients
from rowwise.train.progress import Progress
from rowwise.train.recorder import Recorder
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import FAILED, CheckpointFolder, CheckpointReduction
from rowwise.train.settings import Saving
from rowwise.train.snapshot import collect, restore
from rowwise.train.step import StepContext


@final
class RunState:
    """Saves and restores one run; without a folder nothing is saved."""

    def __init__(self, work: StepContext, recorder: Recorder, folder: RunFolder | None, saving: Saving) -> None:
        self._work, self._recorder, self._folder, self._saving = work, recorder, folder, saving
        self._optimizers = {} if work.optimizer is None else {"dense": work.optimizer}
        self._saved = None if folder is None else self._open_checkpoints(folder)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, and drop those that are no longer wanted."""
        if self._saved is not None:
            self._saved.add(progress.step, *self.collect(progress))
            self._saved.prune(self._saving.keep, None if progress.best is None else progress.best.step)

    def save_failed(self, progress: Progress) -> str:
        """Keep the state that a bad number was met in; says how to meet it again."""
        if self._saved is None or self._folder is None:
            return ""
        try:
            self._saved.add_failed(*self.collect(progress))
        except (CheckpointError, AgreedError) as full:
            return f"; and it cannot be met again, as {full}"
        return f"; meet it again: rowwise resume {self._folder.path} --from {FAILED}"

    def wait(self) -> None:
        if self._saved is not None:
            self._saved.wait()

    def collect(self, progress: Progress) -> tuple[list[LocalShard], dict[str, Any]]:
        """This rank's parts of a checkpoint, and the data beside them."""
        parts, data = collect(self._work.model, self._optimizers, self._work.comm, self._wire_errors())
        kept, numbers = self._recorder.state()
        parts += [LocalShard.whole(name, tensor, shared=False) for name, tensor in kept.items()]
        more = {"progress": msgspec.to_builtins(progress), "recorder": numbers, "products": current_library()}
        # Where each rank's data stands, if they are at different places: each then reads what is its own.
        positions = gather_object(self._work.comm, progress.position, "positions")
        if positions is not None and len(set(positions)) > 1:
            more["positions"] = msgspec.to_builtins(positions)
        return parts, data | more

    def progress_of(self, checkpoint: Checkpoint) -> Progress:
        """The progress in a checkpoint, for this rank."""
        data, comm = checkpoint.manifest.data, self._work.comm
        if "progress" not in data:
            raise CheckpointError(f"{checkpoint.folder} is not of a run: it does not say how far it got")
        with reading_data(checkpoint.folder):
            progress = msgspec.convert(data["progress"], Progress)
            positions = msgspec.convert(data.get("positions"), list[Position] | None)
        if positions is None:
            return progress
        if len(positions) != len(comm.ranks):
            got = f"each of {len(positions)} ranks read data of its own, and there are {len(comm.ranks)} ranks now"
            raise CheckpointError(f"{checkpoint.folder}: {got}: want {len(positions)}, or start from it instead")
        return structs.replace(progress, position=positions[comm.rank])

    def restore(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Restore a run to a checkpoint, and drop records that are newer."""
        with _own_numbers(self._work.optimizer):
            restore(checkpoint, self._work.model, self._optimizers, self._work.comm, self._wire_errors())
        # The two libraries round differently, and which is faster may be found out differently today.
        with reading_data(checkpoint.folder):
            products = msgspec.convert(checkpoint.manifest.data.get("products"), Products)
            if has_onednn() or products == "torch":
                choose_library(products)
            self._recorder.restore(checkpoint, progress)
        if self._saved is not None:
            self._saved.cut(progress.step)
            self._saved.go_on_from(checkpoint.folder, self.collect(progress)[0])

    def _wire_errors(self) -> dict[int, Tensor] | None:
        """Rounding errors that lossy wires hold back of dense gradients."""
        gradients = self._work.gradients
        return gradients.held if isinstance(gradients, DenseGradients) else None

    def _open_checkpoints(self, folder: RunFolder) -> CheckpointFolder:
        if self._saving.incremental:
            for module in self._work.tables:
                for arena in module.arenas:
                    arena.track()
        tell = folder.warn if self._work.comm.rank == 0 else str
        less = CheckpointReduction(self._saving.incremental, self._saving.bits, tell)
        return CheckpointFolder(folder.checkpoints, self._work.comm, background=self._saving.background, less=less)


@contextmanager
def _own_numbers(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Keep decay, betas and their like as the settings have them: a run may be resumed with others."""
    groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    yield
    for group, numbers in zip(groups, own, strict=True):
        group.update(numbers)
