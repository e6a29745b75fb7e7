"""`rowwise explain`: what a trained model has learned from."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.cli.code import warn_of_run_code
from rowwise.cli.console import show_warning
from rowwise.cli.measure import DataOption
from rowwise.cli.options import AsJson, RunArgument, Which
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_table, make_terminal, print_json, print_line, refuse_nan

if TYPE_CHECKING:
    from rowwise.base.records import ModelExplanation

MAX_FEATURES, MAX_IDS, MAX_SLICES = 20, 8, 5
CHANCE = 3.0  # standard deviations of a slice that are worth a line


def explain(  # noqa: PLR0913 - one for each option
    run: RunArgument,
    data: DataOption = None,
    which: Which = "best",
    task: Annotated[str | None, typer.Option(help="The label to explain (default: the recipe's first).")] = None,
    rows: Annotated[int, typer.Option(min=100, max=1_000_000, help="Rows to score at most.")] = 20_000,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Permutations of each feature.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, max=1e5, help="About how long it may take.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Explain a trained model: importance of features, effects of ids and numbers, calibration, drift.

    A feature is as important as the log loss rises when its values are dealt to other rows. The report of the run shows
    all of it. Fewer rows are scored if --seconds are too few.

    Example: rowwise explain runs/dlrm-synthetic/1

    Example: rowwise explain runs/clicks/1 --data parquet:tomorrow.parquet --seconds 20
    """
    from rowwise.recipes.explain import explain as explain_run

    refuse_nan("--seconds", seconds, "a number of seconds, such as 60")
    warn_of_run_code(run)
    console = make_terminal(stderr=True, quiet=as_json)
    with splits_bar(console, "permuting features") as tell:
        found = explain_run(
            run,
            which=which,
            data=data,
            task=task,
            rows=rows,
            repeats=repeats,
            seconds=seconds,
            tell=tell,
            warn=partial(show_warning, console),
        )
    if as_json:
        print_json(found)
        return
    _show(found)
    print_line(f"\n{found.rows:,} rows, {found.repeats} repeats; all of it is in {run / 'report.html'}")


def _show(found: "ModelExplanation") -> None:
    console = make_terminal()
    drift = {one.feature: one for one in found.drift}
    table = make_table(("feature",), ("log loss without it", "+/-", "drift", "by chance"))
    for one in found.importance[:MAX_FEATURES]:
        moved = drift[one.feature]
        cells = f"{one.loss:+.4f}", f"{one.spread:.4f}", f"{moved.index:.3f}", f"{moved.chance:.3f}"
        table.add_row(one.feature, *cells)
    console.print(f"log loss of {found.task}: {found.loss:.4f}", markup=False)
    console.print(table, markup=False)
    if found.ids:
        strongest = sorted(found.ids, key=lambda one: one.error - abs(one.logit))[:MAX_IDS]
        table = make_table(("strongest ids",), ("logit", "+/-", "rows"))
        for one in strongest:
            name = found.names.get(one.feature, {}).get(str(one.id), str(one.id))
            table.add_row(f"{one.feature} {name}", f"{one.logit:+.3f}", f"{one.error:.3f}", f"{one.rows:,}")
        console.print(table, markup=False)
    off = [one for one in found.calibration if abs(one.deviations) > CHANCE][:MAX_SLICES]
    if off:
        table = make_table(("not calibrated",), ("predicted", "observed", "deviations", "rows"))
        for one in off:
            name = found.names.get(one.feature, {}).get(one.value, one.value)
            cells = f"{one.predicted:.4f}", f"{one.observed:.4f}", f"{one.deviations:+.1f}", f"{one.rows:,}"
            table.add_row(f"{one.feature} {name}", *cells)
        console.print(table, markup=False)
