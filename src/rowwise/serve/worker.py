"""A worker of a server: serves requests in its main thread, and executes commands of the host.

Commands are executed in a second thread; changes of the service run in the event loop, between two batches.

On SIGTERM, or when its host is gone, a worker drains: it is not ready, and closes connections with their next response.
After `LINGER_s`, in which requests in transit arrive, it accepts no new connections, finishes its requests and ends.
"""

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import NamedTuple, final

import torch
import uvicorn
from starlette.applications import Starlette

from rowwise.serve.admission import ServiceLimits
from rowwise.serve.app import make_app, refusal_of_head
from rowwise.serve.connection import BoundedConnection
from rowwise.serve.record import Recording, RequestRecorder
from rowwise.serve.service import ScoringService
from rowwise.serve.shared_rows import SharedRows
from rowwise.serve.version import ServedVersion
from rowwise.serve.versions import (
    CloseVersion,
    MoveTraffic,
    OpenVersion,
    ReportRefused,
    TrafficMoved,
    VersionOpened,
    VersionRefused,
)

LAST_READ_s = 0.1  # time to read the first bytes of the last connections
LINGER_s = 0.5  # from SIGTERM to the close of idle connections
DRAIN_s = 30  # timeout of requests in flight
ACCEPT_RETRY_s = 1.0  # until connections are accepted again after an error, such as too many open files
SLICE_s, PAUSES = 1e-3, 2.0  # of opening a version between pauses; pauses are so many times as long, for requests
MAX_DIGITS = 640  # of an integer in JSON; the default of 4,300 would take milliseconds
SWITCH_s = 5e-4  # switch interval of threads; with the default of 5 ms, opening a version would delay requests


class WorkerTask(NamedTuple):
    """Configuration of all workers of a server."""

    # (version, shared rows, pause) -> version; `pause` is called between steps.
    open_version: Callable[[int, SharedRows, Callable[[], object]], ServedVersion]
    limits: ServiceLimits
    recording: Recording | None = None


