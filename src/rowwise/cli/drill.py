"""`rowwise drill`: inject faults into a small job or server on this machine, and check that it recovers."""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import SpecError
from rowwise.base.scratch import Scratch
from rowwise.cli.options import AsJson
from rowwise.cli.terminal import make_table, make_terminal, print_json, say

if TYPE_CHECKING:
    from rowwise.recipes.drills.drill import DrillReport
    from rowwise.recipes.drills.serving import ServingReport


class DamageKind(StrEnum):
    """The fault to inject."""

    KILL_RANK = "kill-rank"
    FILL_DISK = "fill-disk"
    CORRUPT_CKPT = "corrupt-ckpt"
    SERVE = "serve"


def drill(
    what: Annotated[DamageKind, typer.Argument(help="Fault to inject.")],
    nproc: Annotated[
        int, typer.Option(metavar="N", help="Number of ranks of the job, or of workers of the server.")
    ] = 2,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE", help="Recipe whose first 30 steps are the job (default: a small job); not for serve."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the job, on the disk to test; kept afterwards (default: a temporary folder)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Inject faults into a small training job or server, and check that it recovers with the same result, bit for bit.

    kill-rank kills ranks during a step and during a save, fill-disk runs out of disk space during a save, corrupt-ckpt
    damages the newest checkpoint. serve kills workers and the server, and switches and damages versions under load, and
    verifies each answer. Each takes about a minute. Exits with 1 if a recovery fails.

    Example: rowwise drill kill-rank

    Example: rowwise drill corrupt-ckpt --nproc 4 --folder /mnt/checkpoints/drill

    Example: rowwise drill kill-rank --recipe my.yaml

    Example: rowwise drill fill-disk --json

    Example: rowwise drill serve
    """
    from rowwise.recipes.drills.drill import run_drill
    from rowwise.recipes.drills.serving import ServingReport, run_serving_drill

    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise SpecError(f"--folder {folder}", "an empty or a new folder")
    if what is DamageKind.SERVE and recipe is not None:
        raise SpecError(f"serve with --recipe {recipe}", "a drill of training", hint="serve exports a run of its own")
    console = make_terminal(stderr=True, quiet=as_json)
    scratch = Scratch() if folder is None else None
    job_folder = scratch.path if scratch is not None else folder
    assert job_folder is not None
    begin_s = time.monotonic()
    try:
        with console.status("starting") as status:
            drill_folder, tell = job_folder.absolute(), status.update
            report = (
                run_serving_drill(nproc, drill_folder, tell)
                if what is DamageKind.SERVE
                else run_drill(what.value, nproc, drill_folder, tell, recipe)
            )
    except BaseException:
        if scratch is not None:
            scratch.close()
        raise
    if as_json:
        print_json(report)
    elif isinstance(report, ServingReport):
        _show_serving(report, time.monotonic() - begin_s)
    else:
        _show(report, time.monotonic() - begin_s)
    if scratch is not None and report.survived:
        scratch.close()
    else:
        if scratch is not None:
            scratch.keep()
        say(console, f"the job's files are in {job_folder}")
    raise typer.Exit(0 if report.survived else 1)


def _show(report: "DrillReport", wall_s: float) -> None:
    console = make_terminal()
    table = make_table(("", "fault", "ended after", "checkpoint", "after resuming"))
    for case in report.cases:
        mark = "ok" if case.survived else "LOST"
        ended = "" if case.ended_s is None else f"{case.ended_s:.1f} s"
        table.add_row(mark, case.damage, ended, case.checkpoint, case.resumed)
    console.print(table, markup=False)
    for case in report.cases:
        for source, line in (("console", case.error_line), ("verify", case.verified)):
            if line and line != "whole":
                say(console, f"{case.damage}, {source}: {line}")
    lost = sum(not case.survived for case in report.cases)
    verdict = f"{lost} of {len(report.cases)} jobs did not recover" if lost else "every job recovered"
    console.print(f"{report.drill} of {report.ranks} ranks: {verdict} ({wall_s:.0f} s)")


def _show_serving(report: "ServingReport", wall_s: float) -> None:
    console = make_terminal()
    table = make_table(("", "fault", "answers", "wrong", "failed", "answers again after", "versions"))
    for case in report.cases:
        counts = (f"{case.answers:,}", str(case.wrong), str(case.failed), f"{case.back_s:.2f} s")
        mark = "ok" if case.survived else "LOST"
        table.add_row(mark, case.fault, *counts, ", ".join(map(str, case.versions)))
    console.print(table, markup=False)
    for case in report.cases:
        if case.trouble:
            say(console, f"{case.fault}: {case.trouble}")
    lost = sum(not case.survived for case in report.cases)
    verdict = f"{lost} of {len(report.cases)} faults were not survived" if lost else "every answer was right"
    console.print(f"serve with {report.workers} workers: {verdict} ({wall_s:.0f} s)")
