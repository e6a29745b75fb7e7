"""`BatchesAhead`: batches that are routed before their lookup, in the order of their lookups.

A batch is found by identity, as two batches may be equal: its key is the object passed to the lookup, or the error that
the lookup raises.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import final

from rowwise.parallel.comm.chain import CollectiveChain
from rowwise.parallel.shard.exchange import BatchInFlight
from rowwise.parallel.shard.pack import RoutedBatch

MAX_READS = 3  # batches whose rows are read from disk ahead; a store on disk keeps rows of the last four


@dataclass(slots=True)
class BatchAhead:
    """A prefetched batch: its route, and its lookup if `look_ahead` made it."""

    key: object
    routes: CollectiveChain[RoutedBatch]
    looked_up: BatchInFlight | None = None
    reads_rows: bool = False  # its rows on disk are being read

    @property
    def routed(self) -> RoutedBatch | None:
        """The complete route, if the batch is not looked up; None for a failed route, whose error the lookup raises."""
        ready = self.looked_up is None and self.routes.is_done and self.routes.wait() is None
        return self.routes.finish() if ready else None


@final
class BatchesAhead:
    """A queue of batches, each with its route."""

    def __init__(self) -> None:
        self._batches: deque[BatchAhead] = deque()

    def add(self, key: object, routes: CollectiveChain[RoutedBatch]) -> None:
        self._batches.append(BatchAhead(key, routes))

    def find(self, key: object) -> BatchAhead | None:
        return next((batch for batch in self._batches if batch.key is key), None)

    def advance(self) -> None:
        """Start the next collective of each route; collective."""
        for batch in self._batches:
            batch.routes.advance()

    def take(self, key: object) -> BatchAhead | None:
        """Remove and return a batch; None if it is not in the queue. Batches before it were skipped and are dropped."""
        batch = self.find(key)
        if batch is not None:
            skipped = BatchesAhead()
            while (first := self._batches.popleft()) is not batch:
                skipped._batches.append(first)
            skipped.drop()
        return batch

    def rows_to_read(self) -> Iterator[RoutedBatch]:
        """The routed ones of the next `MAX_READS` batches, each yielded once."""
        for batch in islice(self._batches, MAX_READS):
            routed = None if batch.reads_rows else batch.routed
            if routed is not None:
                batch.reads_rows = True
                yield routed

    def wait(self) -> None:
        """Finish all routes; collective."""
        for batch in self._batches:
            batch.routes.wait()

    def forget_looked_up(self) -> None:
        """Receive and discard the vectors of batches that were looked up; collective."""
        for batch in self._batches:
            if batch.looked_up is not None:
                batch.looked_up.receive()
                batch.looked_up = None

    def drop(self) -> None:
        """Finish all routes and discard them; collective."""
        self.wait()
        self.forget_looked_up()
        self._batches.clear()
