"""Saves and restores the state of a run: model, optimizers, metrics, progress, position in the data.

All ranks save and restore together. Not supported: resuming on another number of ranks where each rank reads data of
its own, as the next rows of such ranks are not defined.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from rowwise.base.errors import AgreedError, CheckpointError
from rowwise.base.processor import GemmLibrary
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import Checkpoint, reading_data
from rowwise.ingest.batcher import Position
from rowwise.parallel.comm.status import gather_object
from rowwise.tables.ops.linear import choose_library, current_library, has_onednn
from rowwise.train.dense import DenseGradients
from rowwise.train.progress import Progress
from rowwise.train.recorder import Recorder
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import FAILED, CheckpointFolder, CheckpointReduction
from rowwise.train.settings import Saving
from rowwise.train.snapshot import RANDOM, collect, restore
from rowwise.train.step import StepContext, do_nothing


@final
class RunState:
    """Saves and restores one run; without a folder nothing is saved."""

    def __init__(
        self,
        context: StepContext,
        recorder: Recorder,
        folder: RunFolder | None,
        saving: Saving,
        copying: Callable[[], int | None] = do_nothing,
    ) -> None:
        self._context, self._recorder, self._folder, self._saving = context, recorder, folder, saving
        self._copying = copying
        self._optimizers = {} if context.optimizer is None else {"dense": context.optimizer}
        self._checkpoints = None if folder is None else self._make_checkpoints(folder)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, and remove those beyond `save.keep`."""
        if self._checkpoints is not None:
            self._checkpoints.save(progress.step, *self.collect(progress))
            self.prune(progress)

    def prune(self, progress: Progress) -> None:
        """Remove checkpoints beyond `save.keep`, but for the best one and one that is being copied."""
        if self._checkpoints is not None:
            self._checkpoints.prune(self._saving.keep, None if progress.best is None else progress.best.step)

    def save_failed(self, progress: Progress) -> str:
        """Save the state before a step that met NaN or infinity; returns a hint that names the command to repeat it."""
        if self._checkpoints is None or self._folder is None:
            return ""
        try:
            self._checkpoints.save_failed(*self.collect(progress))
        except (CheckpointError, AgreedError) as error:
            return f"; the state for repeating the step is lost: {error}"
        return f"; repeat the step: rowwise resume {self._folder.path} --from {FAILED}"

    def wait(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def collect(self, progress: Progress) -> tuple[list[LocalShard], dict[str, Any]]:
        """This rank's local shards, and the data of the manifest; a collective."""
        shards, data = collect(self._context.model, self._optimizers, self._context.comm, self._residuals())
        tensors, numbers = self._recorder.state()
        shards += [LocalShard.whole(name, tensor, shared=False) for name, tensor in tensors.items()]
        if self._context.soft is not None:
            shards += self._context.soft.shards(progress.step + 1)
        data |= {"progress": msgspec.to_builtins(progress), "recorder": numbers, "products": current_library()}
        # Positions differ if each rank reads data of its own; all of them are saved then, in rank order.
        positions = gather_object(self._context.comm, progress.position, "positions")
        if positions is not None and len(set(positions)) > 1:
            data["positions"] = msgspec.to_builtins(positions)
        return shards, data

    def read_progress(self, checkpoint: Checkpoint) -> Progress:
        """The progress in a checkpoint, with this rank's position in the data."""
        data, comm = checkpoint.manifest.data, self._context.comm
        if "progress" not in data:
            raise CheckpointError(
                f"{checkpoint.folder} is not a checkpoint of a training run: its manifest has no 'progress'",
                "a checkpoint that rowwise train wrote",
            )
        with reading_data(checkpoint.folder):
            progress = msgspec.convert(data["progress"], Progress)
            positions = msgspec.convert(data.get("positions"), list[Position] | None)
        if positions is None:
            return progress
        if len(positions) != len(comm.ranks):
            raise CheckpointError(
                f"{checkpoint.folder}: each of {len(positions)} ranks read data of its own, and there are "
                f"{len(comm.ranks)} ranks now",
                f"{len(positions)} ranks",
                hint="warm-start with init_from instead",
            )
        return structs.replace(progress, position=positions[comm.rank])

    def restore(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Restore the run, and remove checkpoints and lines of later steps."""
        with _keeping_hyperparameters(self._context.optimizer):
            restore(checkpoint, self._context.model, self._optimizers, self._context.comm, self._residuals())
        if (soft := self._context.soft) is not None and self._keeps_order(checkpoint):
            soft.restore(checkpoint, progress.step + 1, self._context.settings.device)
        # oneDNN and torch round dense products differently. Measuring again which is faster might choose the other.
        with reading_data(checkpoint.folder):
            products = msgspec.convert(checkpoint.manifest.data.get("products"), GemmLibrary)
            if has_onednn() or products == "torch":
                choose_library(products)
            self._recorder.restore(checkpoint, progress)
        if self._checkpoints is not None:
            self._checkpoints.remove_after(progress.step)
            self._checkpoints.set_base(checkpoint.folder, self.collect(progress)[0])

    def _keeps_order(self, checkpoint: Checkpoint) -> bool:
        """Whether the samples of all ranks in the next step are in the order that the checkpoint's ranks had."""
        return self._context.settings.accumulate == 1 or checkpoint.entry(RANDOM).rows == len(self._context.comm.ranks)

    def _residuals(self) -> dict[int, Tensor] | None:
        """Error feedback of dense gradients by bucket; None for elastic or sharded gradients."""
        gradients = self._context.gradients
        return gradients.residuals if isinstance(gradients, DenseGradients) else None

    def _make_checkpoints(self, folder: RunFolder) -> CheckpointFolder:
        if self._saving.incremental:
            for module in self._context.tables:
                for arena in module.arenas:
                    arena.track()
        saving, comm = self._saving, self._context.comm
        reduction = CheckpointReduction(saving.incremental, saving.bits, folder.warn if comm.rank == 0 else None)
        return CheckpointFolder(
            folder.checkpoints, comm, background=saving.background, reduction=reduction, copying=self._copying
        )


@contextmanager
def _keeping_hyperparameters(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Keep the optimizer's configured hyperparameters through a restore: a run may be resumed with other settings."""
    groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
    configured = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    yield
    for group, values in zip(groups, configured, strict=True):
        group.update(values)
