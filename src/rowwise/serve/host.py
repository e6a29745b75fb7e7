"""The process that starts the workers of a server, watches them, and follows the folder of versions.

Workers, and the process that loads the rows of a version, are forks of a server process that has loaded torch. Rows
are in memory without a name, which the system frees with the last process that maps it. A worker that ends is
replaced; meanwhile the others take its connections, as all wait at one socket.
"""

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NamedTuple, final

from rowwise.base.errors import CheckpointError, DataError, PeerError
from rowwise.parallel.comm.spawn import describe_exit, fork_server
from rowwise.serve.shared_rows import SharedRows
from rowwise.serve.traffic import Traffic
from rowwise.serve.versions import (
    Command,
    EndWorker,
    Event,
    FreeRows,
    Lag,
    LoadRows,
    OpenVersion,
    RowsLoaded,
    ServedVersions,
    TrafficRead,
    VersionRefused,
    WorkerEnded,
    WorkerStarted,
)

POLL_s = 0.2  # between two looks at the folder
LOADER_NICE = 10  # workers come first where cores are few
END_s = 60.0  # that workers have to end at SIGTERM
RESTART_s = 1.0  # between two starts of a worker
BACKLOG = 1024  # connections that wait to be taken
LOADS = 3  # of a version whose loading process is killed: the machine may have lacked memory for a moment


def bind(host: str, port: int) -> socket.socket:
    """A socket that takes no connections yet; port 0: any free one."""
    try:
        if not host:
            raise DataError("--host ''", "an address of this machine, such as 127.0.0.1")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise DataError(f"--host {host}: {error.strerror}", "an address of this machine") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise DataError(f"{host}:{port}: {why}", "another --host or --port") from None
    return bound


# Of a version, into a file; given the version that it has to be like, and shared rows that may grow instead.
LoadRowsOf = Callable[[int, int, int | None, SharedRows | None], SharedRows]


class HostTask(NamedTuple):
    """What a server serves, and how."""

    name: str  # of the model
    read_traffic: Callable[[Collection[int]], Traffic]  # given the versions that are in use
    load_rows: LoadRowsOf
    run_worker: Callable[[int, Connection, socket.socket], None]  # the main function of a process
    workers: int
    preload: tuple[str, ...]  # modules that workers need
    metrics: Path  # the folder of their numbers
    load_s: float  # in which the rows of a version are loaded, or it is refused


class _Process(NamedTuple):
    process: BaseProcess
    pipe: Connection


class _LoadedRows(NamedTuple):
    """What a process has loaded: into a file of its own, or `grown` into that of other versions."""

    rows: SharedRows
    grown: bool


@dataclass(slots=True)
class _RowsFile:
    """A file with the rows of versions."""

    file: int
    rows: SharedRows | None  # None: it is empty
    versions: set[int]  # that are in it, or being written to it

    def leave(self, version: int) -> None:
        self.versions.discard(version)
        if not self.versions:
            os.close(self.file)


class _RowsLoader(NamedTuple):
    """A process that loads the rows of a version, into a file of their own or into one of other versions."""

    version: int
    process: _Process
    fresh: _RowsFile
    shared: _RowsFile | None
    end_s: float  # when it is killed


