"""What each rank of a run does, however it was made: alone, by `--nproc`, or by torchrun.

The first rank shows what there is to see; the others are quiet.
"""

import signal
from pathlib import Path

import msgspec

from rowwise.cli.console import LiveLine, console_for, show_beginning, show_end, stop_on_signal
from rowwise.cli.run_request import NoteStore, RunRequest
from rowwise.comm.seam import Comm
from rowwise.comm.solo import solo
from rowwise.recipes.first_rank import on_first_rank
from rowwise.recipes.runs import TrainingRun
from rowwise.train.trainer import Tell

RUN = "run"  # the note that says which run this is


def run_rank(order: RunRequest, comm: Comm | None, notes: NoteStore | None, *, watched: bool = False) -> int:
    """Begin a run, or go on with one, to its end; gives the exit code. `watched`: a parent says when to end at once."""
    comm = comm or solo()
    first = comm.rank == 0
    console = console_for(quiet=order.as_json or not first)
    line = LiveLine(console)
    with console.status("reading the data" if order.recipe else "reading the checkpoint"):
        run = _begin(order, comm, notes, line if first else None)
    if first and notes is not None:
        notes.put(RUN, str(run.folder.path.absolute()))
    if first:
        show_beginning(run, console)
    with stop_on_signal(run.trainer, console, watched=watched) as met, line.showing():
        result = run.go()
    if first:
        show_end(result, console)
        if order.as_json:
            print(msgspec.json.format(msgspec.json.encode(result)).decode(), flush=True)
    if not met and result.status != "stopped":
        return 0
    console.print(f"go on: {order.resuming(run.folder.path, comm.topology)}", markup=False, soft_wrap=True)
    return 128 + (met[0] if met else signal.SIGTERM)


def _begin(order: RunRequest, comm: Comm, notes: NoteStore | None, tell: Tell | None) -> TrainingRun:
    """What was asked for; or the run of an attempt before this one, from where that has left it."""
    noted = on_first_rank(comm, lambda: None if notes is None else notes.get(RUN))
    if noted is not None:
        return TrainingRun.resume(Path(noted), tell=tell, comm=comm)
    if order.recipe is not None:
        return TrainingRun.start(order.recipe, order.folder, tell, comm)
    return TrainingRun.resume(order.folder, order.changes, which=order.which, tell=tell, comm=comm)
