"""`Pipeline`: the steps of an epoch, the next of them prepared while one runs.

    stage       of step i + 1, depth 2                   resource
    read        before step i                            reader thread
    header      from before the forward of step i on     link
    route       counts as the header; ids after the      link
                forward of step i
    prefetch    before the update of step i              disk
    lookup, exchange, forward, backward, return, reduce, status, update: in step i + 1

`train.pipeline_depth` is the number of steps in flight: 1 prepares nothing ahead, d prepares the d - 1 next steps. The
stages are the functions of an unprepared step, so the results have the same bits for any depth. What a step prepares
ahead depends on ids only, never on weights.

All ranks prepare at the same places of a step ([Note: Overlap]), so they call collectives in one order.

[Note: Overlap] `run_step` calls `overlap` before its forward, after it, and before its update. The first call begins
to prepare a further step, the others continue with what the last one has begun: by then that has travelled beside the
vectors or gradients which the step itself had to wait for.

Errors of a step that is prepared ahead are raised by that step, after the steps before it. Not prepared ahead: ids of
managed tables, as their rows depend on the steps before; and the first steps of an epoch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from rowwise.batch import Batch, Jagged, KeyedJagged
from rowwise.comm.chain import CollectiveChain
from rowwise.errors import RowwiseError
from rowwise.hashing.embeddings import MappedEmbeddings
from rowwise.hashing.managed.embeddings import ManagedEmbeddings
from rowwise.ingest.batcher import Position
from rowwise.shard.embeddings import ShardedEmbeddings
from rowwise.train.groups import UpdateGroup, UpdateGroups
from rowwise.train.step import (
    StepContext,
    StepResult,
    count_samples,
    run_step,
    split_batches,
    start_header,
)
from rowwise.train.step_header import GlobalStatus, StepHeader


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
        context: of the steps.
        groups: reads their batches.
        first: the group of the first step, which is read.
        status: what the ranks have told each other about it.
        number: of the first step.
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
        self._began = False  # whether the current step has begun to prepare another

    def next_step(self) -> PreparedStep:
        """The next step; raises what its header says."""
        if not self._steps:
            self._prepare(self._status)
        with self._context.clock.phase("status"):
            self._steps[0].header.finish()
        return self._steps[0]

    def run(self, step: PreparedStep) -> StepResult:
        """Run the step that `next_step` gave, while the next ones are prepared."""
        if isinstance(step.pieces, RowwiseError):
            raise step.pieces
        self._began, self._status = False, step.header.finish()
        stepped = run_step(self._context, step.batches, step.pieces, self._status, step.number, self._overlap)
        self._steps.popleft()
        self._number = step.number + 1
        self._prefetched = [tables for tables in self._prefetched if tables.looked_up(step.pieces)]
        return stepped

    def settle(self) -> None:
        """Wait for all that is on its way, before collectives of others; collective."""
        for step in self._steps:
            step.header.wait()
        for tables in self._prefetched:
            tables.settle()

    def close(self) -> None:
        """Wait for all that is on its way, and forget it; collective."""
        self.settle()
        self._steps.clear()
        for tables in self._prefetched:
            tables.drop()

    def _overlap(self) -> None:
        """See [Note: Overlap]."""
        if self._began:
            with self._context.clock.working_for(self._steps[-1].number):
                with self._context.clock.phase("status"):
                    for step in self._steps:
                        step.header.advance()
                for tables in self._prefetched:
                    tables.advance()
            return
        self._began = True
        while len(self._steps) < self._context.settings.pipeline_depth:
            newest = self._steps[-1].header  # known already, but for the first steps of an epoch
            if newest.wait() is not None or not (status := newest.finish()).following:  # an error: of that step
                return
            self._prepare(status)

    def _prepare(self, status: GlobalStatus) -> None:
        """Begin to prepare a step, of which the header of the step before it has told."""
        context, group = self._context, self._groups.fill(self._newest, status.following)
        self._newest = self._groups.read()
        header = StepHeader(
            following=len(self._newest.batches),
            following_samples=count_samples(self._newest.batches),
            stop=self._stop(),
            error=self._groups.error,
        )
        number = self._number + len(self._steps)
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
    """Sharded tables whose batches are routed ahead, with the id map before them if they have one."""

    def __init__(self, tables: ShardedEmbeddings, id_map: MappedEmbeddings | None) -> None:
        self._tables, self._id_map = tables, id_map

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

    def settle(self) -> None:
        """Wait for what `prefetch` has begun; collective."""
        self._tables.settle()

    def looked_up(self, pieces: Sequence[Batch]) -> bool:
        """Whether the model has looked these batches up, not others that it made of them; if not, drops what is ahead.

        All ranks run one model, so all find the same.
        """
        module = self._tables if self._id_map is None else self._id_map
        if not any(module.is_ahead(piece.sparse) for piece in pieces):
            return True
        self.drop()
        return False

    def drop(self) -> None:
        """Forget all batches; collective."""
        self._tables.drop_ahead()
        if self._id_map is not None:
            self._id_map.drop_ahead()


def find_prefetched(context: StepContext) -> list[PrefetchedTables]:
    """The tables whose batches are routed ahead: on several ranks, or on disk."""
    found: list[PrefetchedTables] = []
    for tables in context.tables if context.settings.pipeline_depth > 1 else ():
        if not isinstance(tables, ShardedEmbeddings):
            continue
        id_map = context.id_maps.get(tables)
        waits = len(tables.comm.ranks) > 1 or any(arena.disk is not None for arena in tables.arenas)
        if waits and not isinstance(id_map, ManagedEmbeddings):
            found.append(PrefetchedTables(tables, id_map))
    return found
