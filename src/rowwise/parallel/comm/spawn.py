"""`RankProcesses`, `run_processes`: start ranks as processes of this machine, watch them, and end them together.

[Note: How ranks end] A rank answers once, with its result or its error. After the first failure, the others have a few
seconds to report their errors; then they are killed. Ctrl-C reaches all processes of a terminal's job,
SIGTERM only the parent: ranks ignore SIGINT, and the parent forwards either as SIGTERM, so each rank is asked to stop
once. Ranks watch their parent, and end at once after it.

The parent does not load torch, which would take seconds: ranks are forks of a server process that has loaded it. Needs
a system with fork.
"""

import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Self, TypeVar, final

from rowwise.base.errors import PeerError, one_line
from rowwise.base.scratch import Scratch
from rowwise.parallel.comm.rank_start import RankStart
from rowwise.parallel.comm.simulated_link import SimulatedLink
from rowwise.tables.spec import Topology

T = TypeVar("T")
SOCKET_FOLDER_bytes = 48  # a socket's path has 103 (macOS) or 107 (Linux); multiprocessing adds 32, we 21
AFTER_SERVER = -200  # priority at exit: after -100, at which multiprocessing removes its own folder
GRACE_S = 5.0  # time for the other ranks to report their errors after the first failure

# Likeliest cause first: killed by a signal, unexpected exception, expected error, `PeerError` that another rank's
# failure caused, no answer in time.
FailureKind = Literal["killed", "bug", "user_error", "peer_failed", "timeout"]
KINDS: tuple[FailureKind, ...] = ("killed", "bug", "user_error", "peer_failed", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The failure of one rank."""

    kind: FailureKind
    rank: int
    line: str  # one line for the user
    trace: str = ""
    exit_code: int | None = None  # exit code of a process without an answer; negative for a signal

    def __str__(self) -> str:
        return f"rank {self.rank} " + (f"failed: {self.trace}" if self.trace else self.line)


@final
class RanksFailed(PeerError):
    """Ranks failed; the message has the error of each, the likely cause first."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        self.failures = sorted(failures, key=lambda failure: (KINDS.index(failure.kind), failure.rank))
        super().__init__("\n".join(map(str, self.failures)))

    @property
    def line(self) -> str:
        """The likely cause in one line; it names the rank unless all ranks report the same."""
        first = self.failures[0]
        if first.kind in ("killed", "timeout"):
            return f"rank {first.rank} {first.line}"
        alike = len(self.failures) > 1 and all(failure.line == first.line for failure in self.failures)
        return first.line if alike else f"rank {first.rank}: {first.line}"


@final
class RankProcesses:
    """The rank processes of a world; leaving the `with` kills those that still run.

    `function` is pickled, so it must be importable. Several hosts are simulated on this one.
    """

    def __init__(
        self,
        topology: Topology,
        function: Callable[..., Any],
        args: Sequence[Any],
        settings: RankStart | None = None,
        folder: str = "",
    ) -> None:
        """The `with` starts the processes. Ranks meet in `folder`, which is kept, or in a temporary folder."""
        self._work = pickle.dumps((topology, settings or RankStart(), function, tuple(args)))
        self._world, self._preload = topology.world, (settings or RankStart()).preload
        self._scratch = None if folder else Scratch()
        self._folder = folder if self._scratch is None else str(self._scratch.path)
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> Self:
        context = fork_server(("rowwise.parallel.comm.launch", *self._preload))
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            for rank in range(self._world):
                answer, to_parent = context.Pipe(duplex=False)
                process_args = (rank, self._folder, self._work, to_parent)
                process = context.Process(target=_run_rank, args=process_args, daemon=True, name=f"rank {rank}")
                process.start()
                to_parent.close()
                self._ranks.append((process, answer))
            undo.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        for process, _ in self._ranks:
            process.kill()
        for process, _ in self._ranks:
            process.join(GRACE_S)
        if self._scratch is not None:
            self._scratch.close()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to all ranks."""
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGTERM)

    def wait(self, limit_s: float | None = None) -> list[Any]:
        """The results of all ranks in rank order; raises `RanksFailed`. See [Note: How ranks end]."""
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        running = {answer: rank for rank, (_, answer) in enumerate(self._ranks)}
        end_s = None if limit_s is None else time.monotonic() + limit_s
        while running and (ready := wait(list(running), None if end_s is None else max(0.0, end_s - time.monotonic()))):
            for rank in sorted(running.pop(answer) for answer in list(running) if answer in ready):
                answer = self._receive(rank)
                if isinstance(answer, RankFailure):
                    failures.append(answer)
                    grace_s = time.monotonic() + GRACE_S
                    end_s = grace_s if end_s is None else min(end_s, grace_s)
                else:
                    (results[rank],) = answer
        late = "has not ended, and was stopped" + (f" (time limit {limit_s:g} s)" if limit_s is not None else "")
        failures += [RankFailure(kind="timeout", rank=rank, line=late) for rank in running.values()]
        if failures:
            raise RanksFailed(failures)
        return [results[rank] for rank in range(self._world)]

    def _receive(self, rank: int) -> tuple[Any] | RankFailure:
        process, answer = self._ranks[rank]
        try:
            return pickle.loads(answer.recv_bytes())
        except (EOFError, OSError):
            process.join(GRACE_S)
            return RankFailure(
                kind="killed", rank=rank, line=describe_exit(process.exitcode), exit_code=process.exitcode
            )


def run_processes(  # noqa: PLR0913 - one for each setting
    world: int | Topology,
    function: Callable[..., T],
    *args: Any,
    timeout_s: float = 300.0,
    shared_memory: bool = False,
    threads: int | None = 1,
    limit_s: float | None = None,
    link: SimulatedLink | None = None,
) -> list[T]:
    """`function(comm, *args)` of each rank, run in a process each; raises `RanksFailed`.

    No rank waits longer than `timeout_s` for another; `limit_s` limits the whole run, by default without limit.
    """
    topology = Topology(devices=world) if isinstance(world, int) else world
    settings = RankStart(timeout_s=timeout_s, shared_memory=shared_memory, threads=threads, link=link)
    with RankProcesses(topology, function, args, settings) as ranks:
        return ranks.wait(limit_s)


def fork_server(preload: Sequence[str]) -> ForkServerContext:
    """Start the fork server with these modules preloaded, once; processes of the context are its forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *preload])
    # The server inherits the signal handling: Ctrl-C while it imports torch would print a traceback.
    with _ignoring_ctrl_c(), _short_socket_path():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _short_socket_path() -> Iterator[None]:
    """Sets a short temporary folder for the fork server's socket, whose path has a maximal length."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > SOCKET_FOLDER_bytes:
        tempfile.tempdir = "/tmp"
    try:
        tempfile.tempdir = _server_folder()
        yield
    finally:
        tempfile.tempdir = before


@functools.cache
def _server_folder() -> str:
    scratch = Scratch()
    util.Finalize(None, scratch.close, exitpriority=AFTER_SERVER)
    return str(scratch.path)


def describe_exit(exit_code: int | None) -> str:
    """How a process ended without an answer."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code} and no error message"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + (" (out of memory?)" if -exit_code == signal.SIGKILL else "")


