"""The work of one rank of train or resume, started alone, by `--nproc` or by torchrun. Only the first rank prints.

Separate from `launch` because it loads torch, which the launching process avoids.
"""

import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rowwise.base.errors import SpecError, printable
from rowwise.base.textfile import read_bytes
from rowwise.cli.console import LiveLine, show_result, show_start, stop_on_signals
from rowwise.cli.run_request import RUN, NoteStore, RunRequest
from rowwise.cli.terminal import make_terminal, print_json, say
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import on_first_rank
from rowwise.recipes.hosts import NetworkOfRun
from rowwise.recipes.run_result import finished_step
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import RECIPE, read
from rowwise.train.run_folder import RunFolder
from rowwise.train.trainer import OnStep

if TYPE_CHECKING:
    from rich.console import Console

    from rowwise.recipes.recipe import Recipe


def run_rank(
    request: RunRequest,
    comm: Comm | None,
    notes: NoteStore | None,
    *,
    watched: bool = False,
    network: NetworkOfRun | None = None,
) -> int:
    """Start or resume a run and train to its end; returns the exit code.

    `watched`: a parent process handles Ctrl-C. `network`: the network that ordered the hosts of `comm`.
    """
    comm = comm or solo()
    is_first = comm.rank == 0
    console = make_terminal(stderr=True, quiet=request.as_json or not is_first)
    line = LiveLine(console)
    if request.run is not None and on_first_rank(comm, partial(finished_step, request.run)) is not None:
        if is_first:
            _show_finished(request.run, as_json=request.as_json)
        return 0
    with console.status("reading the data" if request.recipe else "reading the checkpoint"):
        run = _open_run(request, comm, notes, line if is_first else None, network)
    if network is not None:
        say(console, network.ordered.in_words)
    if is_first and notes is not None:
        notes.put(RUN, str(run.folder.path.absolute()))
    if is_first:
        show_start(run, console)
    with stop_on_signals(run.trainer, console, watched=watched) as received, line.show():
        result = run.go()
    if is_first:
        show_result(result, console)
        if request.as_json:
            print_json(result)
    if is_first and result.status == "finished":
        _compare_with_trees(request, run.folder.path, comm, console)
    if not received and result.status != "stopped":
        return 0
    command = request.resume_command(run.folder.path, comm.topology)
    problem = f"{run.mirror_problem}; " if run.mirror_problem is not None else ""
    say(console, f"{problem}resume it with: {command}")
    return 128 + (received[0] if received else signal.SIGTERM)


def _compare_with_trees(request: RunRequest, run: Path, comm: Comm, console: "Console") -> None:
    """Compare with trees on request; by default for a new run on few rows of files with one rank."""
    from rowwise.cli.measure import compare_with_trees, suggest_trees

    if request.baseline:
        compare_with_trees(run, console)
    elif request.baseline is None and request.recipe is not None and comm.topology.world == 1 and not request.as_json:
        suggest_trees(run, console)


def _open_run(
    request: RunRequest, comm: Comm, notes: NoteStore | None, tell: OnStep | None, network: NetworkOfRun | None
) -> TrainingRun:
    """The requested run, or after a restart by torchrun the run of the earlier attempt, from its last checkpoint."""
    earlier_run = on_first_rank(comm, lambda: None if notes is None else notes.get(RUN))
    if earlier_run is not None:
        return TrainingRun.resume(Path(earlier_run), tell=tell, comm=comm, network=network)
    if request.run is not None and on_first_rank(comm, partial(_has_begun, request.run, request.recipe)):
        return TrainingRun.resume(request.run, tell=tell, comm=comm, network=network)
    if request.recipe is not None:
        folder = request.folder if request.run is None else RunFolder(request.run)
        return TrainingRun.start(request.recipe, folder, tell, comm, network)
    which, changes = request.which, request.changes
    return TrainingRun.resume(request.folder, changes, which=which, tell=tell, comm=comm, network=network)


def _show_finished(run: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(json.loads(read_bytes(run / "result.json")))
    else:
        print(f"{printable(str(run))} has finished", file=sys.stderr)


def _has_begun(run: Path, recipe: "Recipe | None") -> bool:
    """Whether the folder has a run; raises if it is of another recipe."""
    if not RunFolder(run).has_begun:
        return False
    existing = read(run / RECIPE).name
    if recipe is not None and existing != recipe.name:
        raise SpecError(f"--run {run} has a run of the recipe {existing!r}, not {recipe.name!r}", "another folder")
    return True
