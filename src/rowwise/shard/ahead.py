"""`RoutesAhead`: batches that are routed before their lookup, in the order of their lookups."""

from collections import deque
from dataclasses import dataclass
from typing import final

from rowwise.batch import Jagged, KeyedJagged
from rowwise.comm.chain import CollectiveChain
from rowwise.errors import RowwiseError
from rowwise.shard.pack import RoutedBatch


@dataclass(slots=True)
class _BatchAhead:
    sparse: Jagged | KeyedJagged
    routes: CollectiveChain[RoutedBatch]
    reads_rows: bool = False  # its rows on disk are being read


@final
class RoutesAhead:
    """Routes of later batches. A batch is recognised by identity, as two batches may be equal."""

    def __init__(self) -> None:
        self._batches: deque[_BatchAhead] = deque()

    def add(self, sparse: Jagged | KeyedJagged, routes: CollectiveChain[RoutedBatch]) -> None:
        self._batches.append(_BatchAhead(sparse, routes))

    def has(self, sparse: Jagged | KeyedJagged) -> bool:
        return any(batch.sparse is sparse for batch in self._batches)

    def advance(self) -> None:
        """Start the next collective of each route; collective."""
        for batch in self._batches:
            batch.routes.advance()

    def take(self, sparse: Jagged | KeyedJagged) -> CollectiveChain[RoutedBatch] | None:
        """The route of this batch, which then is no longer ahead; None if there is none."""
        for batch in self._batches:
            if batch.sparse is sparse:
                self._batches.remove(batch)
                return batch.routes
        return None

    def next_rows(self) -> RoutedBatch | None:
        """The next batch if it is routed, once: so that its rows are read."""
        if not self._batches or self._batches[0].reads_rows or not self._batches[0].routes.is_done:
            return None
        self._batches[0].reads_rows = True
        try:
            return self._batches[0].routes.finish()
        except RowwiseError:  # raised by its lookup
            return None

    def drop(self) -> None:
        """Finish all routes and forget them; collective."""
        batches, self._batches = self._batches, deque()
        for batch in batches:
            try:
                batch.routes.finish()
            except RowwiseError:  # of a batch that nothing looks up
                continue
