"""`rowwise drill`: break a small job on purpose, and see what survives here, on this machine and its disks."""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from rowwise.cli.console import console_for
from rowwise.cli.terminal import terminal
from rowwise.errors import SpecError
from rowwise.scratch import Scratch

if TYPE_CHECKING:
    from rowwise.drills.drill import DrillReport


class DamageKind(StrEnum):
    """The kinds of damage that a drill does."""

    KILL_RANK = "kill-rank"
    FILL_DISK = "fill-disk"
    CORRUPT_CKPT = "corrupt-ckpt"


def drill(
    what: Annotated[DamageKind, typer.Argument(help="The damage.")],
    nproc: Annotated[int, typer.Option(metavar="N", help="Ranks of the job.")] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="A folder on the disk to try, which stays; without one, a temporary one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Break a small job on purpose, and check what survives.

    kill-rank kills ranks in a step and in a save, fill-disk lets the disk run full in a save, corrupt-ckpt damages the
    newest checkpoint. Each takes about a minute. Exits with 1 if something that should survive did not.

    Example: rowwise drill kill-rank

    Example: rowwise drill corrupt-ckpt --nproc 4 --folder /mnt/checkpoints/drill

    Example: rowwise drill fill-disk --json
    """
    from rowwise.drills.drill import run_drill

    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise SpecError(f"{folder}: want an empty folder, or a new one")
    console = console_for(quiet=as_json)
    scratch = Scratch() if folder is None else None
    place = scratch.path if scratch is not None else folder
    assert place is not None
    begin_s = time.monotonic()
    try:
        with console.status("starting") as status:
            report = run_drill(what.value, nproc, place.absolute(), status.update)
    except BaseException:
        if scratch is not None:
            scratch.close()
        raise
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _show(report, time.monotonic() - begin_s)
    if scratch is not None and report.survived:
        scratch.close()
    else:
        if scratch is not None:
            scratch.keep()
        console.print(f"everything is in {place}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if report.survived else 1)


def _show(report: "DrillReport", wall_s: float) -> None:
    console = terminal()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "damage", "ended after", "checkpoint", "going on from it"):
        table.add_column(name, overflow="fold")
    for case in report.cases:
        mark = "ok" if case.survived else "LOST"
        ended = "" if case.ended_s is None else f"{case.ended_s:.1f} s"
        table.add_row(mark, case.damage, ended, case.checkpoint, case.resumed)
    console.print(table, markup=False)
    for case in report.cases:
        for who, line in (("console", case.said), ("verify", case.verified)):
            if line and line != "whole":
                console.print(f"{case.damage}, {who}: {line}", markup=False, soft_wrap=True)
    lost = sum(not case.survived for case in report.cases)
    told = f"{lost} of {len(report.cases)} did not survive" if lost else "everything survived"
    console.print(f"{report.drill} of {report.ranks} ranks: {told} ({wall_s:.0f} s)")