def run_worker(task: WorkerTask, number: int, host: Connection, bound: socket.socket) -> None:
    """The main function of a worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal; the host sends SIGTERM
    torch.set_num_threads(1)  # several would cost synchronization per small operator
    sys.setswitchinterval(SWITCH_s)
    sys.set_int_max_str_digits(MAX_DIGITS)
    service = ScoringService(task.limits)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        """Accept connections once versions are open."""
        control = _Control(number, task, host, service, asyncio.get_running_loop(), asyncio.Event(), server.drain)
        threading.Thread(target=control.run, daemon=True).start()
        await control.moved.wait()
        gc.collect()
        gc.freeze()  # else each full collection traverses all modules, a pause of 145 ms
        server.accept()
        if task.recording is not None:
            service.recorder = RequestRecorder(task.recording, number, service.metrics.unrecorded.inc)
        yield
        if service.recorder is not None:
            service.recorder.close()

    app = make_app(service, lifespan)
    # Errors of clients are counted, not logged.
    config = uvicorn.Config(
        app, access_log=False, log_level="error", ws="none", proxy_headers=False, timeout_graceful_shutdown=DRAIN_s
    )
    config.timeout_keep_alive = task.limits.idle_s  # pyrefly: ignore  # uvicorn declares whole seconds
    server = _DrainingServer(config, service, bound)
    server.run(sockets=[])


@final
class _DrainingServer(uvicorn.Server):
    """A server that drains: requests in transit arrive before it closes connections.

    All workers accept from one socket. Each accepts one connection at a time, and none while it computes, to balance
    the load: a worker that accepted all pending ones would have most connections, and the others would idle.
    """

    def __init__(self, config: uvicorn.Config, service: ScoringService, bound: socket.socket) -> None:
        super().__init__(config)
        self._service, self._bound = service, bound
        self._arriving: set[asyncio.Task[object]] = set()

    def accept(self) -> None:
        """Start to accept connections."""
        self._bound.setblocking(False)
        asyncio.get_running_loop().add_reader(self._bound, self._accept_one)

    def _accept_one(self) -> bool:
        """Accept a connection; returns whether one was pending."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._bound.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another worker was faster, or the client has disconnected
        except OSError as error:  # too many open files
            print(f"no connection can be accepted: {error.strerror}", file=sys.stderr)
            loop.remove_reader(self._bound)
            loop.call_later(ACCEPT_RETRY_s, self._accept_again)
            return False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = loop.create_task(loop.connect_accepted_socket(self._make_protocol, connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        return True

    def _accept_all(self) -> None:
        """Accept all pending connections, as the kernel resets them when the socket closes."""
        while self._accept_one():
            pass

    def _accept_again(self) -> None:
        if self._bound.fileno() >= 0:  # it is not closed
            self.accept()

    def _make_protocol(self) -> asyncio.Protocol:
        service = self._service
        return BoundedConnection(
            service.limits,
            service.metrics.count,
            partial(refusal_of_head, service),
            self.config,
            self.server_state,
            self.lifespan.state,
        )

    def handle_exit(self, sig: int, frame: object) -> None:
        """Handle SIGTERM, in the thread of the loop."""
        asyncio.get_running_loop().call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        if not self._service.draining:
            self._service.draining = True
            self._accept_all()
            asyncio.get_running_loop().call_later(LINGER_s, self._close)

    def _close(self) -> None:
        """Stop accepting, and end open connections once their requests were read."""
        loop = asyncio.get_running_loop()
        self._accept_all()
        loop.remove_reader(self._bound)
        self._bound.close()
        loop.call_later(LAST_READ_s, setattr, self, "should_exit", True)


class _Control(NamedTuple):
    """Executes commands of the host."""

    number: int
    task: WorkerTask
    host: Connection
    service: ScoringService
    loop: asyncio.AbstractEventLoop
    moved: asyncio.Event  # set once the service has traffic
    drain: Callable[[], None]

    def run(self) -> None:
        """Runs until the host is gone, or the loop is closed."""
        try:
            while not self.loop.is_closed():
                self._execute(self.host.recv())
        except (EOFError, OSError):
            if not self.moved.is_set():
                os._exit(1)  # no request was accepted
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.drain)
        except BaseException:
            if self.loop.is_closed():
                return
            traceback.print_exc()
            os._exit(1)  # the host replaces this worker

    def _execute(self, command: object) -> None:
        match command:
            case OpenVersion(_, version):
                rows = self.host.recv()
                self._open(version, rows._replace(file=recv_handle(self.host)))
            case CloseVersion(_, version):
                self._apply(partial(self.service.close, version))
            case MoveTraffic(_, traffic):
                self._apply(partial(self.service.move, traffic))
                self.loop.call_soon_threadsafe(self.moved.set)
                self.host.send(TrafficMoved(self.number, traffic))
            case ReportRefused(_, reasons):
                self._apply(partial(setattr, self.service, "refused", reasons))

    def _open(self, version: int, rows: SharedRows) -> None:
        pause = _Pauses().pause if self.moved.is_set() else lambda: None  # no request waits before
        try:
            opened = self.task.open_version(version, rows, pause)
        except Exception as error:  # code of the version may raise any exception
            self.host.send(VersionRefused.because(version, error, self.number))
            return
        finally:
            os.close(rows.file)
        self._apply(partial(self.service.open, opened))
        self.host.send(VersionOpened(self.number, version))

    def _apply(self, change: Callable[[], object]) -> None:
        """Run a change in the event loop, and wait for it; its result, such as a closed version, is freed here."""
        done, results = threading.Event(), list[object]()

        def run() -> None:
            results.append(change())
            done.set()

        self.loop.call_soon_threadsafe(run)
        done.wait()
        results.clear()


@final
class _Pauses:
    """Pauses in the work of a thread, in proportion to the processor time that it took."""

    def __init__(self) -> None:
        self._begin_s = time.thread_time()

    def pause(self) -> None:
        """Yield to waiting requests."""
        worked_s = time.thread_time() - self._begin_s
        if worked_s >= SLICE_s:
            time.sleep(PAUSES * worked_s)
            self._begin_s = time.thread_time()
