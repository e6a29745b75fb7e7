"""Prefetches items of an iterator in a background thread, up to a fixed depth, and times their making.

Arrow and numpy release the GIL while they read, hash and copy, so the thread uses a core that a training step
leaves idle. An exception in the thread is raised where the items are used.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
POLL_S = 0.05  # interval at which a thread blocked on a full queue checks whether the iterator was closed


class TimedItem(NamedTuple, Generic[T]):
    """An item, and when its making began and ended."""

    item: T
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _End:
    pass


def time_items(items: Iterator[T]) -> Iterator[TimedItem[T]]:
    """The same items with the times of their making, by `time.perf_counter`; includes waits inside the iterator."""
    begin_s = perf_counter()
    for item in items:
        yield TimedItem(item, begin_s, perf_counter())
        begin_s = perf_counter()


def read_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items, up to `depth` of them prefetched; closing the generator ends the thread."""
    results: queue.Queue[T | _Failure | _End] = queue.Queue(depth)
    closed = threading.Event()
    thread = threading.Thread(target=_fill, args=(results, items, closed), name="rowwise-ingest", daemon=True)
    thread.start()
    try:
        while True:
            item = results.get()
            if isinstance(item, _End):
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        closed.set()
        thread.join()


def _fill(results: "queue.Queue[T | _Failure | _End]", items: Iterator[T], closed: threading.Event) -> None:
    try:
        for item in items:
            if not _put(results, item, closed):
                return
        _put(results, _End(), closed)
    except BaseException as error:  # raised again in the consumer's thread
        _put(results, _Failure(error), closed)


def _put(results: "queue.Queue[T]", item: T, closed: threading.Event) -> bool:
    """Wait for room in the queue; False if the generator was closed meanwhile."""
    while not closed.is_set():
        try:
            results.put(item, timeout=POLL_S)
        except queue.Full:
            continue
        return True
    return False
