"""`rowwise compress`: tables in a tenth of their bytes, or any other budget, at the least loss that was measured.

Only asks and shows: what is measured and chosen is in `recipes.compress`. Everything that can be refused is refused
before anything is trained, and everything that was measured is kept: the same command goes on.
"""

import difflib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from rowwise.cli.code import load_recipe
from rowwise.cli.console import console_for
from rowwise.cli.convert import size_of
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.progress import share_bar
from rowwise.errors import SpecError

if TYPE_CHECKING:
    from rowwise.recipes.compress.advice import CompressionAdvice
    from rowwise.recipes.compress.division import CompressionGoal
    from rowwise.recipes.compress.work import Tell

MOST_RATIO = 1e6


def compress(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(help="One that ships (rowwise ls), or a file.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe.")
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(metavar="N", help="By how much all tables together shrink, such as 10.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Or what all tables may take, maps included, such as 100MB.")
    ] = None,
    history: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help='Which training rows to learn from, such as "week < 40"; all of these.'),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where trials and maps are kept.")] = Path("compression"),
    explain: Annotated[bool, typer.Option("--explain", help="Say what was measured of each table.")] = False,
    methods: Annotated[str | None, typer.Option(metavar="A,B,...", help="Only these, such as hash,learned.")] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="Train each trial on so many rows at most: coarser, and faster.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of trials and maps; none: the recipe's.")] = None,
) -> None:
    """Find ways to store the ids of large tables in fewer rows, within one budget of bytes.

    Trains the recipe with one table compressed at a time, by several methods in several sizes, and measures it on later
    rows. Then shares the budget out, and writes maps, a recipe that trains with them, and a report. Whatever ends it,
    the same command goes on.

    Example: rowwise compress dlrm-synthetic --ratio 10 --explain

    Example: rowwise compress mine.yaml --budget 100MB --history "week < 40" --rows 1000000 --out smaller
    """
    goal = _goal(ratio, budget, methods)
    if rows is not None and rows < 1:
        raise SpecError(f"--rows {rows}: want at least 1")
    if seed is not None and not 0 <= seed < 1 << 31:
        raise SpecError(f"--seed {seed}: want at least 0, and less than 2**31")
    around: CommandEnvironment = ctx.obj
    if around.torchrun is not None:
        raise SpecError("rowwise compress trains in one process: start it without torchrun")
    from rowwise.recipes.compose import resolve
    from rowwise.recipes.compress.advise import advise, check_recipe, write_recipe
    from rowwise.recipes.compress.division import divide
    from rowwise.recipes.compress.folder import TrialFolderSpec, lock_folder, open_folder
    from rowwise.recipes.compress.window import open_window

    given = load_recipe(recipe, changes or ())
    check_recipe(given)
    resolved = resolve(given)
    division = divide(resolved.tables, goal)
    order = TrialFolderSpec.of(resolved.recipe, tuple(history or ()), rows, given.seed if seed is None else seed)
    window = open_window(resolved, order.history)
    console = console_for(quiet=False)
    folder = open_folder(out, order)
    try:
        with lock_folder(folder), _showing(console) as tell:
            advice = advise(window, division, goal, order, folder, tell)
            written = write_recipe(given, resolved, advice, folder)
            page = _write_page(folder.path)
    except KeyboardInterrupt:
        console.print(f"what was measured is in {out}; the same command goes on", markup=False, soft_wrap=True)
        raise
    _show(advice, console, explain=explain)
    for path in (page, written):
        console.print(f"wrote   {path}", markup=False, soft_wrap=True)
    console.print(f"use it  rowwise train {written}", markup=False, soft_wrap=True)


def _goal(ratio: float | None, budget: str | None, methods: str | None) -> "CompressionGoal":
    """What is asked for, all of it said."""
    if (ratio is None) == (budget is None):
        got = "neither" if ratio is None else "both"
        raise SpecError(f"--ratio and --budget: got {got}; want one of them, such as --ratio 10 or --budget 100MB")
    if ratio is not None and not 1 < ratio <= MOST_RATIO:
        raise SpecError(f"--ratio {ratio:g}: want more than 1, such as 10, by how much all tables shrink")
    budget_bytes = None if budget is None else size_of("--budget", budget)
    from rowwise.hashing.methods import METHODS
    from rowwise.recipes.compress.division import CompressionGoal

    wanted = (
        tuple(dict.fromkeys(name.strip() for name in methods.split(","))) if methods is not None else tuple(METHODS)
    )
    for name in wanted:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            guess = f"; did you mean {near[0]!r}?" if near else "."
            raise SpecError(f"--methods: no method {name!r}{guess} There are {', '.join(METHODS)}")
    return CompressionGoal(ratio=ratio, budget_bytes=budget_bytes, methods=wanted)


def _write_page(folder: Path) -> Path:
    from rowwise.recipes.compress.advise import ADVICE
    from rowwise.report.compression import compression_page
    from rowwise.report.page import save

    out = folder / "report.html"
    save(out, compression_page((folder / ADVICE).read_bytes()))
    return out


def _show(advice: "CompressionAdvice", console: Console, *, explain: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rowwise.quantity import size
    from rowwise.recipes.compress.words import explain as lines_of
    from rowwise.recipes.compress.words import of_method

    if explain:
        for line in lines_of(advice):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("table", "ids", "method", "ratio", "rows", "map", "NE"):
        shown.add_column(name, justify="left" if name in ("table", "method") else "right")
    for one in advice.tables:
        ratio, rows_bytes = one.full_bytes / one.size_bytes, one.size_bytes - one.map_bytes
        cells = (
            f"{one.ids:,}",
            of_method(one),
            f"{ratio:.1f}",
            size(rows_bytes),
            size(one.map_bytes),
            f"{one.ne:+.5f}",
        )
        shown.add_row(escape(one.name), *cells)
    if advice.left:
        left_bytes, ids = sum(one.size_bytes for one in advice.left), sum(one.ids for one in advice.left)
        shown.add_row(f"{len(advice.left)} others", f"{ids:,}", "as they are", "1.0", size(left_bytes), size(0), "")
    ratio = advice.full_bytes / advice.size_bytes
    shown.add_row("all", "", "", f"{ratio:.1f}", size(advice.size_bytes), "", f"{advice.ne:+.5f}", style="bold")
    console.print(shown)
    noise = f"NE of the whole model {advice.full.ne:.5f}, noise {advice.noise:.5f}; above it"
    both = "" if advice.together is None else f", {advice.together.ne:+.5f} measured with all tables in one model"
    console.print(f"{noise} {advice.ne:+.5f} expected{both}", markup=False, soft_wrap=True)
    console.print(f"measured on {advice.later}", markup=False, soft_wrap=True)
    for line in advice.warnings:
        console.print(f"warning {line}", style="yellow", markup=False, soft_wrap=True)


def _showing(console: Console) -> "AbstractContextManager[Tell]":
    """A bar on a terminal, else a line now and then."""
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(24), TextColumn("{task.description}"))
    return share_bar(console, (*columns, TimeRemainingColumn(compact=True)))
