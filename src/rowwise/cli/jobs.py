"""`rowwise train --on`, `rowwise ps` and `rowwise stop`: submits, follows and cancels jobs of a scheduler."""

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

POLL_S = 2.0  # interval of polling the scheduler
MAX_SILENT_S = 120.0  # of consecutive polls that fail
SLOW_S = 5.0  # a failure that took longer is not retried for the next job
PIECE_bytes = 1 << 20  # read size of a log
SHOWN = 20  # newest jobs
PROGRESS = re.compile(r" *\d+% step ")
ENDED: tuple[State, ...] = ("completed", "failed", "cancelled", "gone")


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The operations of a scheduler."""

    make_script: Callable[[JobRequest], str]
    submit: Callable[[JobRequest], Job]
    find_state: Callable[[Job], tuple[State, str]]
    cancel: Callable[[Job], None]


@cache
def schedulers() -> dict[str, Scheduler]:
    """Schedulers by the first part of a job name."""
    from rowwise.cli import ray, slurm  # imported only to submit or follow a job

    return {
        "slurm": Scheduler(slurm.make_script, slurm.submit, slurm.find_state, slurm.cancel),
        "ray": Scheduler(ray.make_script, ray.submit, ray.find_state, ray.cancel),
    }


def scheduler_of(job: Job) -> Scheduler:
    scheduler = schedulers().get(job.name.partition("-")[0])
    if scheduler is None:
        raise SpecError(f"{job.name!r}", f"the name of a job of {' or '.join(schedulers())}")
    return scheduler


def ps(
    job: Annotated[str | None, typer.Argument(help="Job to follow to its end (default: list all).")] = None,
) -> None:
    """List the jobs that `rowwise train --on` submitted from this home folder, or follow one.

    Example: rowwise ps

    Example: rowwise ps slurm-17
    """
    if job is not None:
        follow(find_record(job))
        return
    table = make_table(("job", "recipe", "state", "run"))
    records = read_records()[-SHOWN:]
    names, unreachable = [record.name for record in records], dict[str, str]()
    for record in reversed(records):
        name = record.name if names.count(record.name) == 1 else record.full_name
        table.add_row(*map(escape, (name, record.recipe, _describe_state(record, unreachable), record.run)))
    console = make_terminal()
    console.print(table if records else "no jobs: rowwise train RECIPE --on slurm submits one")


def _describe_state(job: Job, unreachable: dict[str, str]) -> str:
    """The state of a job, or the error; `unreachable` has the errors of slow schedulers, which are not retried."""
    cluster, began_s = f"{job.name.partition('-')[0]} {job.cluster}", time.monotonic()
    if cluster in unreachable:
        return unreachable[cluster]
    try:
        state, reason = scheduler_of(job).find_state(job)
    except RowwiseError as error:
        unknown = f"unknown ({error})"
        if time.monotonic() - began_s > SLOW_S:
            unreachable[cluster] = unknown
        return unknown
    return f"{state} ({reason})" if state == "pending" else state


def stop(job: Annotated[str, typer.Argument(help="Name of a job, from rowwise ps.")]) -> None:
    """Stop a job: its ranks save a checkpoint, if the grace period of the scheduler allows it, and exit.

    Example: rowwise stop slurm-17
    """
    record = find_record(job)
    scheduler = scheduler_of(record)
    state, _ = scheduler.find_state(record)
    if state in ENDED:
        raise SpecError(f"{record.name} has ended: {state}")
    scheduler.cancel(record)
    print(f"{record.name} was asked to stop; its run is {record.run}")


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
        problem = f"{error.filename or 'the home folder'}: {error.strerror}: rowwise ps will not know {job.name}"
        say(console, f"{problem}; its scheduler does")
    if not detach:
        follow(job)


def follow(job: Job, *, wait: Callable[[float], None] = time.sleep) -> None:
    """Show the log of a job to its end; raises typer.Exit unless it completes. Ctrl-C leaves the job as it is."""
    console = make_terminal(stderr=True)
    try:
        state, reason = _poll(job, console, wait)
    except KeyboardInterrupt:
        console.print(f"{job.name} goes on: rowwise ps {job.name} follows it, rowwise stop {job.name} ends it")
        raise typer.Exit(130) from None
    if state != "completed":
        raise DataError(f"{job.name} is {state} ({reason}): its log is {job.log}, and its run {job.run}")


def _poll(job: Job, console: Terminal, wait: Callable[[float], None]) -> tuple[State, str]:
    """Print the log until the job has ended; returns its state, and the reason of the scheduler."""
    offset, last_status, silent_s = 0, "", 0.0
    with console.status(job.name) as live:
        while True:
            try:
                state, reason = scheduler_of(job).find_state(job)
            except DataError as error:  # a busy scheduler is retried, except at the first poll
                if not last_status or silent_s > MAX_SILENT_S:
                    raise
                if not silent_s:
                    say(console, f"{job.name}: {error}; asks again")
                silent_s += POLL_S
                wait(POLL_S)
                continue
            silent_s = 0.0
            status = f"{job.name} waits: {reason}" if state == "pending" else f"{job.name} is {state}"
            if status != last_status and state not in ENDED:
                console.print(status, markup=False)
            last_status = status
            for piece in read_log(Path(job.log), offset, to_end=state in ENDED):
                offset += len(piece)
                _show(piece, job, console, live)
            if state in ENDED:
                if not Path(job.log).exists():
                    say(console, f"{job.name}: no log {job.log} on this host")
                return state, reason
            wait(POLL_S)


def _show(log: bytes, job: Job, console: Terminal, live: Status) -> None:
    for line in log.decode(errors="replace").splitlines():
        if console.is_terminal and PROGRESS.match(line):
            live.update(escape(f"{job.name} {line.strip()}"))
        else:
            say(console, line)


def read_log(path: Path, offset: int, *, to_end: bool, max_bytes: int = PIECE_bytes) -> Iterator[bytes]:
    """Complete lines from byte `offset` on, or the rest with `to_end`; a line above `max_bytes` comes in pieces."""
    if not path.exists():  # the job may be pending, and shared file systems lag
        return
    with open_regular(path) as file:
        while True:
            file.seek(offset)
            chunk = file.read(max_bytes)
            end = chunk.rfind(b"\n") + 1 or (len(chunk) if to_end or len(chunk) == max_bytes else 0)
            if not end:
                return
            offset += end
            yield chunk[:end]
