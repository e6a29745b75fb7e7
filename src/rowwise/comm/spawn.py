"""Ranks as new processes of this machine: made, watched, and ended together.

[Note: how ranks end] A rank answers once: with a result, or with why it has none. Once one has failed, the others have
a few seconds to notice and to say what reached them; then they are stopped. Ctrl-C at a terminal goes to all processes
of a job, and a polite kill to one of them, so ranks ignore the former and the parent passes either on as SIGTERM:
however the wish to stop comes, each rank gets it. Ranks watch their parent, and end at once if it is gone.

The processes are forks of one server that has. Known limits: systems without fork.
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
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Self, TypeVar, final

from rowwise.comm.rank_start import RankStart
from rowwise.errors import PeerError, one_line
from rowwise.scratch import Scratch
from rowwise.spec import Topology

T = TypeVar("T")
SOCKET_FOLDER_bytes = 48  # of the 103 (macOS) or 107 (Linux) of a socket's name; multiprocessing adds 32, we 21
AFTER_SERVER = -200  # at the end of the process; multiprocessing removes its own folder at -100
GRACE_S = 5.0  # after the first rank failed, for the others to notice and to say so

# From what explains most: a process that was killed says nothing, and whom a failure has reached is not its cause.
Kind = Literal["killed", "bug", "refused", "reached", "late"]
KINDS: tuple[Kind, ...] = ("killed", "bug", "refused", "reached", "late")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The error of a rank that gave no result."""

    kind: Kind
    rank: int
    line: str  # for people
    trace: str = ""
    exit_code: int | None = None  # of a process that said nothing; negative: the signal

    def __str__(self) -> str:
        return f"rank {self.rank} " + (f"failed: {self.trace}" if self.trace else self.line)


@final
class RanksFailed(PeerError):
    """Ranks failed; says of each what it said, the likely cause first."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        self.failures = sorted(failures, key=lambda failure: (KINDS.index(failure.kind), failure.rank))
        super().__init__("\n".join(map(str, self.failures)))

    @property
    def line(self) -> str:
        """The cause alone; the rank is named unless all ranks say the same."""
        first = self.failures[0]
        if first.kind in ("killed", "late"):
            return f"rank {first.rank} {first.line}"
        alike = len(self.failures) > 1 and all(failure.line == first.line for failure in self.failures)
        return first.line if alike else f"rank {first.rank}: {first.line}"


@final
class RankProcesses:
    """The processes of a world; leaving the `with` ends those that are still there.

    The function is found by its name, so it belongs to a module; several hosts are pretended.
    """

    def __init__(
        self,
        topology: Topology,
        function: Callable[..., Any],
        args: Sequence[Any],
        making: RankStart | None = None,
        folder: str = "",
    ) -> None:
        """Nothing is started before the `with`. Ranks meet in `folder`, which stays, or in one of their own."""
        self._work = pickle.dumps((topology, making or RankStart(), function, tuple(args)))
        self._world, self._preload = topology.world, (making or RankStart()).preload
        self._scratch = None if folder else Scratch()
        self._folder = folder if self._scratch is None else str(self._scratch.path)
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "rowwise.comm.launch", *self._preload])
        # It keeps how it begins, and Ctrl-C while it loads would be a traceback.
        with _ignoring_ctrl_c(), _room_for_a_socket():
            forkserver.ensure_running()
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            for rank in range(self._world):
                answer, to_parent = context.Pipe(duplex=False)
                given = (rank, self._folder, self._work, to_parent)
                process = context.Process(target=_run_rank, args=given, daemon=True, name=f"rank {rank}")
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
        """Pass a wish to stop on to all ranks."""
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGTERM)

    def wait(self, limit_s: float | None = None) -> list[Any]:
        """What the ranks answer, in rank order. See [Note: how ranks end]."""
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        left = {answer: rank for rank, (_, answer) in enumerate(self._ranks)}
        end_s = None if limit_s is None else time.monotonic() + limit_s
        while left and (ready := wait(list(left), None if end_s is None else max(0.0, end_s - time.monotonic()))):
            for rank in sorted(left.pop(answer) for answer in list(left) if answer in ready):
                said = self._hear(rank)
                if isinstance(said, RankFailure):
                    failures.append(said)
                    grace_s = time.monotonic() + GRACE_S
                    end_s = grace_s if end_s is None else min(end_s, grace_s)
                else:
                    (results[rank],) = said
        late = "has not ended, and was stopped" + (f" (time limit {limit_s:g} s)" if limit_s is not None else "")
        failures += [RankFailure(kind="late", rank=rank, line=late) for rank in left.values()]
        if failures:
            raise RanksFailed(failures)
        return [results[rank] for rank in range(self._world)]

    def _hear(self, rank: int) -> tuple[Any] | RankFailure:
        process, answer = self._ranks[rank]
        try:
            return pickle.loads(answer.recv_bytes())
        except (EOFError, OSError):
            process.join(GRACE_S)
            return RankFailure(kind="killed", rank=rank, line=_fate(process.exitcode), exit_code=process.exitcode)


def run_processes(
    world: int | Topology,
    function: Callable[..., T],
    *args: Any,
    timeout_s: float = 300.0,
    shared_memory: bool = False,
    threads: int | None = 1,
    limit_s: float | None = None,
) -> list[T]:
    """What `function(comm, *args)` gives on each rank of a world of new processes; raises what ranks that fail say.

    No rank waits longer than `timeout_s` for another; the whole may take `limit_s`, or as long as it needs.
    """
    topology = Topology(devices=world) if isinstance(world, int) else world
    making = RankStart(timeout_s=timeout_s, shared_memory=shared_memory, threads=threads)
    with RankProcesses(topology, function, args, making) as ranks:
        return ranks.wait(limit_s)


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
def _room_for_a_socket() -> Iterator[None]:
    """The server listens in a folder of this process, whose name must not be longer than a socket's can be."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > SOCKET_FOLDER_bytes:
        tempfile.tempdir = "/tmp"
    try:
        tempfile.tempdir = _folder_of_server()
        yield
    finally:
        tempfile.tempdir = before


@functools.cache
def _folder_of_server() -> str:
    scratch = Scratch()
    util.Finalize(None, scratch.close, exitpriority=AFTER_SERVER)
    return str(scratch.path)


def _fate(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}, and said nothing"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + (" (out of memory?)" if -exit_code == signal.SIGKILL else "")


def _run_rank(rank: int, folder: str, work: bytes, to_parent: Connection) -> None:
    """The life of one process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent(folder)
    comm = None
    try:
        from rowwise.comm.launch import join_local_world

        topology, making, function, args = pickle.loads(work)
        comm = join_local_world(rank, folder, topology, making)
        answer = pickle.dumps((function(comm, *args),))
        comm.close()
    except BaseException as error:
        to_parent.send_bytes(pickle.dumps(_explain(rank, error)))
        # Whom another's failure has reached just ends: to close its side would make it look like the one that failed.
        if comm is not None and not isinstance(error, PeerError):
            with contextlib.suppress(PeerError):
                comm.close()  # the others may still read why
        raise SystemExit(1) from None
    to_parent.send_bytes(answer)


def _explain(rank: int, error: BaseException) -> RankFailure:
    line, trace = one_line(error), "".join(traceback.format_exception(error))
    kind: Kind = "reached" if isinstance(error, PeerError) else "bug" if line is None else "refused"
    return RankFailure(kind=kind, rank=rank, line=line or f"{type(error).__name__}: {error}", trace=trace)


def _end_with_parent(folder: str) -> None:
    """Leave nothing behind where the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="watching the parent", daemon=True).start()
