"""The batches of each update of an epoch, read one update ahead, so that all ranks know which update is the last.

Evaluation and checkpoint at the end of an epoch belong to its last step. Where a user's `TrainingJob.batches` gives
some ranks fewer batches, these ranks continue with batches without samples until all have ended. Known limits: memory
for the batches of one further update.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import final

from rowwise.batch import Batch
from rowwise.errors import DataError
from rowwise.ingest.batcher import Batcher, Position
from rowwise.train.ranks import empty_batch_template
from rowwise.train.step import StepContext
from rowwise.train.step_header import GlobalStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """The batches of one update."""

    batches: list[Batch]
    after: Position  # of this rank in the data, after these batches


@final
class UpdateGroups:
    """The batches of an epoch on this rank, grouped by update."""

    def __init__(self, batcher: Batcher, context: StepContext) -> None:
        self._batcher, self._context = batcher, context
        self._batches: Iterator[Batch] | None = None
        self._empty: Batch | None = None
        self._after = self._read_to = batcher.state()
        self.error: Exception | None = None  # met while reading the next group; the next step's header carries it
        self._next = self._read()

    @property
    def following(self) -> int:
        """Batches of the next group of this rank."""
        return len(self._next)

    @property
    def next_batch(self) -> Batch | None:
        """The first batch of the next group of this rank."""
        return self._next[0] if self._next else None

    def begin(self, status: GlobalStatus, *, resumed: bool) -> None:
        """Raise if a rank has no rows in this epoch; a collective.

        `resumed`: a rank may have none, if its data had ended when the run was saved.
        """
        if not status.following:
            raise DataError("no rows to train on: an epoch ended without a batch")
        idle = [str(self._context.comm.ranks[rank]) for rank, batches in enumerate(status.following_W) if not batches]
        if idle and not resumed:
            want = "want rows for each rank, or fewer ranks"
            raise DataError(f"no rows to train on for rank {', '.join(idle)}, and others have some: {want}")
        if len(status.following_W) > 1:
            self._empty = empty_batch_template(self._context.comm, status, self._next)

    def take(self, batches: int) -> UpdateGroup:
        """The next group, filled up to `batches` with batches without samples; reads the group after it."""
        group = self._next
        if group:
            self._after = self._read_to
            self._next = self._read()
        if len(group) < batches:
            assert self._empty is not None
            group = group + [self._empty.to(self._context.settings.device)] * (batches - len(group))
        return UpdateGroup(batches=group, after=self._after)

    def _read(self) -> list[Batch]:
        settings, batches = self._context.settings, list[Batch]()
        with self._context.clock.phase("data"):
            try:
                self._batches = iter(self._batcher) if self._batches is None else self._batches
                for batch in islice(self._batches, settings.accumulate):
                    batches.append(batch.to(settings.device))
                    # After each batch: at the end of the data the batcher moves on to the next epoch, which the
                    # other ranks may not have reached.
                    self._read_to = self._batcher.state()
            except Exception as error:
                if len(self._context.comm.ranks) == 1:
                    raise
                # Not raised here: the other ranks would wait for this one. The next header raises it on all.
                self.error = error
                return []
        return batches
