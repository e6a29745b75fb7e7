"""Work that requests do not wait for."""

import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import final


@final
class LaterCalls:
    """Calls that a thread makes one after the other, or none where too many wait. The thread ends when none does.

    Args:
        most: calls that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._runs = False  # whether a thread makes calls

    def add(self, call: Callable[[], None]) -> None:
        """Make a call later, unless too many wait."""
        with self._lock:
            if len(self._calls) < self._most:
                self._calls.append(call)
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._runs = False
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:  # the next calls are of other rows
                traceback.print_exc()
