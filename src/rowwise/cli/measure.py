"""`rowwise eval`, `predict`, `baseline` and `report`: metrics, predictions and reports of trained models."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rowwise.cli.code import warn_of_run_code
from rowwise.cli.console import show_warning
from rowwise.cli.ensemble import print_ensemble_json, scores_as_json, show_ensemble, slices_by_name
from rowwise.cli.options import AsJson, MemoryForRows, RunArgument, Which
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_table, make_terminal, print_json, print_line, say

if TYPE_CHECKING:
    from rowwise.recipes.baseline import TreeBaseline
    from rowwise.train.evaluate import Scores

COMPARED = ("loss", "ne", "auc", "rmse", "mae", "r2", "poisson_deviance")  # metrics in the comparison with trees
JUDGES = {"auc": "AUC", "poisson_deviance": "Poisson deviance", "rmse": "RMSE"}  # of the verdict, preferred first
MIN_GAIN = 0.005  # in AUC, from which on trees are recommended
RunsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="Run folder, or several, whose probabilities are averaged."),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        help="Rows to use: parquet:PATH, delta:TABLE and the like, or a path (default: the recipe's test rows)."
    ),
]


def evaluate(
    runs: RunsArgument,
    data: DataOption = None,
    which: Which = "best",
    slices: Annotated[
        str | None, typer.Option(help="Features whose most frequent ids get their own metrics, such as user,city.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on its test rows or on other files; of several runs, each one and their ensemble.

    Example: rowwise eval runs/dlrm-synthetic/1

    Example: rowwise eval runs/dlrm-synthetic/1 --data parquet:tomorrow.parquet --slices city

    Example: rowwise eval runs/clicks/1 runs/clicks/2 runs/clicks/3
    """
    from rowwise.recipes.ensemble import evaluate_ensemble
    from rowwise.recipes.trained import evaluate as measure
    from rowwise.train.evaluate import undefined

    for run in runs:
        warn_of_run_code(run)
    console = make_terminal(stderr=True, quiet=as_json)
    features, warn = None if slices is None else tuple(slices.split(",")), partial(show_warning, console)
    if len(runs) > 1:
        with console.status("evaluating"):
            ensemble = evaluate_ensemble(runs, which=which, data=data, slices=features, warn=warn)
        (print_ensemble_json if as_json else show_ensemble)(runs, ensemble)
        return
    with console.status("evaluating"):
        scores = measure(runs[0], which=which, data=data, slices=features, warn=warn)
    if as_json:
        print_json(scores_as_json(scores))
    else:
        _show_scores(scores)
        for line in undefined(scores.tasks, "measured"):
            warn(line)


def predict(  # noqa: PLR0913 - one for each option
    runs: RunsArgument,
    out: Annotated[Path, typer.Option(help="File to write: .parquet or .csv.")],
    data: DataOption = None,
    which: Which = "best",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS", help="Input columns to copy to the output, such as user,item, or all; repeatable."
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", help="Number of items per list, for sequence models (default: 10)."),
    ] = None,
    memory: MemoryForRows = None,
) -> None:
    """Predict rows of files: write the key of each row with the logit and probability of each label, as Parquet or CSV.

    Rows need no labels. Without a key column in the recipe, rows are numbered. Probabilities of several runs are
    averaged. RUN may be a folder of rowwise export, for the answers of a server offline. A sequence model (sasrec,
    hstu) has no labels: the columns `items` and `scores` have the best items for each list.

    Example: rowwise predict runs/dlrm-synthetic/1 --data parquet:tomorrow.parquet --out predictions.parquet

    Example: rowwise predict runs/clicks/1 --data csv:tomorrow.csv --out predictions.csv --keep user,item

    Example: rowwise predict runs/clicks/1 --data tomorrow.parquet --out predictions.parquet --keep all

    Example: rowwise predict runs/clicks/1 runs/clicks/2 runs/clicks/3 --out predictions.csv

    Example: rowwise predict runs/sasrec/1 --data parquet:lists.parquet --out next.parquet --k 20
    """
    from rowwise.planning.planner.machines import parse_size
    from rowwise.recipes.ensemble import predict_ensemble
    from rowwise.recipes.predict import check_out

    check_out(out)
    size = None if memory is None else parse_size(memory, "--memory")
    for run in runs:
        warn_of_run_code(run)
    console = make_terminal(stderr=True)
    with splits_bar(console, "predicting") as tell:
        warn = partial(show_warning, console)
        rows = predict_ensemble(
            runs, out, which=which, data=data, keep=keep or (), tell=tell, warn=warn, memory_bytes=size, k=k
        )
    print_line(f"wrote {out}: {rows:,} rows")


