"""`Pipeline`: runs the steps of an epoch, and prepares the next steps while a step runs.

    stage       of step i + 1, depth 2                   resource
    read        before step i                            reader thread
    header      from before the forward of step i on     link
    route       number of ids: with the header;          link
                ids: after the forward of step i
    prefetch    before the update of step i              disk
    lookup, exchange, forward, backward, return, reduce, status, update: in step i + 1

`train.pipeline_depth` is the number of steps in flight: 1 prepares nothing ahead, d prepares the d - 1 next steps. The
stages are the functions of an unprepared step, so the results have the same bits for any depth. What is prepared ahead
depends on ids only, never on weights. The exception is `train.staleness` of 1 or more: then the next step's vectors are
looked up and sent ahead as well, one more step is in flight, and lookups miss some updates (see `late.py`).

All ranks prepare at the same places of a step ([Note: Overlap]), so they call collectives in one order.

[Note: Overlap] `run_step` calls `overlap` before its forward, after it, and before its update. The first call begins
to prepare a further step; the others advance its collectives, whose data meanwhile travelled beside the vectors or
gradients that the step itself had to wait for.

Errors of a prepared step are raised when that step runs, after all earlier steps. Not prepared ahead: ids of managed
tables, as their rows depend on earlier steps; and the first steps of an epoch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from rowwise.base.errors import RowwiseError
from rowwise.ingest.batcher import Position
from rowwise.parallel.comm.chain import CollectiveChain
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.tables.batch import Batch, Jagged, KeyedJagged
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ids.managed.embeddings import ManagedEmbeddings
from rowwise.tables.ops.faults import check_faults
from rowwise.train.groups import UpdateGroup, UpdateGroups
from rowwise.train.late import LateUpdates
from rowwise.train.step import LaterSteps, StepContext, StepResult, run_step, split_batches, start_header
from rowwise.train.step_header import GlobalStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step whose preparation has begun."""

    number: int
    batches: Sequence[Batch]
    after: Position  # in the data, after these batches
    pieces: Sequence[Batch] | RowwiseError
    header: CollectiveChain[GlobalStatus]


@final
class Pipeline:
    """The steps of the rest of an epoch.

    Args:
        context: model, tables and settings of the steps.
        groups: reads the batches of later steps.
        first: the batches of the first step.
        status: the ranks' headers about the first step.
        number: number of the first step.
        stop: whether this rank was asked to end the run.
    """

    def __init__(
        self,
        context: StepContext,
        groups: UpdateGroups,
        first: UpdateGroup,
        status: GlobalStatus,
        number: int,
        stop: Callable[[], bool],
    ) -> None:
        self._context, self._groups, self._stop = context, groups, stop
        self._newest = first  # read, and not yet prepared
        self._status, self._number = status, number
        self._steps: deque[PreparedStep] = deque()  # the first is the next to run
        self._prefetched = find_prefetched(context)
        self._began = False  # whether the current step has begun to prepare further steps
        self._verified = False  # whether a step has run: `_prefetched` then has only tables that use prefetches
        settings = context.settings
        looks_ahead = settings.staleness > 0 and settings.pipeline_depth > 1
        self._depth = settings.pipeline_depth + looks_ahead

    def next_step(self) -> PreparedStep:
        """The next step; raises the error of its header."""
        if not self._steps:
            self._prepare(self._status)
        with self._context.clock.phase("status"):
            self._steps[0].header.finish()
        return self._steps[0]

    def run(self, step: PreparedStep) -> StepResult:
        """Run the step that `next_step` returned, while later steps are prepared."""
        if isinstance(step.pieces, RowwiseError):
            raise step.pieces
        self._began, self._status = False, step.header.finish()
        later = LaterSteps(self._overlap, self._following(self._status))
        stepped = run_step(self._context, step.batches, step.pieces, self._status, step.number, later)
        self._steps.popleft()
        self._number = step.number + 1
        self._prefetched = [tables for tables in self._prefetched if tables.were_used(step.pieces)]
        self._verified = True
        return stepped

    def _following(self, status: GlobalStatus) -> Sequence[Batch]:
        """The pieces of the step after the one that begins, if a loss needs them; an error is raised by that step."""
        if self._context.soft is None or not status.following:
            return ()
        if len(self._steps) > 1:
            pieces = self._steps[1].pieces
        else:
            pieces = self._split(self._groups.fill(self._newest, status.following).batches, status.following_samples_W)
        return () if isinstance(pieces, RowwiseError) else pieces

    def settle(self) -> None:
        """Wait for collectives in flight, and apply late updates, before an evaluation or a checkpoint; collective."""
        for step in self._steps:
            step.header.wait()
        for tables in self._prefetched:
            tables.settle()
        for late in self._context.late.values():
            late.apply_all()
        check_faults(self._context.device)

    def close(self) -> None:
        """Wait for collectives in flight, and discard the prepared steps; collective."""
        self.settle()
        self._steps.clear()
        for tables in self._prefetched:
            tables.drop()

    def _overlap(self) -> None:
        """Begin to prepare a further step, or continue what the last call began; see [Note: Overlap]."""
        if self._began:
            with self._context.clock.working_for(self._steps[-1].number):
                with self._context.clock.phase("status"):
                    for step in self._steps:
                        step.header.advance()
                for tables in self._prefetched:
                    tables.advance()
            self._look_ahead()
            return
        self._began = True
        while len(self._steps) < self._depth:
            header = self._steps[-1].header  # has arrived already, except in the first steps of an epoch
            if header.wait() is not None or not (status := header.finish()).following:  # that step raises its error
                break
            self._prepare(status)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """With staleness, look up the next step's batches if they are routed."""
        if not self._context.late or not self._verified or len(self._steps) < 2:
            return
        current, following = self._steps[0].pieces, self._steps[1]
        if not isinstance(current, RowwiseError) and not isinstance(following.pieces, RowwiseError):
            with self._context.clock.working_for(following.number):
                for tables in self._prefetched:
                    if tables.looked_up(current):
                        tables.look_ahead(following.number, following.pieces)

    def _prepare(self, status: GlobalStatus) -> None:
        """Begin to prepare the step after the newest prepared step, whose headers gave `status`."""
        context, group = self._context, self._groups.fill(self._newest, status.following)
        number = self._number + len(self._steps)
        with context.clock.working_for(number + 1):
            self._newest = self._groups.read()
        header = self._groups.header(self._newest, stop=self._stop())
        with context.clock.working_for(number):
            with context.clock.phase("status"):
                started = start_header(context, group.batches, number, header)
            pieces = self._split(group.batches, status.following_samples_W)
            with context.clock.phase("route"):
                for piece in () if isinstance(pieces, RowwiseError) else pieces:
                    for tables in self._prefetched:
                        tables.prefetch(piece.sparse)
        step = PreparedStep(number=number, batches=group.batches, after=group.after, pieces=pieces, header=started)
        self._steps.append(step)

    def _split(self, batches: Sequence[Batch], samples_W: Sequence[int]) -> Sequence[Batch] | RowwiseError:
        try:
            return split_batches(self._context, batches, samples_W)
        except RowwiseError as error:
            return error


