"""`rowwise tune`: hyperparameter search for a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_metric
from rowwise.cli.options import AsJson, Changes, RecipeName
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_table, make_terminal, print_json, print_line, refuse_nan, say

if TYPE_CHECKING:
    from rowwise.base.records import DimsOutcome, StudyOutcome

MAX_RATIO = 1e6


def tune(  # noqa: PLR0913 - one for each option
    recipe: RecipeName,
    changes: Changes = None,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Total number of trials of the study.")] = 25,
    minutes: Annotated[float | None, typer.Option(min=0, max=1e6, help="Time budget: no trial begins later.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, max=256, help="Number of parallel trials, one process each (default: 1).")
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(metavar="N", help="Instead, choose dims for N times fewer table parameters.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study (default: tune/RECIPE).")] = None,
    as_json: AsJson = False,
) -> None:
    """Tune the hyperparameters of a recipe, by its metric on the validation rows.

    The section `tune` of the recipe is the search space; by default learning rates, batch, dims, layers, dropout and
    weight decay of rows. The first trial has the settings of the recipe. The same command resumes after a kill, or adds
    trials. The test rows are read once, at the end. Needs Optuna, the extra `tune`.

    With --ratio N it chooses the dim of each table instead, so that all tables have N times fewer parameters. It
    measures one trained model with each table projected to smaller dims, and trains the recipe with the chosen dims and
    with equal dims. This reads no test rows, and needs no Optuna.

    Example: rowwise tune movielens-dlrm --trials 25

    Example: rowwise tune clicks.yaml --minutes 30 --nproc 2

    Example: rowwise train tune/movielens-dlrm/best.yaml

    Example: rowwise tune movielens-dcn --ratio 4
    """
    from rowwise.recipes.tune import tune as search
    from rowwise.recipes.tune import tune_dims

    refuse_nan("--minutes", minutes, "a number of minutes, such as 30")
    console = make_terminal(stderr=True, quiet=as_json)
    folder = out or Path("tune") / Path(recipe).stem
    if ratio is not None:
        if not 1 < ratio <= MAX_RATIO:
            raise SpecError(f"--ratio {ratio:g}", "more than 1, such as 4")
        dims = tune_dims(recipe, folder, ratio, changes=changes or (), tell=lambda line: say(console, line))
        if as_json:
            print_json(dims)
        else:
            _show_dims(dims, folder / f"dims-{ratio:g}.yaml")
        return
    with splits_bar(console, "trials") as tell:
        outcome = search(
            recipe,
            folder,
            trials=trials,
            minutes=minutes,
            changes=changes or (),
            processes=nproc or 1,
            tell=lambda trial, done: tell(done, trials),
        )
    if as_json:
        print_json(outcome)
        return
    _show(outcome, folder)


def _show(outcome: "StudyOutcome", folder: Path) -> None:
    ended = [trial for trial in outcome.trials if trial.value is not None]
    best = next((trial for trial in ended if trial.number == outcome.best), None)
    states = [trial.state for trial in outcome.trials]
    pruned, failed = states.count("pruned"), states.count("failed")
    print_line(f"{len(states)} trials, {pruned} pruned, {failed} failed")
    if best is None:
        print_line("no trial is complete; give more trials or minutes")
        return
    baseline = next((trial for trial in ended if trial.number == 0), None)
    comparison = f", of the recipe as it is {format_metric(baseline.value or 0.0)}" if baseline is not None else ""
    value = f"{format_metric(best.value or 0.0)} (trial {best.number})"
    print_line(f"best {outcome.metric} on validation rows {value}{comparison}")
    table = make_table(("setting", "value", "importance"))
    for key, value in best.values.items():
        share = outcome.importance.get(key)
        table.add_row(key, value if isinstance(value, str) else f"{value:.4g}", "" if share is None else f"{share:.2f}")
    make_terminal().print(table, markup=False)
    for task, values in outcome.test.items():
        shown = [f"{name} {format_metric(x)}" for name, x in values.items() if x is not None and name != "count"]
        print_line(f"test {task}: {', '.join(shown)}")
    print_line(f"recipe  {folder / 'best.yaml'}\nreport  {folder / 'report.html'}")


def _show_dims(outcome: "DimsOutcome", recipe: Path) -> None:
    grid = make_table(("table", "rows", "dim", "chosen", "uniform", "rise of the loss"))
    for table in outcome.tables:
        rise = f"{table.curve[table.chosen]:+.5f}"
        grid.add_row(table.name, f"{table.rows:,}", str(table.dim), str(table.chosen), str(table.uniform), rise)
    make_terminal().print(grid, markup=False)
    for name, parameters in (("whole", outcome.parameters), ("chosen", outcome.chosen), ("uniform", outcome.uniform)):
        value = format_metric(outcome.values[name])
        print_line(f"{name:<8}{parameters:>14,} parameters of tables, {outcome.metric} on validation rows {value}")
    print_line(f"recipe  {recipe}")
