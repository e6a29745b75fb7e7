"""The process that starts the workers of a server, watches them, and follows the folder of versions.

Workers, and the loader of the rows of versions, are forked from a fork server that has loaded torch. Rows are in
anonymous memory (memfd), which the kernel frees with the last process that maps it. A worker that dies is replaced;
meanwhile the others take its connections, as all accept from one socket.

The loader stays, as its first version costs ten times the processor of a later one. Once requests are accepted, it
runs only while a processor is idle; if none ever is, a loader of higher priority replaces it. If it ends, a new one
loads the version again.
"""

import gc
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
from rowwise.parallel.comm.spawn import describe_exit, end_with_parent, fork_server
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
LOADER_NICE = 10  # of a loader for which no processor was idle
END_s = 60.0  # grace period of workers after SIGTERM
RESTART_s = 1.0  # backoff before the restart of a worker that was not ready, and of an unused loader
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
    starved_s: float  # time for which an idle loader may wait for a processor


class _Process(NamedTuple):
    process: BaseProcess
    pipe: Connection


class _RowsToLoad(NamedTuple):
    """A version for the loader; the files of the new rows and of `shared` follow."""

    version: int
    compatible_with: int | None
    shared: SharedRows | None


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


class _VersionLoad(NamedTuple):
    """A version that is being loaded, into a new file or the file of other versions."""

    version: int
    fresh: _RowsFile
    shared: _RowsFile | None
    end_s: float  # deadline, after which the loader is killed
    idle: bool  # whether it is loaded only while a processor is idle
    waited_s: float  # for which the loader had waited for a processor before


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
        self._loader: _Process | None = None
        self._restart_loader_s = 0.0  # time at which to replace an ended loader
        self._load: _VersionLoad | None = None
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
        if self._loader is None and self._restart_loader_s <= now_s:
            self._start_loader()

    def _in_use(self) -> set[int]:
        loading = set() if self._load is None else {self._load.version}
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
        processes = [*self._workers.values(), *([self._loader] if self._loader else [])]
        ready = wait([process.pipe for process in processes], POLL_s)
        if self._loader is not None and self._loader.pipe in ready:
            self._receive_rows(self._loader)
        elif self._load is not None and self._starves(self._load):
            self._log(f"version {self._load.version}: no processor is idle; it is loaded at a higher priority")
            self._end_loader()
            self._release(self._load)
            self._begin_load(self._load.version, idle=False)
        elif self._load is not None and time.monotonic() > self._load.end_s:
            self._end_loader()
            limit = f"its rows were not loaded within {self._task.load_s:g} s"
            reason = f"{limit}; raise the limit with --limit load_s=SECONDS"
            self._finish_load(self._load, VersionRefused(self._load.version, reason))
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
                self._begin_load(version)
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
                self._make_idle()
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

    def _start_loader(self, *, idle: bool = True) -> _Process:
        """Start the loader, idle from its first instructions on."""
        self._loader = loader = self._start(_run_loader, self._task.load_rows)
        if idle:
            self._make_idle()
        else:
            nice = max(LOADER_NICE, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, loader.process.pid or 0, nice)
        return loader

    def _make_idle(self) -> None:
        """Let the loader run only while a processor is idle, which cannot be taken back without privileges.

        Before the first version is active, no request waits.
        """
        if self._loader is not None and self._versions.active is not None:
            for thread in _threads_of(self._loader.process.pid):
                with suppress(OSError):  # it has ended
                    os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))

    def _end_loader(self) -> int | None:
        """End the loader, if it still runs; returns its exit code."""
        assert self._loader is not None
        process, pipe = self._loader
        process.kill()
        process.join()
        pipe.close()
        self._loader, self._restart_loader_s = None, time.monotonic() + RESTART_s
        return process.exitcode

    def _begin_load(self, version: int, *, idle: bool = True) -> None:
        active = self._versions.active
        compatible_with = None if active is None else active.current
        fresh = _RowsFile(os.memfd_create("rowwise-serve"), None, {version})
        shared = None if compatible_with is None else self._rows[compatible_with]
        if shared is not None:
            shared.versions.add(version)  # until the loader reports which file has the rows
        loader = self._loader or self._start_loader(idle=idle)
        if idle:
            self._make_idle()
        waited_s = _waited_s(loader.process.pid)
        end_s = time.monotonic() + self._task.load_s
        self._load = _VersionLoad(version, fresh, shared, end_s, idle and active is not None, waited_s)
        with suppress(OSError):  # it has ended, which `_wait` detects
            loader.pipe.send(_RowsToLoad(version, compatible_with, None if shared is None else shared.rows))
            for rows_file in (fresh, shared):
                if rows_file is not None:
                    send_handle(loader.pipe, rows_file.file, loader.process.pid)

    def _starves(self, load: _VersionLoad) -> bool:
        """Whether an idle loader has waited for a processor for too long."""
        if not load.idle or self._loader is None:
            return False
        return _waited_s(self._loader.process.pid) - load.waited_s > self._task.starved_s

    def _receive_rows(self, loader: _Process) -> None:
        """Receive the answer of the loader, or replace one that has ended."""
        try:
            outcome: _LoadedRows | VersionRefused = loader.pipe.recv()
        except (EOFError, OSError):
            end = describe_exit(self._end_loader())
        else:
            assert self._load is not None
            self._finish_load(self._load, outcome)
            return
        if self._load is None:
            self._log(f"the process that loads versions {end}; another one starts")
            return
        version = self._load.version
        self._kills[version] += 1
        refused = VersionRefused(version, f"the process that loaded it {end}")
        if self._kills[version] < MAX_LOADS:
            self._log(f"version {version}: {refused.reason}; it is loaded again")
            self._release(self._load)
            self._begin_load(version)
        else:
            self._finish_load(self._load, refused)

    def _finish_load(self, load: _VersionLoad, outcome: _LoadedRows | VersionRefused) -> None:
        if isinstance(outcome, VersionRefused):
            self._release(load)
        else:
            kept, dropped = load.fresh, load.shared
            if outcome.appended and load.shared is not None:
                kept, dropped = load.shared, load.fresh
            if dropped is not None:
                dropped.release(load.version)
            kept.rows = outcome.rows
            self._rows[load.version] = kept
        self._load = None
        self._handle(RowsLoaded(load.version) if isinstance(outcome, _LoadedRows) else outcome)

    def _release(self, load: _VersionLoad) -> None:
        """Release the files of a version that was not loaded."""
        for rows_file in (load.fresh, load.shared):
            if rows_file is not None:
                rows_file.release(load.version)

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
        for process in [*workers, *([self._loader] if self._loader else [])]:
            process.process.kill()
            process.process.join()


def _threads_of(pid: int | None) -> list[Path]:
    """The folders in /proc of the threads of a process; none if it has ended."""
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _waited_s(pid: int | None) -> float:
    """Seconds for which the threads of a process could run, but had no processor."""
    waited_ns = 0
    for thread in _threads_of(pid):
        with suppress(OSError):  # it has ended
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def _run_loader(load: LoadRowsFunction, host: Connection) -> None:
    """The main function of the loader: loads the rows of one version after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    first = True
    while True:
        try:
            version, compatible_with, shared = host.recv()
            file = recv_handle(host)
            if shared is not None:
                shared = shared._replace(file=recv_handle(host))
        except (EOFError, OSError):  # the host has ended
            return
        try:
            rows = load(version, file, compatible_with, shared)
            host.send(_LoadedRows(rows, appended=rows.file != file))
        except Exception as error:  # code of the version may raise any exception
            host.send(VersionRefused.because(version, error))
        os.close(file)
        if shared is not None:
            os.close(shared.file)
        gc.collect()  # returns the memory of the version now
        if first:
            gc.freeze()  # else each collection traverses all modules
            first = False
