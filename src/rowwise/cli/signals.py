"""Signal handlers for Ctrl-C and SIGTERM during a command."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

BOTH = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handle_signals(handle: Callable[[int], object], numbers: Sequence[int] = BOTH) -> Iterator[None]:
    """Call `handle` on these signals; a no-op outside of the main thread, as only it receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def call(number: int, _frame: FrameType | None) -> None:
        handle(number)

    before = {number: signal.signal(number, call) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def note_signals(
    act: Callable[[], object] = lambda: None, numbers: Sequence[int] = BOTH, *, again: bool = True
) -> Iterator[list[int]]:
    """Call `act` on the first of these signals, and raise KeyboardInterrupt on the next; yields the signals received.

    With `again=False` further signals are ignored here, as another process handles them.
    """
    received: list[int] = []

    def note(number: int) -> None:
        if received and again:
            raise KeyboardInterrupt
        if not received:
            received.append(number)
            act()

    with handle_signals(note, numbers):
        yield received
