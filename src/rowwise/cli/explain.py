"""`rowwise explain`: importance of features, effects of ids, and calibration of a trained model."""

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
CHANCE = 3.0  # standard deviations from which on a slice is printed


def explain(  # noqa: PLR0913 - one for each option
    run: RunArgument,
    data: DataOption = None,
    which: Which = "best",
    task: Annotated[str | None, typer.Option(help="Label to explain (default: the first of the recipe).")] = None,
    rows: Annotated[int, typer.Option(min=100, max=1_000_000, help="Maximum number of rows to score.")] = 20_000,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Permutations per feature.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, max=1e5, help="Approximate time budget.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Explain a trained model: importance of features, effects of ids and numbers, calibration, drift.

    The importance of a feature is the increase of the log loss when its values are permuted between rows. The report of
    the run has all results. Fewer rows are scored if --seconds is too short.

    Example: rowwise explain runs/dlrm-synthetic/1

    Example: rowwise explain runs/clicks/1 --data parquet:tomorrow.parquet --seconds 20
    """
    from rowwise.recipes.explain import explain as explain_run

    refuse_nan("--seconds", seconds, "a number of seconds, such as 60")
    warn_of_run_code(run)
    console = make_terminal(stderr=True, quiet=as_json)
    with splits_bar(console, "permuting features") as tell:
        explanation = explain_run(
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
        print_json(explanation)
        return
    _show(explanation)
    print_line(f"\n{explanation.rows:,} rows, {explanation.repeats} repeats; all results are in {run / 'report.html'}")


def _show(explanation: "ModelExplanation") -> None:
    console = make_terminal()
    drift = {row.feature: row for row in explanation.drift}
    table = make_table(("feature",), ("log loss without it", "+/-", "drift", "by chance"))
    for row in explanation.importance[:MAX_FEATURES]:
        feature_drift = drift[row.feature]
        cells = f"{row.loss:+.4f}", f"{row.spread:.4f}", f"{feature_drift.index:.3f}", f"{feature_drift.chance:.3f}"
        table.add_row(row.feature, *cells)
    console.print(f"log loss of {explanation.task}: {explanation.loss:.4f}", markup=False)
    console.print(table, markup=False)
    if explanation.ids:
        strongest = sorted(explanation.ids, key=lambda row: row.error - abs(row.logit))[:MAX_IDS]
        table = make_table(("strongest ids",), ("logit", "+/-", "rows"))
        for row in strongest:
            name = explanation.names.get(row.feature, {}).get(str(row.id), str(row.id))
            table.add_row(f"{row.feature} {name}", f"{row.logit:+.3f}", f"{row.error:.3f}", f"{row.rows:,}")
        console.print(table, markup=False)
    miscalibrated = [row for row in explanation.calibration if abs(row.deviations) > CHANCE][:MAX_SLICES]
    if miscalibrated:
        table = make_table(("not calibrated",), ("predicted", "observed", "deviations", "rows"))
        for row in miscalibrated:
            name = explanation.names.get(row.feature, {}).get(row.value, row.value)
            cells = f"{row.predicted:.4f}", f"{row.observed:.4f}", f"{row.deviations:+.1f}", f"{row.rows:,}"
            table.add_row(f"{row.feature} {name}", *cells)
        console.print(table, markup=False)