@final
class ServerHost:
    """Runs a server until SIGTERM or Ctrl-C.

    Args:
        task: what is served.
        bound: a socket that takes no connections yet.
        tell: called with lines for the operator.
    """

    def __init__(self, task: HostTask, bound: socket.socket, tell: Callable[[str], None]) -> None:
        self._task, self._bound, self._tell = task, bound, tell
        self._versions, self._lag = ServedVersions(), Lag()
        self._workers: dict[int, _Process] = {}
        self._ended: dict[int, float] = {}  # workers to replace, and when
        self._rows: dict[int, _RowsFile] = {}  # by version
        self._loader: _RowsLoader | None = None
        self._kills: Counter[int] = Counter()  # of processes that loaded a version
        self._next = 0
        self._told: tuple[Traffic | None, frozenset[int]] = (None, frozenset())
        self._trouble = ""  # the last error of reading the folder
        self._stopping = False

    def run(self) -> None:
        """Raises an error if no version can be served, or no worker starts."""
        from prometheus_client import CollectorRegistry

        from rowwise.serve.metrics import WantedMetrics

        self._context, self._metrics = fork_server(self._task.preload), WantedMetrics(CollectorRegistry())
        with ExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, self._stop))
            stack.callback(self._end)
            for _ in range(self._task.workers):
                self._start_worker()
            while not self._stopping:
                self._look()
                self._measure()
                self._wait()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _look(self) -> None:
        """Read the folder, and replace workers."""
        try:
            traffic = self._task.read_traffic(self._in_use())
        except CheckpointError as error:
            if self._versions.wanted is None:
                raise
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._tell(self._trouble)
        else:
            if traffic != self._versions.wanted:
                self._handle(TrafficRead(traffic))
        now_s = time.monotonic()
        for number in [number for number, at_s in self._ended.items() if at_s <= now_s]:
            del self._ended[number]
            self._start_worker()

    def _in_use(self) -> set[int]:
        loading = set() if self._loader is None else {self._loader.version}
        asked = (self._versions.wanted, self._versions.target)
        return {*self._rows, *loading, *(version for traffic in asked if traffic for version in traffic.versions)}

    def _measure(self) -> None:
        """Show what is wanted, and how long something else has answered."""
        versions = self._versions
        assert versions.wanted is not None
        behind_s = self._lag.seconds(versions.wanted, versions.active, versions.target, time.monotonic())
        self._metrics.show(versions.wanted, behind_s)

    def _wait(self) -> None:
        """Take what processes have sent, or wait a little."""
        everyone = [*self._workers.values(), *([self._loader.process] if self._loader else [])]
        ready = wait([one.pipe for one in everyone], POLL_s)
        if self._loader is not None:
            if self._loader.process.pipe in ready:
                self._finish_loading(self._loader)
            elif time.monotonic() > self._loader.end_s:
                self._finish_loading(self._loader, late=True)
        for number, worker in list(self._workers.items()):
            if worker.pipe in ready:
                try:
                    event: Event = worker.pipe.recv()
                except (EOFError, OSError):
                    self._bury(number)
                else:
                    self._handle(event)

    def _handle(self, event: Event) -> None:
        for command in self._versions.handle(event):
            self._execute(command)
        self._show()

    def _execute(self, command: Command) -> None:
        match command:
            case LoadRows(version):
                self._load(version)
            case FreeRows(version):
                self._rows.pop(version).leave(version)
            case EndWorker(worker):
                self._workers[worker].process.kill()
            case _:
                self._send(command.worker, command)

    def _send(self, number: int, command: object) -> None:
        worker = self._workers[number]
        with suppress(OSError):  # it has ended, which `_wait` will see
            worker.pipe.send(command)
            if isinstance(command, OpenVersion):
                rows = self._rows[command.version]
                worker.pipe.send(rows.rows)
                send_handle(worker.pipe, rows.file, worker.process.pid)

    def _show(self) -> None:
        """Tell the operator and the workers what has changed."""
        active, refused = self._versions.active, self._versions.refused
        if active is None:
            if refused:
                raise CheckpointError(next(iter(refused.values())))
            return
        before, known = self._told
        if before != active:
            if before is None:
                self._begin()
            elif active.canary is None:
                self._tell(f"version {active.current} is the current one")
            else:
                share = f"{100 * active.canary.share:g} % of requests"
                self._tell(f"version {active.current} is the current one, version {active.canary.version} has {share}")
        for version in refused.keys() - known:
            self._tell(f"version {version} is refused: {refused[version]}")
        self._told = active, frozenset(refused)

    def _begin(self) -> None:
        self._bound.listen(BACKLOG)
        host, port = self._bound.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        name, active = self._task.name, self._versions.active
        assert active is not None
        self._tell(f"{name} version {active.current} at {url}/v1/models/{name}/score")

    def _start_worker(self) -> None:
        number, self._next = self._next, self._next + 1
        self._workers[number] = self._start(self._task.run_worker, number, bound=self._bound)
        self._handle(WorkerStarted(number))

    def _bury(self, number: int) -> None:
        """Replace a worker that has ended."""
        from prometheus_client.multiprocess import mark_process_dead

        worker = self._workers.pop(number)
        worker.process.join()
        worker.pipe.close()
        mark_process_dead(worker.process.pid, str(self._task.metrics))  # only living workers have its gauges
        if self._versions.active is None:
            raise PeerError(f"worker {number} {describe_exit(worker.process.exitcode)}")
        if not self._stopping:
            self._tell(f"worker {number} {describe_exit(worker.process.exitcode)}; another one starts")
            fast = not self._versions.is_ready(number)
            self._ended[number] = time.monotonic() + (RESTART_s if fast else 0.0)
        self._handle(WorkerEnded(number))

    def _load(self, version: int) -> None:
        active = self._versions.active
        like = None if active is None else active.current
        fresh = _RowsFile(os.memfd_create("rowwise-serve"), None, {version})
        shared = None if like is None else self._rows[like]
        given = None if shared is None else shared.rows
        process = self._start(_load_rows, version, self._task.load_rows, like, given)
        self._loader = _RowsLoader(version, process, fresh, shared, time.monotonic() + self._task.load_s)
        if shared is not None:
            shared.versions.add(version)  # until it is known which file has the rows
        with suppress(OSError):  # it has ended, which `_wait` will see
            for one in (fresh, shared):
                if one is not None:
                    send_handle(process.pipe, one.file, process.process.pid)

    def _finish_loading(self, loader: _RowsLoader, *, late: bool = False) -> None:
        self._loader = None
        version, (process, pipe), fresh, shared, _ = loader
        found: _LoadedRows | VersionRefused
        killed = False
        try:
            if late:
                limit = f"its rows were not loaded within {self._task.load_s:g} s"
                found = VersionRefused(version, f"{limit}; raise the limit with --limit load_s=SECONDS")
            else:
                found = pipe.recv()
        except (EOFError, OSError):
            process.join()
            killed = True
            found = VersionRefused(version, f"the process that loaded it {describe_exit(process.exitcode)}")
        process.kill()  # it may go on for ever after its answer
        process.join()
        pipe.close()
        mine, other = fresh, shared
        if isinstance(found, _LoadedRows) and found.grown and shared is not None:
            mine, other = shared, fresh
        if other is not None:
            other.leave(version)
        if isinstance(found, _LoadedRows):
            mine.rows = found.rows
            self._rows[version] = mine
            self._handle(RowsLoaded(version))
            return
        mine.leave(version)
        self._kills[version] += killed
        if killed and self._kills[version] < LOADS:
            self._tell(f"version {version}: {found.why}; it is loaded again")
            self._load(version)
        else:
            self._handle(found)

    def _start(self, function: Callable[..., None], *args: object, bound: socket.socket | None = None) -> _Process:
        """A process with a pipe to this one."""
        pipe, other = self._context.Pipe()
        given = (*args, other) if bound is None else (*args, other, bound)
        process = self._context.Process(target=function, args=given, daemon=True)
        process.start()
        other.close()
        return _Process(process, pipe)

    def _end(self) -> None:
        """Let workers answer the requests that they have; then end all processes."""
        everyone = list(self._workers.values())
        for number, worker in self._workers.items():
            if self._versions.is_ready(number):
                worker.process.terminate()
            else:
                worker.process.kill()
        end_s = time.monotonic() + END_s
        for worker in everyone:
            worker.process.join(max(0.1, end_s - time.monotonic()))
        for one in [*everyone, *([self._loader.process] if self._loader else [])]:
            one.process.kill()
            one.process.join()


def _load_rows(version: int, load: LoadRowsOf, like: int | None, shared: SharedRows | None, host: Connection) -> None:
    """The main function of the process that loads the rows of a version."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(LOADER_NICE)
    file = recv_handle(host)
    if shared is not None:
        shared = shared._replace(file=recv_handle(host))
    try:
        rows = load(version, file, like, shared)
        host.send(_LoadedRows(rows, grown=rows.file != file))
    except Exception as error:  # a version's own code may raise anything
        host.send(VersionRefused.because(version, error))
