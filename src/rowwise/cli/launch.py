"""How a run gets its ranks: it is one of torchrun's, makes some, or is alone. And how a console hears of their end.

Nothing here loads torch before it has to: whoever makes ranks only waits for them, see [Note: how ranks end] in
`comm/spawn.py`.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, final

import typer

from rowwise.cli.console import console_for
from rowwise.cli.environment import CommandEnvironment, Torchrun
from rowwise.cli.run_request import RunRequest
from rowwise.comm.rank_start import RankStart
from rowwise.comm.spawn import RankProcesses, RanksFailed
from rowwise.errors import AgreedError, RowwiseError, SpecError, one_line
from rowwise.scratch import Scratch, sweep
from rowwise.spec import Topology
from rowwise.textfile import printable

if TYPE_CHECKING:
    from rowwise.comm.seam import Comm

# Once for all ranks; pandas, where it is installed, is what pyarrow loads with the first number that it hands over.
MOST_HERE = 1024  # ranks
TIMEOUT_S = 1800.0  # a rank that is gone is noticed at once; this is for one that hangs, or has much more to do
MOST_TIMEOUT_S = 1e7
PRELOADED = ("rowwise.cli.rank", "pandas")


def launch(order: RunRequest, nproc: int | None, timeout: float | None, around: CommandEnvironment) -> None:
    """Do it, on as many ranks as there are to be, which `count_ranks` has found right."""
    timeout_s = TIMEOUT_S if timeout is None else timeout
    sweep()
    if around.torchrun is not None:
        code = _join(order, around.torchrun, timeout_s)
    elif nproc is None or nproc == 1:
        with console_for(quiet=order.as_json).status("starting"):
            from rowwise.cli.rank import run_rank

        code = run_rank(order, None, None)
    else:
        if order.recipe is not None:  # before there are ranks to say so
            from rowwise.recipes.recipe import check_ranks

            check_ranks(order.recipe, nproc)
        code = _make(order, nproc, timeout_s)
    if code:
        raise typer.Exit(code)


def count_ranks(nproc: int | None, timeout: float | None, around: CommandEnvironment) -> int:
    """How many there are to be; refuses what is no number of them, and a time to wait where there is one."""
    if nproc is not None and nproc < 1:
        raise SpecError(f"--nproc {nproc}: want at least 1")
    if nproc is not None and nproc > MOST_HERE:
        raise SpecError(f"--nproc {nproc}: want at most {MOST_HERE}, as all are processes of this machine")
    if nproc is not None and around.torchrun is not None:
        out = "leave --nproc away, or start rowwise without torchrun"
        raise SpecError(f"--nproc {nproc} under torchrun, which has started {around.torchrun.world} ranks: {out}")
    ranks = around.torchrun.world if around.torchrun is not None else nproc or 1
    if timeout is not None and not 0 < timeout <= MOST_TIMEOUT_S:
        raise SpecError(f"--timeout {timeout:g}: want more than 0 seconds, and at most {MOST_TIMEOUT_S:g}")
    if timeout is not None and ranks == 1:
        raise SpecError(f"--timeout {timeout:g} with one rank, which waits for no other: leave it away")
    return ranks


def _join(order: RunRequest, me: Torchrun, timeout_s: float) -> int:
    """Be a rank of torchrun's; says itself why it fails, unless another rank does."""
    from rowwise.cli.rank import run_rank
    from rowwise.comm.launch import connect_with_notes

    comm = None
    try:
        comm, notes = connect_with_notes(timeout_s, True, me.attempt)
        return run_rank(order, comm, notes)
    except (RowwiseError, OSError) as error:
        line = one_line(error)
        if line is None:
            raise
        if not isinstance(error, AgreedError):
            print(f"rowwise: rank {me.rank}: {line}", file=sys.stderr, flush=True)
        return 2
    finally:
        if comm is not None:
            comm.close()


def _make(order: RunRequest, nproc: int, timeout_s: float) -> int:
    topology = Topology(devices=nproc)
    making = RankStart(timeout_s=timeout_s, shared_memory=True, threads=None, preload=PRELOADED)
    met: list[int] = []
    with Scratch() as scratch:
        folder = str(scratch.path)
        try:
            with ExitStack() as held:
                with console_for(quiet=order.as_json).status(f"starting {nproc} ranks"):
                    ranks = held.enter_context(RankProcesses(topology, run_local_rank, (order, folder), making, folder))
                with _passing_on(ranks, met):
                    codes = ranks.wait()
        except RanksFailed as failed:
            if met and all(f.exit_code == -signal.SIGTERM or f.kind == "reached" for f in failed.failures):
                return _say(f"stopped by {'Ctrl-C' if met[0] == signal.SIGINT else 'SIGTERM'}", 128 + met[0])
            run = FileNotes(folder).get("run")
            return _explain(failed, None if run is None else order.resuming(_shown(Path(run)), topology))
        return 128 + met[0] if met else max(codes)


def run_local_rank(comm: "Comm", order: RunRequest, folder: str) -> int:
    """Be a rank that `_make` has made."""
    from rowwise.cli.rank import run_rank

    return run_rank(order, comm, FileNotes(folder), watched=True)


@final
class FileNotes:
    """In a folder that whoever makes the ranks reads, too."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def get(self, name: str) -> str | None:
        """What was left under a name, if anything was."""
        path = self._folder / name
        return path.read_text() if path.exists() else None

    def put(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)


@contextmanager
def _passing_on(ranks: RankProcesses, met: list[int]) -> Iterator[None]:
    """Ctrl-C and a polite kill of this process stop all ranks after their present step; a second one ends them."""

    def stop(number: int, _frame: FrameType | None) -> None:
        if met:
            raise KeyboardInterrupt
        met.append(number)
        ranks.ask_to_stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(failed: RanksFailed, resuming: str | None) -> int:
    """One line for people, or the traceback of a bug; gives the exit code."""
    first = failed.failures[0]
    if sys.stderr.isatty():
        print("\r\x1b[2K\x1b[?25h", end="", file=sys.stderr)  # a rank that was killed leaves its live line
    if first.kind == "bug":
        print(f"rank {first.rank}: {printable(first.trace)}", end="", file=sys.stderr)
        return 1
    if first.kind != "killed":
        return _say(failed.line, 2)
    signaled = first.exit_code is not None and first.exit_code < 0
    line = failed.line if resuming is None else f"{failed.line}; go on: {resuming}"
    return _say(line, 128 - first.exit_code if signaled and first.exit_code is not None else 1)


def _say(line: str, code: int) -> int:
    print(f"rowwise: {printable(line)}", file=sys.stderr)
    return code


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
