"""Makes the next items of an iterator in a background thread, a bounded number of them.

Arrow and numpy release Python's lock while they read, hash and copy, so a core that a training step leaves idle
can do it meanwhile. What goes wrong in the thread is raised where the items are used.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.05  # how soon a thread that waits for room sees that nobody wants more


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _Ended:
    pass


def read_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items, up to `depth` of them made in advance; closing the generator ends the thread."""
    made: queue.Queue[T | _Failed | _Ended] = queue.Queue(depth)
    unwanted = threading.Event()
    thread = threading.Thread(target=_fill, args=(made, items, unwanted), name="rowwise-ingest", daemon=True)
    thread.start()
    try:
        while True:
            item = made.get()
            if isinstance(item, _Ended):
                return
            if isinstance(item, _Failed):
                raise item.error
            yield item
    finally:
        unwanted.set()
        thread.join()


def _fill(made: "queue.Queue[T | _Failed | _Ended]", items: Iterator[T], unwanted: threading.Event) -> None:
    try:
        for item in items:
            if not _put(made, item, unwanted):
                return
        _put(made, _Ended(), unwanted)
    except BaseException as error:  # a thread has no caller; the one who takes the items gets it
        _put(made, _Failed(error), unwanted)


def _put(made: "queue.Queue[T]", item: T, unwanted: threading.Event) -> bool:
    """Wait for room, unless nobody wants the item any more."""
    while not unwanted.is_set():
        try:
            made.put(item, timeout=POLL_S)
        except queue.Full:
            continue
        return True
    return False