def baseline(run: RunArgument) -> None:
    """Train boosted trees (LightGBM) on the rows of a run, and compare both on its test rows.

    The report of the run includes the result. Needs LightGBM, from the extra `trees`.

    Example: rowwise baseline runs/clicks/1
    """
    warn_of_run_code(run)
    compare_with_trees(run, make_terminal(stderr=True))


def compare_with_trees(run: Path, console: Console) -> None:
    """Train trees on the rows of a run, and print the test metrics of both."""
    from rowwise.recipes.baseline import fit_trees

    with console.status("training trees"):
        trees = fit_trees(run)
    _show_baseline(trees, run)


def suggest_trees(run: Path, console: Console) -> None:
    """If trees train in seconds, print one line that compares them with the model of a run."""
    from rowwise.recipes.baseline import fit_quick_trees

    with console.status("comparing with trees"):
        trees = fit_quick_trees(run)
    if trees is None or "auc" not in trees.test:
        return
    trees_auc, auc = trees.test["auc"], _test_metrics(run, trees.task).get("auc", 0.0)
    line = f"trees   boosted trees reach AUC {trees_auc:.4f}, this model {auc:.4f}"
    advice = f": for this data use them (rowwise baseline {run})" if trees_auc - auc > MIN_GAIN else ""
    say(console, f"{line}{advice}")


def _test_metrics(run: Path, task: str) -> dict[str, float]:
    from rowwise.report.read import read_run

    result = read_run(run).result
    metrics: dict[str, float | None] = {} if result is None else result.test.get(task, {})
    return {name: value for name, value in metrics.items() if value is not None}


def _show_baseline(trees: "TreeBaseline", run: Path) -> None:
    """Print the test metrics of a run and of trees on the same rows, and the AUC between them."""
    model = _test_metrics(run, trees.task)
    console = make_terminal()
    names = tuple(name for name in COMPARED if name in trees.test)
    table = make_table((f"test {trees.task}",), names)
    for title, values in ((str(run), model), (f"LightGBM, {trees.trees} trees", trees.test)):
        table.add_row(title, *(_format_metric(name, values[name]) if name in values else "" for name in names))
    console.print(table, markup=False)
    judge = next((name for name in JUDGES if name in model and name in trees.test), None)
    if judge is not None:
        gain = model[judge] - trees.test[judge]
        better = gain > 0 if judge == "auc" else gain < 0
        verdict = "the model is better" if better else "trees are better here"
        print_line(
            f"{verdict} by {abs(gain):.4f} {JUDGES[judge]}; trees took {trees.seconds:.0f} s on {trees.rows:,} rows"
        )


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folder, or several to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write (default: RUN/report.html; for several, compared.html).")
    ] = None,
) -> None:
    """Rewrite the HTML report of a run, or write one that compares several runs.

    Example: rowwise report runs/dlrm-synthetic/1

    Example: rowwise report runs/dlrm-synthetic/1 runs/dlrm-synthetic/2 --out compared.html
    """
    from rowwise.report import compare, write

    page = write(runs[0], out) if len(runs) == 1 else compare(runs, out or Path("compared.html"))
    print_line(str(page))


def _show_scores(scores: "Scores") -> None:
    console = make_terminal()
    names = list(dict.fromkeys(name for values in scores.tasks.values() for name in values))
    table = make_table(("",), names)
    slices = ((name, row.values) for name, row in slices_by_name(scores))
    for label, values in (*scores.tasks.items(), *slices):
        table.add_row(label, *(_format_metric(name, values[name]) if name in values else "" for name in names))
    console.print(table, markup=False)


def _format_metric(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "count" else f"{value:.4f}"
