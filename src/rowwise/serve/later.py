"""Background work that no request waits for."""

import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import final


@final
class LaterCalls:
    """A bounded queue of calls for a thread that ends when it is empty. If it is full, calls are dropped.

    Args:
        max_waiting: capacity of the queue.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_running = False  # whether a thread is running

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call, or drop it if the queue is full."""
        with self._lock:
            if len(self._calls) < self._max_waiting:
                self._calls.append(call)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._is_running = False
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:  # later calls are independent of this one
                traceback.print_exc()
