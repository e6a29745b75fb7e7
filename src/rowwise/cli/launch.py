"""Starts the ranks of train and resume: this process alone, processes of its own (`--nproc`), or a rank of torchrun.

A process that starts ranks only waits for them and loads no torch; see [Note: How ranks end] in
`parallel/comm/spawn.py`.
"""

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, final

import typer

from rowwise.base.errors import AgreedError, PeerError, RowwiseError, SpecError, one_line, printable
from rowwise.base.scratch import Scratch, remove_stale_folders
from rowwise.cli.environment import CommandEnvironment, Torchrun
from rowwise.cli.run_request import RUN, MemoryNotes, NoteStore, RunRequest
from rowwise.cli.signals import note_signals
from rowwise.cli.terminal import make_terminal
from rowwise.parallel.comm.rank_start import RankStart
from rowwise.parallel.comm.spawn import RankProcesses, RanksFailed
from rowwise.tables.spec import Topology

if TYPE_CHECKING:
    from rowwise.parallel.comm.interface import Comm

MAX_RANKS = 1024  # processes on one machine
RESTART_HINT = "restart all ranks from the newest checkpoint: rowwise resume RUN, or train with the same --run"
TIMEOUT_S = 1800.0  # for ranks that hang or lag behind; a rank that dies is detected at once
MAX_TIMEOUT_S = 1e7
# Imported once, before ranks are forked. pyarrow imports pandas, where installed, with the first number it converts.
PRELOADED = ("rowwise.cli.rank", "pandas")


def launch(
    request: RunRequest, nproc: int | None, timeout: float | None, environment: CommandEnvironment
) -> Path | None:
    """Train or resume on the ranks that `parse_ranks` has accepted; raises typer.Exit on a failure.

    Returns the folder of the run, or None on ranks of torchrun.
    """
    timeout_s = TIMEOUT_S if timeout is None else timeout
    remove_stale_folders()
    if environment.torchrun is None:  # one host has no order, but the file must be valid
        request.check_network()
    notes = MemoryNotes()
    if environment.torchrun is not None:
        code = _run_torchrun_rank(request, environment.torchrun, timeout_s)
    elif nproc is None or nproc == 1:
        with make_terminal(stderr=True, quiet=request.as_json).status("starting"):
            from rowwise.cli.rank import run_rank

        code = run_rank(request, None, notes)
    else:
        if request.recipe is not None:  # fail once, before any rank starts
            from rowwise.recipes.recipe import check_ranks

            check_ranks(request.recipe, nproc)
        code = _run_local_ranks(request, nproc, timeout_s, notes)
    if code:
        raise typer.Exit(code)
    run = notes.get(RUN)
    return None if run is None else _relative(Path(run))


def parse_ranks(nproc: int | None, timeout: float | None, environment: CommandEnvironment) -> int:
    """The number of ranks; raises if --nproc, --timeout and torchrun contradict each other."""
    if nproc is not None and nproc < 1:
        raise SpecError(f"--nproc {nproc}", "at least 1")
    if nproc is not None and nproc > MAX_RANKS:
        raise SpecError(f"--nproc {nproc}", f"at most {MAX_RANKS} processes on one machine")
    if nproc is not None and environment.torchrun is not None:
        raise SpecError(
            f"--nproc {nproc} under torchrun, which has started {environment.torchrun.world} ranks",
            hint="leave out --nproc, or start rowwise without torchrun",
        )
    ranks = environment.torchrun.world if environment.torchrun is not None else nproc or 1
    if timeout is not None and not 0 < timeout <= MAX_TIMEOUT_S:
        raise SpecError(f"--timeout {timeout:g}", f"more than 0 seconds, and at most {MAX_TIMEOUT_S:g}")
    if timeout is not None and ranks == 1:
        raise SpecError(f"--timeout {timeout:g} with one rank, which waits for no other: leave out --timeout")
    return ranks


