"""`rowwise train --on`, `rowwise ps` and `rowwise stop`: jobs of a scheduler, submitted, followed and ended."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.status import Status

from rowwise.base.errors import DataError, RowwiseError, SpecError
from rowwise.base.textfile import open_regular
from rowwise.cli.job import Job, JobRequest, State, find_record, read_records, save_record
from rowwise.cli.terminal import Terminal, make_table, make_terminal, say

POLL_S = 2.0  # between two questions to the scheduler
MAX_SILENT_S = 120.0  # of pauses between questions that a scheduler did not answer, one after the other
SLOW_S = 5.0  # after which a scheduler that fails is not asked about the next job
PIECE_bytes = 1 << 20  # of a log, at once
SHOWN = 20  # jobs, the newest
PROGRESS = re.compile(r" *\d+% step ")
ENDED: tuple[State, ...] = ("completed", "failed", "cancelled", "gone")


@dataclass(frozen=True, slots=True)
class Scheduler:
    """What is asked of a scheduler."""

    make_script: Callable[[JobRequest], str]
    submit: Callable[[JobRequest], Job]
    find_state: Callable[[Job], tuple[State, str]]
    cancel: Callable[[Job], None]


@cache
def schedulers() -> dict[str, Scheduler]:
    """By the first part of a job's name."""
    from rowwise.cli import ray, slurm  # a run that is not submitted loads neither

    return {
        "slurm": Scheduler(slurm.make_script, slurm.submit, slurm.find_state, slurm.cancel),
        "ray": Scheduler(ray.make_script, ray.submit, ray.find_state, ray.cancel),
    }


def scheduler_of(job: Job) -> Scheduler:
    found = schedulers().get(job.name.partition("-")[0])
    if found is None:
        raise SpecError(f"{job.name!r}", f"the name of a job of {' or '.join(schedulers())}")
    return found


def ps(
    job: Annotated[str | None, typer.Argument(help="A job to follow to its end; without it, all are listed.")] = None,
) -> None:
    """List jobs that `rowwise train --on` has submitted from this home folder, or follow one.

    Example: rowwise ps

    Example: rowwise ps slurm-17
    """
    if job is not None:
        follow(find_record(job))
        return
    table = make_table(("job", "recipe", "state", "run"))
    records = read_records()[-SHOWN:]
    names, silent = [one.name for one in records], dict[str, str]()
    for one in reversed(records):
        name = one.name if names.count(one.name) == 1 else one.full_name
        table.add_row(*map(escape, (name, one.recipe, _state_in_words(one, silent), one.run)))
    console = make_terminal()
    console.print(table if records else "no jobs: rowwise train RECIPE --on slurm submits one")


def _state_in_words(job: Job, silent: dict[str, str]) -> str:
    """The state of a job, or why it is unknown; a scheduler in `silent` took long to refuse and is not asked again."""
    cluster, began_s = f"{job.name.partition('-')[0]} {job.cluster}", time.monotonic()
    if cluster in silent:
        return silent[cluster]
    try:
        state, why = scheduler_of(job).find_state(job)
    except RowwiseError as error:
        unknown = f"unknown ({error})"
        if time.monotonic() - began_s > SLOW_S:
            silent[cluster] = unknown
        return unknown
    return f"{state} ({why})" if state == "pending" else state


def stop(job: Annotated[str, typer.Argument(help="A job, as rowwise ps names it.")]) -> None:
    """Stop a job: its ranks save a checkpoint, if the scheduler gives them the time, and end.

    Example: rowwise stop slurm-17
    """
    found = find_record(job)
    scheduler = scheduler_of(found)
    state, _ = scheduler.find_state(found)
    if state in ENDED:
        raise SpecError(f"{found.name} has ended: {state}")
    scheduler.cancel(found)
    print(f"{found.name} was asked to stop; its run is {found.run}")


def submit(request: JobRequest, on: str, *, dry_run: bool, detach: bool) -> None:
    """Print the script of a job, or submit it and follow it."""
    if dry_run:
        print(schedulers()[on].make_script(request), end="")
        return
    job = schedulers()[on].submit(request)
    console = make_terminal(stderr=True)
    say(console, f"{job.name} is submitted; log {job.log}, run {job.run}")
    try:
        save_record(job)
    except OSError as error:
        got = f"{error.filename or 'the home folder'}: {error.strerror}: rowwise ps will not know {job.name}"
        say(console, f"{got}; its scheduler does")
    if not detach:
        follow(job)


def follow(job: Job, *, wait: Callable[[float], None] = time.sleep) -> None:
    """Show the log of a job to its end; raises typer.Exit unless it completes. Ctrl-C leaves the job as it is."""
    console = make_terminal(stderr=True)
    try:
        state, why = _follow(job, console, wait)
    except KeyboardInterrupt:
        console.print(f"{job.name} goes on: rowwise ps {job.name} follows it, rowwise stop {job.name} ends it")
        raise typer.Exit(130) from None
    if state != "completed":
        raise DataError(f"{job.name} is {state} ({why}): its log is {job.log}, and its run {job.run}")


def _follow(job: Job, console: Terminal, wait: Callable[[float], None]) -> tuple[State, str]:
    """Print the log until the job has ended; returns its state, and the scheduler's word for it."""
    seen, told, silent_s = 0, "", 0.0
    with console.status(job.name) as live:
        while True:
            try:
                state, why = scheduler_of(job).find_state(job)
            except DataError as error:  # a busy scheduler; at the first question the user learns it at once
                if not told or silent_s > MAX_SILENT_S:
                    raise
                if not silent_s:
                    say(console, f"{job.name}: {error}; asks again")
                silent_s += POLL_S
                wait(POLL_S)
                continue
            silent_s = 0.0
            said = f"{job.name} waits: {why}" if state == "pending" else f"{job.name} is {state}"
            if said != told and state not in ENDED:
                console.print(said, markup=False)
            told = said
            for piece in read_log(Path(job.log), seen, to_end=state in ENDED):
                seen += len(piece)
                _show(piece, job, console, live)
            if state in ENDED:
                if not Path(job.log).exists():
                    say(console, f"{job.name}: no log {job.log} on this host")
                return state, why
            wait(POLL_S)


def _show(log: bytes, job: Job, console: Terminal, live: Status) -> None:
    for line in log.decode(errors="replace").splitlines():
        if console.is_terminal and PROGRESS.match(line):
            live.update(escape(f"{job.name} {line.strip()}"))
        else:
            say(console, line)


def read_log(path: Path, seen: int, *, to_end: bool, most: int = PIECE_bytes) -> Iterator[bytes]:
    """Complete lines from byte `seen` on, or all that is there; a line longer than a piece comes in several."""
    if not path.exists():  # it does not start at once, and other nodes' files arrive late
        return
    with open_regular(path) as file:
        while True:
            file.seek(seen)
            read = file.read(most)
            end = read.rfind(b"\n") + 1 or (len(read) if to_end or len(read) == most else 0)
            if not end:
                return
            seen += end
            yield read[:end]