@final
class PrefetchedTables:
    """Sharded tables whose batches are routed ahead, with their id map, if any."""

    def __init__(self, tables: ShardedEmbeddings, id_map: MappedEmbeddings | None, late: LateUpdates | None) -> None:
        self._tables, self._id_map, self._late = tables, id_map, late

    def prefetch(self, sparse: Jagged | KeyedJagged) -> None:
        """Begin to route a batch that the model will look up; collective."""
        batch = sparse if self._id_map is None else self._id_map.map_ahead(sparse)
        if isinstance(batch, RowwiseError):
            self._tables.prefetch_failed(batch)
        else:
            self._tables.prefetch(batch)

    def advance(self) -> None:
        """Continue what `prefetch` has begun; collective."""
        self._tables.advance()

    def look_ahead(self, number: int, pieces: Sequence[Batch]) -> None:
        """Look up the batches of a step if all are routed, after the updates that they have to see; collective.

        A no-op while gradients of the current step are staged: an update would apply them as well.
        """
        batches = self._batches_ahead(pieces)
        if self._late is not None and not self._tables.has_gradients and all(map(self._tables.is_routed, batches)):
            self._late.apply_before(number)
            for batch in batches:
                self._tables.look_ahead(batch)

    def looked_up(self, pieces: Sequence[Batch]) -> bool:
        """Whether these batches are looked up, by the model or ahead of it."""
        return all(map(self._tables.is_looked_up, self._batches_ahead(pieces)))

    def _batches_ahead(self, pieces: Sequence[Batch]) -> list[Jagged | KeyedJagged | RowwiseError]:
        """The (mapped) ids of these batches, without the batches that the model has looked up."""
        id_map = self._id_map
        batches = [piece.sparse if id_map is None else id_map.batch_ahead(piece.sparse) for piece in pieces]
        return [batch for batch in batches if batch is not None and self._tables.is_ahead(batch)]

    def settle(self) -> None:
        """Wait for the prefetches in flight, and drop the vectors of `look_ahead`; collective."""
        self._tables.settle()
        self._tables.forget_looked_up()

    def were_used(self, pieces: Sequence[Batch]) -> bool:
        """Whether the model has looked up these batches themselves, not copies that it made; if not, drops prefetches.

        All ranks run one model, so all return the same.
        """
        if not self._batches_ahead(pieces):
            return True
        self.drop()
        return False

    def drop(self) -> None:
        """Drop all prefetched batches; collective."""
        self._tables.drop_ahead()
        if self._id_map is not None:
            self._id_map.drop_ahead()


def find_prefetched(context: StepContext) -> list[PrefetchedTables]:
    """The tables whose batches are routed ahead: those on several ranks, or on disk."""
    prefetched: list[PrefetchedTables] = []
    for tables in context.tables if context.settings.pipeline_depth > 1 else ():
        if not isinstance(tables, ShardedEmbeddings):
            continue
        id_map = context.id_maps.get(tables)
        waits = len(tables.comm.ranks) > 1 or tables.reads_ahead
        if waits and not isinstance(id_map, ManagedEmbeddings):
            prefetched.append(PrefetchedTables(tables, id_map, context.late.get(tables)))
    return prefetched