def _run_torchrun_rank(request: RunRequest, torchrun: Torchrun, timeout_s: float) -> int:
    """Run as a rank of torchrun, and print its error; an AgreedError is printed by the rank that failed."""
    from rowwise.cli.rank import run_rank
    from rowwise.parallel.comm.launch import ListeningSocket, TorchrunNotes, meet
    from rowwise.recipes.hosts import order_hosts

    comm = None
    try:
        listener = None if torchrun.listener is None else ListeningSocket(torchrun.listener, torchrun.world)
        meeting = meet(timeout_s, torchrun.attempt, listener)
        notes = TorchrunNotes(meeting.world.store)
        earlier_run = notes.get(RUN)
        run = Path(earlier_run) if earlier_run else request.folder if request.recipe is None else None
        network = order_hosts(meeting, request.network if earlier_run is None else None, run)
        comm = meeting.join() if network is None else meeting.join(network.ordered.order, sums=network.ordered.sums)
        code = run_rank(request, comm, notes, network=network)
    except (RowwiseError, OSError) as error:
        line = one_line(error)
        if line is None:
            raise
        if not isinstance(error, AgreedError):
            prefixed = line if line.startswith(f"rank {torchrun.rank}: ") else f"rank {torchrun.rank}: {line}"
            restart_hint = f"; {RESTART_HINT}" if isinstance(error, PeerError) else ""
            print(f"rowwise: {prefixed}{restart_hint}", file=sys.stderr, flush=True)
            return 2  # without close(), which would wait for ranks that wait for this one
        code = 2
    if comm is not None:
        comm.close()
    return code


def _run_local_ranks(request: RunRequest, nproc: int, timeout_s: float, notes: NoteStore) -> int:
    topology = Topology(devices=nproc)
    start = RankStart(timeout_s=timeout_s, shared_memory=True, threads=None, preload=PRELOADED)
    received: list[int] = []
    with Scratch() as scratch:
        folder = str(scratch.path)
        try:
            with ExitStack() as stack:
                with make_terminal(stderr=True, quiet=request.as_json).status(f"starting {nproc} ranks"):
                    ranks = stack.enter_context(
                        RankProcesses(topology, run_local_rank, (request, folder), start, folder)
                    )
                received = stack.enter_context(note_signals(ranks.ask_to_stop))
                codes = ranks.wait()
        except RanksFailed as failed:
            if received and all(f.exit_code == -signal.SIGTERM or f.kind == "peer_failed" for f in failed.failures):
                name = "Ctrl-C" if received[0] == signal.SIGINT else "SIGTERM"
                return _print_error(f"stopped by {name}", 128 + received[0])
            run = FileNotes(folder).get(RUN)
            return _print_failure(
                failed, None if run is None else request.resume_command(_relative(Path(run)), topology)
            )
        notes.put(RUN, FileNotes(folder).get(RUN) or "")
        return 128 + received[0] if received else max(codes)


def run_local_rank(comm: "Comm", request: RunRequest, folder: str) -> int:
    from rowwise.cli.rank import run_rank

    return run_rank(request, comm, FileNotes(folder), watched=True)


@final
class FileNotes:
    """Notes as files in a folder, which the launching process reads as well."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def get(self, name: str) -> str | None:
        path = self._folder / name
        return path.read_text() if path.exists() else None

    def put(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)


def _print_failure(failed: RanksFailed, resume_command: str | None) -> int:
    """Print one line, or the traceback of a bug; returns the exit code."""
    first = failed.failures[0]
    if sys.stderr.isatty():
        print("\r\x1b[2K\x1b[?25h", end="", file=sys.stderr)  # clear the live line of a killed rank
    if first.kind == "bug":
        print(f"rank {first.rank}: {printable(first.trace)}", end="", file=sys.stderr)
        return 1
    if first.kind != "killed":
        return _print_error(failed.line, 2)
    signaled = first.exit_code is not None and first.exit_code < 0
    line = failed.line if resume_command is None else f"{failed.line}; resume it with: {resume_command}"
    return _print_error(line, 128 - first.exit_code if signaled and first.exit_code is not None else 1)


def _print_error(line: str, code: int) -> int:
    print(f"rowwise: {printable(line)}", file=sys.stderr)
    return code


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
