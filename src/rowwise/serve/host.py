"""The process that starts the workers of a server, watches them, and follows the folder of versions.

Workers, and the process that loads the rows of a version, are forked from a fork server that has loaded torch. Rows
are in anonymous memory (memfd), which the kernel frees with the last process that maps it. A worker that dies is
replaced; meanwhile the others take its connections, as all accept from one socket.
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

POLL_s = 0.2  # polling interval of the folder
LOADER_NICE = 10  # workers have priority over loading
END_s = 60.0  # grace period of workers after SIGTERM
RESTART_s = 1.0  # backoff before the restart of a worker that was not ready
BACKLOG = 1024  # connections not accepted yet
MAX_LOADS = 3  # attempts at a version whose loader is killed, as memory may be short for a moment


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 is any free port."""
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
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise DataError(f"{host}:{port}: {reason}", "another --host or --port") from None
    return bound


# (version, memfd, compatible_with, extend) -> SharedRows: load into the memfd, or append to `extend`.
LoadRowsFunction = Callable[[int, int, int | None, SharedRows | None], SharedRows]


class HostTask(NamedTuple):
    """Configuration of a server."""

    name: str  # of the model
    read_traffic: Callable[[Collection[int]], Traffic]  # its argument: versions in use
    load_rows: LoadRowsFunction
    run_worker: Callable[[int, Connection, socket.socket], None]  # main function of a worker process
    workers: int
    preload: tuple[str, ...]  # modules that workers need
    metrics: Path  # folder of the metrics of workers
    load_s: float  # timeout for loading the rows of a version, which is then refused


class _Process(NamedTuple):
    process: BaseProcess
    pipe: Connection


class _LoadedRows(NamedTuple):
    """Rows loaded into a new file, or `appended` to the file of other versions."""

    rows: SharedRows
    appended: bool


@dataclass(slots=True)
class _RowsFile:
    """A file with the rows of versions."""

    file: int
    rows: SharedRows | None  # None if empty
    versions: set[int]  # in the file, or being written to it; the last one to leave closes it

    def release(self, version: int) -> None:
        self.versions.discard(version)
        if not self.versions:
            os.close(self.file)


class _RowsLoader(NamedTuple):
    """A process that loads the rows of a version, into a new file or the file of other versions."""

    version: int
    process: _Process
    fresh: _RowsFile
    shared: _RowsFile | None
    end_s: float  # deadline, after which it is killed


