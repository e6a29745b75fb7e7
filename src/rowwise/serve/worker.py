"""A worker of a server: answers requests in its main thread, and opens and closes versions as the host tells it.

Commands are executed in a second thread; what changes the service is done by the event loop, between two batches.

At SIGTERM, or when its host is gone, a worker says that it is not ready, and closes connections with their next answer.
After `LINGER_s`, in which requests on their way arrive, it takes no new connections, answers what is left and ends.
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
from rowwise.serve.app import make_app
from rowwise.serve.connection import BoundedConnection
from rowwise.serve.record import Recording, RequestRecorder
from rowwise.serve.service import ScoringService
from rowwise.serve.shared_rows import SharedRows
from rowwise.serve.version import ServedVersion
from rowwise.serve.versions import (
    CloseVersion,
    MoveTraffic,
    OpenVersion,
    TellRefused,
    TrafficMoved,
    VersionOpened,
    VersionRefused,
)

LAST_s = 0.1  # in which the first bytes of the last connections are read
LINGER_s = 0.5  # from SIGTERM to the end of connections without a request
DRAIN_s = 30  # that requests have to end
FULL_s = 1.0  # until connections are taken again where no more files can be opened
PAUSE_s = 0.03  # between parts of the work of opening a version
MAX_DIGITS = 640  # of a whole number in JSON; Python would take milliseconds for one of 4,300
SWITCH_s = 5e-4  # after which the thread that opens a version lets requests pass, and not after 5 ms


class WorkerTask(NamedTuple):
    """What all workers of a server share."""

    # By its number, and a file with its rows; the function is called between parts of the work.
    open_version: Callable[[int, SharedRows, Callable[[], object]], ServedVersion]
    limits: ServiceLimits
    recording: Recording | None = None


def run_worker(task: WorkerTask, number: int, host: Connection, bound: socket.socket) -> None:
    """The main function of a worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the host sends SIGTERM
    torch.set_num_threads(1)  # several would wait for each other between the small operators of a request
    sys.setswitchinterval(SWITCH_s)
    sys.set_int_max_str_digits(MAX_DIGITS)
    service = ScoringService(task.limits)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        """Connections are taken once versions are open."""
        control = _Control(number, task, host, service, asyncio.get_running_loop(), asyncio.Event(), server.drain)
        threading.Thread(target=control.run, daemon=True).start()
        await control.moved.wait()
        gc.collect()
        gc.freeze()  # else each full collection searches all modules: 145 ms in which no request is answered
        server.accept()
        if task.recording is not None:
            service.recorder = RequestRecorder(task.recording, number, service.metrics.unrecorded.inc)
        yield
        if service.recorder is not None:
            service.recorder.close()

    app = make_app(service, lifespan)
    # What strangers do wrong is counted, and not logged.
    config = uvicorn.Config(app, access_log=False, log_level="error", ws="none", timeout_graceful_shutdown=DRAIN_s)
    config.timeout_keep_alive = task.limits.idle_s  # pyrefly: ignore  # uvicorn would have whole seconds
    server = _DrainingServer(config, service, bound)
    server.run(sockets=[])


@final
class _DrainingServer(uvicorn.Server):
    """A server that lets requests on their way arrive before it closes connections.

    All workers wait at one socket. Each takes one connection at a time, and none while it computes. A worker that took
    all that wait would have most of the connections, and the others would be idle.
    """

    def __init__(self, config: uvicorn.Config, service: ScoringService, bound: socket.socket) -> None:
        super().__init__(config)
        self._service, self._bound = service, bound
        self._arriving: set[asyncio.Task[object]] = set()

    def accept(self) -> None:
        """Take connections from now on."""
        self._bound.setblocking(False)
        asyncio.get_running_loop().add_reader(self._bound, self._accept_one)

    def _accept_one(self) -> bool:
        """Take a connection; whether there was one."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._bound.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another worker was faster, or the client has gone
        except OSError as error:  # too many open files
            print(f"no connection can be taken: {error.strerror}", file=sys.stderr)
            loop.remove_reader(self._bound)
            loop.call_later(FULL_s, self._accept_again)
            return False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = loop.create_task(loop.connect_accepted_socket(self._make_protocol, connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        return True

    def _accept_all(self) -> None:
        """Take the connections that wait, as the system cuts those that nobody took."""
        while self._accept_one():
            pass

    def _accept_again(self) -> None:
        if self._bound.fileno() >= 0:  # it is not closed
            self.accept()

    def _make_protocol(self) -> asyncio.Protocol:
        service = self._service
        return BoundedConnection(
            service.limits, service.metrics.count, self.config, self.server_state, self.lifespan.state
        )

    def handle_exit(self, sig: int, frame: object) -> None:
        """Of SIGTERM; the handler runs in the thread of the loop."""
        asyncio.get_running_loop().call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        if not self._service.draining:
            self._service.draining = True
            self._accept_all()
            asyncio.get_running_loop().call_later(LINGER_s, self._close)

    def _close(self) -> None:
        """Take no more connections, and let those that are open end once their requests were read."""
        loop = asyncio.get_running_loop()
        self._accept_all()
        loop.remove_reader(self._bound)
        self._bound.close()
        loop.call_later(LAST_s, setattr, self, "should_exit", True)


class _Control(NamedTuple):
    """Executes the host's commands."""

    number: int
    task: WorkerTask
    host: Connection
    service: ScoringService
    loop: asyncio.AbstractEventLoop
    moved: asyncio.Event  # the service answers
    drain: Callable[[], None]

    def run(self) -> None:
        """Until the host is gone, or the loop is closed."""
        try:
            while not self.loop.is_closed():
                self._execute(self.host.recv())
        except (EOFError, OSError):
            if not self.moved.is_set():
                os._exit(1)  # no request was taken
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.drain)
        except BaseException:
            if self.loop.is_closed():
                return
            traceback.print_exc()
            os._exit(1)  # another worker takes its place

    def _execute(self, command: object) -> None:
        match command:
            case OpenVersion(_, version):
                rows = self.host.recv()
                self._open(version, rows._replace(file=recv_handle(self.host)))
            case CloseVersion(_, version):
                self._change(partial(self.service.close, version))
            case MoveTraffic(_, traffic):
                self._change(partial(self.service.move, traffic))
                self.loop.call_soon_threadsafe(self.moved.set)
                self.host.send(TrafficMoved(self.number, traffic))
            case TellRefused(_, why):
                self._change(partial(setattr, self.service, "refused", why))

    def _open(self, version: int, rows: SharedRows) -> None:
        try:
            opened = self.task.open_version(version, rows, self._pause)
        except Exception as error:  # a version's own code may raise anything
            self.host.send(VersionRefused.because(version, error, self.number))
            return
        finally:
            os.close(rows.file)
        self._change(partial(self.service.open, opened))
        self.host.send(VersionOpened(self.number, version))

    def _pause(self) -> None:
        """Let requests that wait be answered, unless no request is taken yet."""
        if self.moved.is_set():
            time.sleep(PAUSE_s)

    def _change(self, change: Callable[[], object]) -> None:
        """Let the loop make a change, and wait until it has."""
        done = threading.Event()

        def make() -> None:
            change()
            done.set()

        self.loop.call_soon_threadsafe(make)
        done.wait()