def _run_rank(rank: int, folder: str, work: bytes, to_parent: Connection) -> None:
    """The main function of a rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(folder)
    comm = None
    try:
        from rowwise.parallel.comm.launch import join_local_world

        topology, settings, function, args = pickle.loads(work)
        comm = join_local_world(rank, folder, topology, settings)
        answer = pickle.dumps((function(comm, *args),))
        comm.close()
    except BaseException as error:
        to_parent.send_bytes(pickle.dumps(_explain(rank, error)))
        # Not after a `PeerError`: closing would make this rank look like the cause.
        if comm is not None and not isinstance(error, PeerError):
            with contextlib.suppress(PeerError):
                comm.close()  # waits until the other ranks have read this rank's status
        raise SystemExit(1) from None
    to_parent.send_bytes(answer)


def _explain(rank: int, error: BaseException) -> RankFailure:
    line, trace = one_line(error), "".join(traceback.format_exception(error))
    kind: FailureKind = "peer_failed" if isinstance(error, PeerError) else "bug" if line is None else "user_error"
    return RankFailure(kind=kind, rank=rank, line=line or f"{type(error).__name__}: {error}", trace=trace)


def end_with_parent(folder: str | None = None) -> None:
    """End this process when the parent has ended, and remove the folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="watching the parent", daemon=True).start()
