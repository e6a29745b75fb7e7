"""The batches of each update of an epoch, one update ahead: the last has to be known as such, on all ranks.

What is due at the end of an epoch belongs to its last step, and one step makes one checkpoint. Of several ranks some
may have fewer batches than others (a `TrainingJob.batches` of the user): those go on with batches of no samples, until
all have ended. Known limits: an update's batches of memory, as the next are read before a step begins.
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
    after: Position  # where this rank's data stands once they are used


@final
class UpdateGroups:
    """The batches of an epoch on this rank, grouped by update."""

    def __init__(self, batcher: Batcher, work: StepContext) -> None:
        self._batcher, self._work = batcher, work
        self._batches: Iterator[Batch] | None = None
        self._empty: Batch | None = None
        self._after = self._read_to = batcher.state()
        self.error: Exception | None = None  # why the next could not be read
        self._next = self._read()

    @property
    def following(self) -> int:
        """Batches of the next group of this rank."""
        return len(self._next)

    def begin(self, status: GlobalStatus, *, resumed: bool) -> None:
        """Refuse an epoch without rows; called by all ranks, which know what each has.

        A rank whose data had ended when the run was saved has none when it is resumed.
        """
        if not status.following:
            raise DataError("no rows to train on: an epoch ended without a batch")
        idle = [str(self._work.comm.ranks[rank]) for rank, batches in enumerate(status.following_W) if not batches]
        if idle and not resumed:
            want = "want rows for each rank, or fewer ranks"
            raise DataError(f"no rows to train on for rank {', '.join(idle)}, and others have some: {want}")
        if len(status.following_W) > 1:
            self._empty = empty_batch_template(self._work.comm, status, self._next)

    def take(self, batches: int) -> UpdateGroup:
        """The next group, padded to `batches` batches with empty ones; reads the group after it."""
        group = self._next
        if group:
            self._after = self._read_to
            self._next = self._read()
        if len(group) < batches:
            assert self._empty is not None
            group = group + [self._empty.to(self._work.settings.device)] * (batches - len(group))
        return UpdateGroup(batches=group, after=self._after)

    def _read(self) -> list[Batch]:
        how, batches = self._work.settings, list[Batch]()
        with self._work.clock.phase("data"):
            try:
                self._batches = iter(self._batcher) if self._batches is None else self._batches
                for batch in islice(self._batches, how.accumulate):
                    batches.append(batch.to(how.device))
                    # Where data ends the batcher goes on to the next epoch, and other ranks may not be there yet.
                    self._read_to = self._batcher.state()
            except Exception as error:
                if len(self._work.comm.ranks) == 1:
                    raise
                # It is raised once the other ranks know: they would wait for this one.
                self.error = error
                return []
        return batches
