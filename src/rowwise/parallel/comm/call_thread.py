"""`CallThread`: a thread that runs functions one after the other, each no earlier than its time."""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, final


@final
@dataclass(frozen=True, slots=True)
class _QueuedCall:
    at_s: float
    function: Callable[[], Any]
    result: "Future[Any]" = field(default_factory=Future)


def _run_calls(calls: "SimpleQueue[_QueuedCall | None]") -> None:
    """The main function of the thread; without a reference to `CallThread`, whose finalizer ends it."""
    while (call := calls.get()) is not None:
        time.sleep(max(0.0, call.at_s - time.monotonic()))
        try:
            call.result.set_result(call.function())
        except BaseException as error:
            call.result.set_exception(error)
        del call  # frees its tensors


@final
class CallThread:
    """A daemon thread; it ends with `close`, or when nothing refers to this object."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_QueuedCall | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], Any], at_s: float = 0.0) -> "Future[Any]":
        """Run the function after all earlier ones, and not before `at_s` of `time.monotonic`."""
        call = _QueuedCall(at_s, function)
        self._calls.put(call)
        return call.result

    def close(self) -> None:
        """Wait for all calls, and end the thread."""
        self._end()
        self._thread.join()