@final
class ServerHost:
    """Runs a server until SIGTERM or Ctrl-C.

    Args:
        task: the configuration.
        bound: a socket that does not listen yet.
        log: called with lines for the operator.
    """

    def __init__(self, task: HostTask, bound: socket.socket, log: Callable[[str], None]) -> None:
        self._task, self._bound, self._log = task, bound, log
        self._versions, self._lag = ServedVersions(), Lag()
        self._workers: dict[int, _Process] = {}
        self._restarts: dict[int, float] = {}  # time at which to replace each ended worker
        self._rows: dict[int, _RowsFile] = {}  # by version
        self._loader: _RowsLoader | None = None
        self._kills: Counter[int] = Counter()  # loaders killed, by version
        self._next_worker = 0
        self._reported: tuple[Traffic | None, frozenset[int]] = (None, frozenset())
        self._last_error = ""  # last error of reading the folder, logged once
        self._stopping = False

    def run(self) -> None:
        """Serve; raises if no version can be served, or no worker starts."""
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
                self._poll_folder()
                self._publish_lag()
                self._wait()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _poll_folder(self) -> None:
        """Read the folder, and replace workers."""
        try:
            traffic = self._task.read_traffic(self._in_use())
        except CheckpointError as error:
            if self._versions.wanted is None:
                raise
            if str(error) != self._last_error:
                self._last_error = str(error)
                self._log(self._last_error)
        else:
            if traffic != self._versions.wanted:
                self._handle(TrafficRead(traffic))
        now_s = time.monotonic()
        for number in [number for number, at_s in self._restarts.items() if at_s <= now_s]:
            del self._restarts[number]
            self._start_worker()

    def _in_use(self) -> set[int]:
        loading = set() if self._loader is None else {self._loader.version}
        traffics = (self._versions.wanted, self._versions.target)
        return {*self._rows, *loading, *(version for traffic in traffics if traffic for version in traffic.versions)}

    def _publish_lag(self) -> None:
        """Publish the wanted version, and the seconds for which other versions have been served."""
        versions = self._versions
        assert versions.wanted is not None
        behind_s = self._lag.seconds(versions.wanted, versions.active, versions.target, time.monotonic())
        self._metrics.set(versions.wanted, behind_s)

    def _wait(self) -> None:
        """Handle messages of processes, or wait up to POLL_s."""
        processes = [*self._workers.values(), *([self._loader.process] if self._loader else [])]
        ready = wait([process.pipe for process in processes], POLL_s)
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
                    self._replace_worker(number)
                else:
                    self._handle(event)

    def _handle(self, event: Event) -> None:
        for command in self._versions.handle(event):
            self._execute(command)
        self._report()

    def _execute(self, command: Command) -> None:
        match command:
            case LoadRows(version):
                self._load(version)
            case FreeRows(version):
                self._rows.pop(version).release(version)
            case EndWorker(worker):
                self._workers[worker].process.kill()
            case _:
                self._send(command.worker, command)

    def _send(self, number: int, command: object) -> None:
        worker = self._workers[number]
        with suppress(OSError):  # it has ended, which `_wait` detects
            worker.pipe.send(command)
            if isinstance(command, OpenVersion):
                rows = self._rows[command.version]
                worker.pipe.send(rows.rows)
                send_handle(worker.pipe, rows.file, worker.process.pid)

    def _report(self) -> None:
        """Log changes of the active and refused versions; listen once there is an active one."""
        active, refused = self._versions.active, self._versions.refused
        if active is None:
            if refused:
                raise CheckpointError(next(iter(refused.values())))
            return
        reported, known_refused = self._reported
        if reported != active:
            if reported is None:
                self._listen()
            elif active.canary is None:
                self._log(f"version {active.current} is the current one")
            else:
                share = f"{100 * active.canary.share:g} % of requests"
                self._log(f"version {active.current} is the current one, version {active.canary.version} has {share}")
        for version in refused.keys() - known_refused:
            self._log(f"version {version} is refused: {refused[version]}")
        self._reported = active, frozenset(refused)

    def _listen(self) -> None:
        self._bound.listen(BACKLOG)
        host, port = self._bound.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        name, active = self._task.name, self._versions.active
        assert active is not None
        self._log(f"{name} version {active.current} at {url}/v1/models/{name}/score")

    def _start_worker(self) -> None:
        number, self._next_worker = self._next_worker, self._next_worker + 1
        self._workers[number] = self._start(self._task.run_worker, number, bound=self._bound)
        self._handle(WorkerStarted(number))

    def _replace_worker(self, number: int) -> None:
        """Replace a worker that has ended."""
        from prometheus_client.multiprocess import mark_process_dead

        worker = self._workers.pop(number)
        worker.process.join()
        worker.pipe.close()
        mark_process_dead(worker.process.pid, str(self._task.metrics))  # drops its gauges
        if self._versions.active is None:
            raise PeerError(f"worker {number} {describe_exit(worker.process.exitcode)}")
        if not self._stopping:
            self._log(f"worker {number} {describe_exit(worker.process.exitcode)}; another one starts")
            failed_early = not self._versions.is_ready(number)
            self._restarts[number] = time.monotonic() + (RESTART_s if failed_early else 0.0)
        self._handle(WorkerEnded(number))

    def _load(self, version: int) -> None:
        active = self._versions.active
        compatible_with = None if active is None else active.current
        fresh = _RowsFile(os.memfd_create("rowwise-serve"), None, {version})
        shared = None if compatible_with is None else self._rows[compatible_with]
        shared_rows = None if shared is None else shared.rows
        process = self._start(_load_rows, version, self._task.load_rows, compatible_with, shared_rows)
        self._loader = _RowsLoader(version, process, fresh, shared, time.monotonic() + self._task.load_s)
        if shared is not None:
            shared.versions.add(version)  # until the loader reports which file has the rows
        with suppress(OSError):  # it has ended, which `_wait` detects
            for rows_file in (fresh, shared):
                if rows_file is not None:
                    send_handle(process.pipe, rows_file.file, process.process.pid)

    def _finish_loading(self, loader: _RowsLoader, *, late: bool = False) -> None:
        self._loader = None
        version, (process, pipe), fresh, shared, _ = loader
        outcome: _LoadedRows | VersionRefused
        killed = False
        try:
            if late:
                limit = f"its rows were not loaded within {self._task.load_s:g} s"
                outcome = VersionRefused(version, f"{limit}; raise the limit with --limit load_s=SECONDS")
            else:
                outcome = pipe.recv()
        except (EOFError, OSError):
            process.join()
            killed = True
            outcome = VersionRefused(version, f"the process that loaded it {describe_exit(process.exitcode)}")
        process.kill()  # it may hang after its answer
        process.join()
        pipe.close()
        kept, dropped = fresh, shared
        if isinstance(outcome, _LoadedRows) and outcome.appended and shared is not None:
            kept, dropped = shared, fresh
        if dropped is not None:
            dropped.release(version)
        if isinstance(outcome, _LoadedRows):
            kept.rows = outcome.rows
            self._rows[version] = kept
            self._handle(RowsLoaded(version))
            return
        kept.release(version)
        self._kills[version] += killed
        if killed and self._kills[version] < MAX_LOADS:
            self._log(f"version {version}: {outcome.reason}; it is loaded again")
            self._load(version)
        else:
            self._handle(outcome)

    def _start(self, function: Callable[..., None], *args: object, bound: socket.socket | None = None) -> _Process:
        """Start a process with a pipe to this one."""
        pipe, remote_pipe = self._context.Pipe()
        arguments = (*args, remote_pipe) if bound is None else (*args, remote_pipe, bound)
        process = self._context.Process(target=function, args=arguments, daemon=True)
        process.start()
        remote_pipe.close()
        return _Process(process, pipe)

    def _end(self) -> None:
        """Let workers finish their requests; then end all processes."""
        workers = list(self._workers.values())
        for number, worker in self._workers.items():
            if self._versions.is_ready(number):
                worker.process.terminate()
            else:
                worker.process.kill()
        end_s = time.monotonic() + END_s
        for worker in workers:
            worker.process.join(max(0.1, end_s - time.monotonic()))
        for process in [*workers, *([self._loader.process] if self._loader else [])]:
            process.process.kill()
            process.process.join()


def _load_rows(
    version: int, load: LoadRowsFunction, compatible_with: int | None, shared: SharedRows | None, host: Connection
) -> None:
    """The main function of the process that loads the rows of a version."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(LOADER_NICE)
    file = recv_handle(host)
    if shared is not None:
        shared = shared._replace(file=recv_handle(host))
    try:
        rows = load(version, file, compatible_with, shared)
        host.send(_LoadedRows(rows, appended=rows.file != file))
    except Exception as error:  # code of the version may raise any exception
        host.send(VersionRefused.because(version, error))
