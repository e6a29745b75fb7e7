"""What do narrower rows and products cost in quality, where the best AUC is known?

    python benchmarks/quality.py [--quick | --smoke] [--save]

NE and AUC of a DLRM on made-up clicks. Trains the recipe `dlrm-synthetic` on 2 million samples, seen once, by row type
and with 16-bit dense products. All models of a seed start from the same rows and see the same samples in the same
order; they are compared on samples not trained on. Normalised entropy (NE) is the log loss over that of always saying
the base rate. The last printed line is one JSON object.

Takes: 15 minutes; --quick 1 minute
Needs: nothing else
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from parts.recipe_job import job_of
from parts.report import at_most, exactly, finish, options, parsed, show
from rich.progress import Progress

from rowwise.recipes.compose import make_evaluator, make_model, make_settings, resolve
from rowwise.recipes.find import load
from rowwise.recipes.trained import best_possible_metrics
from rowwise.tables.spec import TRAINED_TYPES
from rowwise.train.trainer import Trainer

TEACHER = "the teacher"
VARIANTS = {str(row_type): f"tables.all.row_type={row_type}" for row_type in TRAINED_TYPES}
VARIANTS |= {"fp32, bf16 products": "train.precision=bf16"}


def score(seed: int, samples: int, change: str) -> dict[str, dict[str, float]]:
    """NE and AUC of a model, and of the teacher on the same rows."""
    changes = [f"seed={seed}", f"data.rows={samples}", f"data.test_rows={min(samples, 200_000)}", change]
    resolved = resolve(load("dlrm-synthetic", changes))
    model = make_model(resolved)
    Trainer(job_of(resolved, model), make_settings(resolved.recipe)).run()
    rows = resolved.rows.test
    found = {"model": make_evaluator(resolved, model, rows)().tasks, TEACHER: best_possible_metrics(resolved, rows)}
    return {who: {name: tasks["label"][name] for name in ("ne", "auc")} for who, tasks in found.items()}


def main() -> None:
    args = parsed(options("quality", __doc__))
    samples, seeds = (4_000 if args.smoke else 200_000, 1) if args.quick else (2_000_000, 3)
    rows: list[dict] = []
    with Progress() as progress:
        for seed in progress.track(range(seeds), description="seeds"):
            for name, change in VARIANTS.items():
                found = score(seed, samples, change)
                rows.append({"seed": seed, "row_type": name, **found["model"]})
            rows.append({"seed": seed, "row_type": TEACHER, **found[TEACHER]})
    for row in rows:
        show(row)
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    finish("quality", rows, floors, args)


def smoke_floors(rows: list[dict]) -> list[dict]:
    """Too few samples to learn from, so no model comes near the teacher."""
    best = min(rows, key=lambda row: row["ne"])["row_type"]
    return [
        exactly("kinds of rows", len(rows), len(VARIANTS) + 1),
        exactly("the teacher has the best NE", int(best == TEACHER), 1),
    ]


def floors_of(rows: list[dict]) -> list[dict]:
    """By how much each variant's NE is above that of fp32, the mean over seeds; nothing is asked of int8."""
    floors = [
        at_most(f"NE of {name} rows above that of fp32 rows", above_exact(rows, name, "ne"), ceiling)
        for name, ceiling in (("fp16", 0.0005), ("bf16", 0.0005), ("int8", None))
    ]
    lost = -above_exact(rows, "fp32, bf16 products", "auc")
    return [*floors, at_most("AUC lost by 16-bit dense products", lost, 0.001)]


def above_exact(rows: list[dict], name: str, metric: str) -> float:
    """The mean difference to fp32."""
    exact = {r["seed"]: r[metric] for r in rows if r["row_type"] == "fp32"}
    more = [r[metric] - exact[r["seed"]] for r in rows if r["row_type"] == name]
    return sum(more) / len(more)


if __name__ == "__main__":
    main()
