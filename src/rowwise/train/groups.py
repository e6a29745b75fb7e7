"""The batches of each update of an epoch, read ahead, so that all ranks know which update is the last.

Evaluation and checkpoint at the end of an epoch belong to its last step. Where a user's `TrainingJob.batches` gives
some ranks fewer batches, these ranks continue with batches without samples until all have ended. Known limits: memory
for the batches of the updates that are read ahead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import final

from rowwise.base.errors import DataError
from rowwise.ingest.batcher import Batcher, Position
from rowwise.tables.batch import Batch
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ops.pinned import pinned
from rowwise.train.on_device import Move, check_on_host
from rowwise.train.ranks import empty_batch_template
from rowwise.train.step import StepContext, count_samples
from rowwise.train.step_header import GlobalStatus, StepHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """The batches of one update; none after the end of this rank's data."""

    batches: list[Batch]
    after: Position  # of this rank in the data, after these batches


def check_and_pin(context: StepContext, batch: Batch) -> Batch:
    """Check the ids of a batch and pin its memory, for a GPU; called by the thread that makes batches."""
    if context.routes_on_host:
        return batch.map_tensors(pinned, ids=False)
    if not context.runs_ahead:
        return batch
    direct = [tables for tables in context.tables if tables not in context.id_maps]
    return check_on_host(direct, batch).map_tensors(pinned)


@final
class UpdateGroups:
    """The batches of an epoch on this rank, grouped by update."""

    def __init__(self, batcher: Batcher, context: StepContext) -> None:
        self._batcher, self._context = batcher, context
        self._batches: Iterator[Batch] | None = None
        self._empty: Batch | None = None
        self._after = batcher.state()
        self.error: Exception | None = None  # met while reading the newest group; the next step's header carries it

    def begin(self, status: GlobalStatus, first: UpdateGroup, *, resumed: bool) -> None:
        """Raise if a rank has no rows in this epoch; a collective.

        `resumed`: a rank may have none, as its data may have ended before the checkpoint.
        """
        if not status.following:
            raise DataError("no rows to train on: an epoch ended without a batch")
        idle = [str(self._context.comm.ranks[rank]) for rank, batches in enumerate(status.following_W) if not batches]
        if idle and not resumed:
            raise DataError(
                f"no rows to train on for rank {', '.join(idle)}, but other ranks have some",
                "rows for each rank, or fewer ranks",
            )
        if len(status.following_W) > 1:
            self._empty = empty_batch_template(self._context.comm, status, first.batches)

    def fill(self, group: UpdateGroup, batches: int) -> UpdateGroup:
        """The group, padded to `batches` with batches without samples."""
        missing = batches - len(group.batches)
        if missing <= 0:
            return group
        assert self._empty is not None
        empty = self._empty.to(self._context.settings.device, ids=not self._context.routes_on_host)
        return replace(group, batches=group.batches + [empty] * missing)

    def _to_device(self, batch: Batch) -> Batch:
        if self._context.routes_on_host and self._context.shards is None:
            return self._context.copies.start(batch, ids=False)
        if not self._context.runs_ahead:  # virtual shards are cut before a step waits for copies
            return batch.to(self._context.settings.device, ids=not self._context.routes_on_host)
        # Augmented samples are other batches, which their forward maps.
        modules = self._context.id_maps.values() if self._context.settings.augment.keeps_all else ()
        id_maps = [module for module in modules if isinstance(module, MappedEmbeddings)]

        def map_ids(copied: Batch, move: Move) -> None:
            for id_map in id_maps:
                id_map.map_on_host(batch.sparse, copied.sparse, move)

        return self._context.copies.start(batch, map_ids)

    def header(self, newest: UpdateGroup, *, stop: bool) -> StepHeader:
        """This rank's header of a step; `newest` is the group after that step's, read ahead."""
        samples = count_samples(newest.batches)
        return StepHeader(following=len(newest.batches), following_samples=samples, stop=stop, error=self.error)

    def read(self) -> UpdateGroup:
        """Read the next group; an error becomes `error`, and the group is empty."""
        settings, batches = self._context.settings, list[Batch]()
        with self._context.clock.phase("data"):
            try:
                self._batches = iter(self._batcher) if self._batches is None else self._batches
                for batch in islice(self._batches, settings.accumulate):
                    batches.append(self._to_device(batch))
                    # After each batch: at the end of the data the batcher moves on to the next epoch, which the
                    # other ranks may not have reached.
                    self._after = self._batcher.state()
            except Exception as error:
                # Not raised here: the other ranks would wait for this one, and a step may be running. The next header
                # raises it on all ranks.
                self.error = error
                batches = list[Batch]()
        return UpdateGroup(batches=batches, after=self._after)
