"""Prints the metrics of several runs and of their ensemble, and what the ensemble costs."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_bytes
from rowwise.cli.console import show_warning
from rowwise.cli.terminal import make_table, make_terminal, print_json, print_line

if TYPE_CHECKING:
    from rowwise.recipes.ensemble import EnsembleScores
    from rowwise.recipes.recipe import Recipe
    from rowwise.train.evaluate import Scores, SliceRow

METRICS = ("loss", "ne", "auc", "calibration")


def check_recipe(recipe: "Recipe", seeds: int) -> None:
    """Raise before training for a recipe whose runs cannot be averaged."""
    from rowwise.ingest.datasets.files import check_fixed
    from rowwise.recipes.model_kinds import check_use
    from rowwise.recipes.recipe import check_amounts

    if recipe.save.mirror is not None:
        raise SpecError(
            f"--seeds {seeds}: save.mirror={recipe.save.mirror} is for one run", hint="add --set save.mirror=null"
        )
    check_fixed((recipe.data.dataset, recipe.data.valid, recipe.data.test), f"--seeds {seeds}")
    check_amounts(recipe, f"--seeds {seeds}")
    check_use(recipe.model, "ensemble", f"--seeds {seeds}")


def compare_runs(runs: Sequence[Path]) -> None:
    """Evaluate the ensemble of trained runs on the test rows, and print the command that predicts with it."""
    from rowwise.recipes.ensemble import evaluate_ensemble, record_ensemble
    from rowwise.recipes.trained import resolve_saved

    if resolve_saved(runs[0]).rows.test is None:
        print_line("no test rows: the ensemble was not measured")
    else:
        console = make_terminal(stderr=True)
        with console.status("evaluating"):
            scores = evaluate_ensemble(runs, warn=partial(show_warning, console))
        record_ensemble(runs, scores)
        show_ensemble(runs, scores)
    print_line(f"predict with all: rowwise predict {' '.join(map(str, runs))} --out predictions.parquet")


def slices_by_name(scores: "Scores") -> "Iterator[tuple[str, SliceRow]]":
    for row in scores.slices:
        label = f"{row.feature} {'others' if row.value is None else row.value}"
        yield label if len(scores.tasks) == 1 else f"{row.task}, {label}", row


def scores_as_json(scores: "Scores") -> dict[str, object]:
    slices = [{"feature": s.feature, "value": s.value, "task": s.task} | dict(s.values) for s in scores.slices]
    return {"tasks": scores.tasks, "slices": slices}


def show_ensemble(runs: Sequence[Path], scores: "EnsembleScores") -> None:
    table = make_table(("",), METRICS)
    lines = [*zip(map(str, runs), scores.each, strict=True), (f"mean of {len(runs)}", scores.ensemble.tasks)]
    for name, tasks in lines:
        for task, values in tasks.items():
            table.add_row(name if len(tasks) == 1 else f"{name} {task}", *(f"{values[m]:.4f}" for m in METRICS))
    for name, row in slices_by_name(scores.ensemble):
        table.add_row(name, *(f"{row.values[m]:.4f}" for m in METRICS))
    make_terminal().print(table, markup=False)
    count = int(next(iter(scores.ensemble.tasks.values()))["count"])
    max_s, max_bytes = max(scores.seconds), max(scores.weight_bytes)
    print_line(
        f"cost: {format_bytes(sum(scores.weight_bytes))} of weights and {sum(scores.seconds):.2f} s of models for "
        f"{count:,} rows; a single run at most {format_bytes(max_bytes)} and {max_s:.2f} s"
    )


def print_ensemble_json(runs: Sequence[Path], scores: "EnsembleScores") -> None:
    """Print one object: metrics of the ensemble in the format of a single run, and those of each run."""
    facts = zip(runs, scores.each, scores.seconds, scores.weight_bytes, strict=True)
    each = [{"run": str(run), "tasks": t, "seconds": s, "weight_bytes": b} for run, t, s, b in facts]
    print_json({**scores_as_json(scores.ensemble), "runs": each})
