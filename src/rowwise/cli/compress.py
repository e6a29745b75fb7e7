"""`rowwise compress`: chooses id maps that fit all tables into a byte budget at the smallest measured loss.

Arguments are checked before anything is trained. Trials are saved: the same command resumes them.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from rowwise.base.errors import SpecError, did_you_mean
from rowwise.cli.code import load_recipe
from rowwise.cli.convert import parse_size
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.options import MAX_SEED, Changes, RecipeName
from rowwise.cli.progress import fraction_bar
from rowwise.cli.terminal import make_terminal, say

if TYPE_CHECKING:
    from rowwise.base.records import CompressionAdvice
    from rowwise.recipes.compress.progress import Tell
    from rowwise.recipes.compress.selection import CompressionGoal

MAX_RATIO, MAX_MINUTES = 1e6, 1e5


def compress(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    recipe: RecipeName,
    changes: Changes = None,
    ratio: Annotated[
        float | None,
        typer.Option(metavar="N", help="Compression ratio of all tables together, such as 10."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Instead of --ratio: byte budget of all tables and maps, such as 100MB."),
    ] = None,
    history: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help='Train on rows that match, such as "week < 40"; may be repeated.'),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for trials, maps, recipe and report.")] = Path(
        "compression"
    ),
    explain: Annotated[bool, typer.Option("--explain", help="Print all measurements per table.")] = False,
    methods: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Kinds of id maps to try, such as hash,learned (default: all)."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train each trial on at most N rows: faster, less exact.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(metavar="N", help="Time budget in minutes: trials train on fewer rows to fit.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_SEED, help="Seed of trials and maps (default: the recipe's).")
    ] = None,
) -> None:
    """Compress large tables with id maps, so that ids share rows and all tables fit into a budget of bytes.

    Trains the recipe with one table compressed at a time, by several methods and sizes, and measures it on later rows.
    Then divides the budget between tables, and writes the id maps, a recipe that trains with them, and a report. The
    same command resumes after a stop or a kill.

    Measures a few steps first, and prints an estimate of the total time. With --minutes trials train on fewer rows, and
    sizes beyond the time budget are skipped.

    Example: rowwise compress dlrm-synthetic --ratio 10 --explain

    Example: rowwise compress mine.yaml --budget 100MB --history "week < 40" --rows 1000000 --out smaller
    """
    goal = _parse_goal(ratio, budget, methods)
    if minutes is not None and not 0 < minutes < MAX_MINUTES:
        raise SpecError(f"--minutes {minutes:g}", "a number of minutes above 0, such as 30")
    environment: CommandEnvironment = ctx.obj
    if environment.torchrun is not None:
        raise SpecError("rowwise compress trains in one process", hint="run it without torchrun")
    from rowwise.recipes.compose import resolve
    from rowwise.recipes.compress.advise import advise, check_recipe, write_recipe
    from rowwise.recipes.compress.estimate import TimeLimit, forecast_work
    from rowwise.recipes.compress.folder import TrialFolderSpec, lock_folder, open_folder
    from rowwise.recipes.compress.selection import select_tables
    from rowwise.recipes.compress.window import open_window
    from rowwise.report.compression import draw_compression
    from rowwise.report.page import write_page

    loaded = load_recipe(recipe, changes or ())
    check_recipe(loaded)
    resolved = resolve(loaded)
    selection = select_tables(resolved.tables, goal)
    spec = TrialFolderSpec.of(resolved.recipe, tuple(history or ()), rows, loaded.seed if seed is None else seed)
    window = open_window(resolved, spec.history)
    console, limit = make_terminal(stderr=True), TimeLimit(None if minutes is None else 60 * minutes)
    if minutes is None:
        open_folder(out, spec)  # raises before anything is measured
    spec, forecast = forecast_work(window, selection, goal, spec, out, minutes)
    folder = open_folder(out, spec)
    say(console, forecast)
    try:
        with lock_folder(folder), _show_progress(console) as report:
            advice = advise(window, selection, goal, spec, folder, report, limit)
            recipe_file = write_recipe(loaded, resolved, advice, folder)
            page = folder.path / "report.html"
            write_page(page, draw_compression(advice))
    except KeyboardInterrupt:
        say(console, f"trials are in {out}; the same command continues")
        raise
    _show(advice, console, explain=explain)
    for path in (page, recipe_file):
        say(console, f"wrote   {path}")
    say(console, f"use it  rowwise train {recipe_file}")


def _parse_goal(ratio: float | None, budget: str | None, methods: str | None) -> "CompressionGoal":
    if ratio is not None and not 1 < ratio <= MAX_RATIO:
        raise SpecError(f"--ratio {ratio:g}", "a compression above 1, such as 10")
    budget_bytes = None if budget is None else parse_size("--budget", budget)
    from rowwise.recipes.compress.selection import CompressionGoal
    from rowwise.tables.ids.methods import METHODS

    names = tuple(dict.fromkeys(name.strip() for name in methods.split(","))) if methods is not None else tuple(METHODS)
    for name in names:
        if name not in METHODS:
            guess = did_you_mean(name, METHODS)
            ending = f"; {guess}" if guess else "."
            raise SpecError(f"--methods: no method {name!r}{ending} There are {', '.join(METHODS)}")
    return CompressionGoal(ratio=ratio, budget_bytes=budget_bytes, methods=names)


def _show(advice: "CompressionAdvice", console: Console, *, explain: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rowwise.base.quantity import format_size
    from rowwise.recipes.compress.explain import explain_advice as lines_of
    from rowwise.recipes.compress.explain import method_name

    if explain:
        for line in lines_of(advice):
            say(console, line)
        console.print()
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("table", "ids", "method", "ratio", "rows", "map", "NE"):
        grid.add_column(name, justify="left" if name in ("table", "method") else "right")
    for table in advice.tables:
        ratio, rows_bytes = table.full_bytes / table.size_bytes, table.size_bytes - table.map_bytes
        sizes = format_size(rows_bytes), format_size(table.map_bytes)
        grid.add_row(
            escape(table.name), f"{table.ids:,}", method_name(table), f"{ratio:.1f}", *sizes, f"{table.ne:+.5f}"
        )
    if advice.left:
        size, ids = format_size(sum(table.size_bytes for table in advice.left)), sum(table.ids for table in advice.left)
        grid.add_row(f"{len(advice.left)} others", f"{ids:,}", "uncompressed", "1.0", size, format_size(0), "")
    ratio = advice.full_bytes / advice.size_bytes
    grid.add_row("all", "", "", f"{ratio:.1f}", format_size(advice.size_bytes), "", f"{advice.ne:+.5f}", style="bold")
    console.print(grid)
    noise = f"NE of the full model {advice.full.ne:.5f}, noise {advice.noise:.5f}; above it"
    measured = (
        "" if advice.together is None else f", {advice.together.ne:+.5f} measured with all chosen tables in one model"
    )
    say(console, f"{noise} {advice.ne:+.5f} expected{measured}")
    say(console, f"measured on {advice.later}")
    for line in advice.warnings:
        say(console, f"warning {line}", "yellow")


def _show_progress(console: Console) -> "AbstractContextManager[Tell]":
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(24), TextColumn("{task.description}"))
    return fraction_bar(console, (*columns, TimeRemainingColumn(compact=True)))
