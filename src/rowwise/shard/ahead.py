"""`RoutesAhead`: batches that are routed before their lookup, in the order of their lookups.

A batch is found again by identity, as two batches may be equal: its key is the object that the lookup gets, or the
error that the lookup raises.
"""

from collections import deque
from dataclasses import dataclass
from typing import final

from rowwise.comm.chain import CollectiveChain
from rowwise.shard.pack import RoutedBatch


@dataclass(slots=True)
class _BatchAhead:
    key: object
    routes: CollectiveChain[RoutedBatch]
    reads_rows: bool = False  # its rows on disk are being read


@final
class RoutesAhead:
    """A queue of batches, each with its route."""

    def __init__(self) -> None:
        self._batches: deque[_BatchAhead] = deque()

    def add(self, key: object, routes: CollectiveChain[RoutedBatch]) -> None:
        self._batches.append(_BatchAhead(key, routes))

    def has(self, key: object) -> bool:
        return any(batch.key is key for batch in self._batches)

    def advance(self) -> None:
        """Start the next collective of each route; collective."""
        for batch in self._batches:
            batch.routes.advance()

    def take(self, key: object) -> CollectiveChain[RoutedBatch] | None:
        """The route of this batch, which then is no longer ahead; None if there is none."""
        for batch in self._batches:
            if batch.key is key:
                self._batches.remove(batch)
                return batch.routes
        return None

    def next_rows(self) -> RoutedBatch | None:
        """The next batch if it is routed, once: so that its rows are read."""
        if not self._batches or self._batches[0].reads_rows or not self._batches[0].routes.is_done:
            return None
        self._batches[0].reads_rows = True
        routes = self._batches[0].routes
        return routes.finish() if routes.wait() is None else None  # an error is raised by the lookup

    def wait(self) -> None:
        """Finish all routes; collective."""
        for batch in self._batches:
            batch.routes.wait()

    def drop(self) -> None:
        """Finish all routes and forget them; collective."""
        self.wait()
        self._batches.clear()
