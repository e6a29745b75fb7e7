"""TorchRec's link of `pipeline.py`: a c10d process group over gloo whose collectives begin after a latency.

As rowwise's `DelayedTransport` does it: a call returns at once, and a thread calls gloo's collective when the latency
is over, in the order of the calls. DDP and TorchRec wait for its `Work` or take its future, as of any backend.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import distributed as dist

BACKEND = "delayed"
COLLECTIVES = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip


@dataclass
class Latency:
    """Seconds before each collective; may change between collectives."""

    seconds: float = 0.0


class DelayedWork(dist.Work):
    """A collective that gloo has not begun yet."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Future[Any] = Future()
        self.ended: torch.futures.Future[Any] = torch.futures.Future()

    def begin(self, start: Callable[[], Any]) -> None:
        """Start gloo's collective, on the link's thread."""
        try:
            work = start()
            work.get_future().add_done_callback(self._end)
            self.begun.set_result(work)
        except BaseException as error:
            self.begun.set_exception(error)
            self.ended.set_exception(error)

    def _end(self, future: Any) -> None:
        try:
            self.ended.set_result(future.value())
        except Exception as error:
            self.ended.set_exception(error)

    def wait(self, timeout: Any = None) -> bool:
        self.begun.result().wait()
        return True

    def is_completed(self) -> bool:
        return self.begun.done() and self.begun.result().is_completed()

    def get_future(self) -> Any:
        return self.ended


class DelayedGroup(dist.ProcessGroup):
    """A process group of gloo with a latency."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any, latency: Latency) -> None:
        super().__init__(rank, size)
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.latency = latency
        # A group has its name from a backend; its collectives are those below all the same.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self.calls: SimpleQueue[tuple[float, Callable[[], None]]] = SimpleQueue()
        threading.Thread(target=self.run_calls, name="delayed link", daemon=True).start()

    def run_calls(self) -> None:
        while True:
            at_s, begin = self.calls.get()
            time.sleep(max(0.0, at_s - time.monotonic()))
            begin()

    def delayed(self, collective: str, *args: Any) -> DelayedWork:
        work = DelayedWork()
        start = partial(getattr(self.gloo, collective), *args)
        self.calls.put((time.monotonic() + self.latency.seconds, partial(work.begin, start)))
        return work

    def getBackendName(self) -> str:
        return BACKEND


def overridden(collective: str) -> Callable[..., DelayedWork]:
    return lambda group, *args: group.delayed(collective, *args)


for collective in COLLECTIVES:
    setattr(DelayedGroup, collective, overridden(collective))


def register(latency: Latency) -> None:
    """Make `init_process_group(BACKEND)` give delayed groups."""

    def create(store: dist.Store, rank: int, size: int, timeout: Any) -> DelayedGroup:
        return DelayedGroup(store, rank, size, timeout, latency)

    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
