"""`rowwise eval`, `rowwise predict` and `rowwise report`: what a trained model is good for."""

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rowwise.cli.code import tell_of_run
from rowwise.cli.console import console_for, show_warning
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import say, terminal
from rowwise.errors import SpecError

if TYPE_CHECKING:
    from rowwise.train.evaluate import Scores

RunArgument = Annotated[Path, typer.Argument(help="The folder of a run, such as runs/dlrm-synthetic/1.")]
Which = Annotated[str, typer.Option(help="Which checkpoint: best, last or step-<number>.")]
DataOption = Annotated[
    str | None, typer.Option(help="parquet:PATH, csv:PATH or a path; without it, the test rows of the recipe.")
]


def evaluate(
    run: RunArgument,
    data: DataOption = None,
    which: Which = "best",
    slices: Annotated[
        str | None, typer.Option(help="Features whose most common ids are measured one by one: user,city.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure a trained model.

    Example: rowwise eval runs/dlrm-synthetic/1

    Example: rowwise eval runs/dlrm-synthetic/1 --data parquet:tomorrow.parquet --slices city
    """
    from rowwise.recipes.runs import evaluate as measure

    tell_of_run(run)
    console = console_for(quiet=as_json)
    with console.status("evaluating"):
        chosen = None if slices is None else tuple(slices.split(","))
        scores = measure(run, which=which, data=data, slices=chosen, warn=partial(show_warning, console))
    if as_json:
        print(json.dumps(_plain(scores), indent=2))
    else:
        _show(scores)


def predict(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    data: DataOption = None,
    which: Which = "best",
) -> None:
    """Write a Parquet file with each row's key, and logit and probability of each label.

    The rows need no labels.

    Example: rowwise predict runs/dlrm-synthetic/1 --data parquet:tomorrow.parquet --out predictions.parquet
    """
    from rowwise.recipes.runs import predict_rows

    if not out.parent.is_dir() or (out.exists() and not out.is_file()):
        raise SpecError(f"--out {out}: want the name of a file, in a folder that is there")
    tell_of_run(run)
    console = console_for(quiet=False)
    with splits_bar(console, "predicting") as tell:
        rows = predict_rows(run, out, which=which, data=data, tell=tell, warn=partial(show_warning, console))
    say(f"{out}: {rows:,} rows")


def report(
    runs: Annotated[list[Path], typer.Argument(help="The folder of a run; or of several, to compare them.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; without it, report.html in the first run.")] = None,
) -> None:
    """Write the report of a run anew, or one that compares runs.

    Example: rowwise report runs/dlrm-synthetic/1

    Example: rowwise report runs/dlrm-synthetic/1 runs/dlrm-synthetic/2 --out compared.html
    """
    from rowwise.report import compare, write

    made = write(runs[0], out) if len(runs) == 1 else compare(runs, out or Path("compared.html"))
    say(str(made))


def _show(scores: "Scores") -> None:
    console = terminal()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = list(dict.fromkeys(name for values in scores.tasks.values() for name in values))
    for name in ("", *names):
        table.add_column(name, justify="right" if name else "left")
    lines = [(task, values) for task, values in scores.tasks.items()]
    for row in scores.slices:
        where = f"{row.feature} {'others' if row.value is None else row.value}"
        lines.append((where if len(scores.tasks) == 1 else f"{row.task}, {where}", dict(row.values)))
    for label, values in lines:
        table.add_row(label, *(_number(name, values[name]) if name in values else "" for name in names))
    console.print(table, markup=False)


def _number(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "count" else f"{value:.4f}"


def _plain(scores: "Scores") -> dict[str, object]:
    tasks = {
        task: {k: v if math.isfinite(v) else None for k, v in values.items()} for task, values in scores.tasks.items()
    }
    slices = [
        {"feature": s.feature, "value": s.value, "task": s.task}
        | {k: v if math.isfinite(v) else None for k, v in s.values.items()}
        for s in scores.slices
    ]
    return {"tasks": tasks, "slices": slices}
