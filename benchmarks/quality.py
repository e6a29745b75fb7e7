"""What narrower numbers cost in quality: NE and AUC of a DLRM trained on made-up clicks whose best AUC is known.

    python benchmarks/quality.py [--quick] [--save benchmarks/results/quality.json]

Trains the recipe `dlrm-synthetic` on 2 million samples, seen once, by row type and with 16-bit dense products. All
models of a seed start from the same rows and see the same samples in the same order; they are compared on samples not
trained on. Normalised entropy (NE) is the log loss over that of always saying the base rate. The last printed line is
one JSON object.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from report import environment, finish
from rich.progress import Progress

from rowwise import RowType
from rowwise.recipes.compose import make_evaluator, make_job, make_model, make_settings, resolve
from rowwise.recipes.find import load
from rowwise.recipes.runs import best_possible
from rowwise.train.trainer import Trainer

TEACHER = "the teacher"
VARIANTS = {str(row_type): f"tables.all.row_type={row_type}" for row_type in RowType}
VARIANTS |= {"fp32, bf16 products": "train.precision=bf16"}


def score(seed: int, samples: int, change: str) -> dict[str, dict[str, float]]:
    """NE and AUC of a model, and of the teacher on the same rows."""
    changes = [f"seed={seed}", f"data.rows={samples}", "data.test_rows=200000", change]
    resolved = resolve(load("dlrm-synthetic", changes))
    model = make_model(resolved)
    Trainer(make_job(resolved, model), make_settings(resolved.recipe)).run()
    rows = resolved.parts.test
    found = {"model": make_evaluator(resolved, model, rows)().tasks, TEACHER: best_possible(resolved, rows)}
    return {who: {name: tasks["label"][name] for name in ("ne", "auc")} for who, tasks in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a coarser answer in under a minute")
    parser.add_argument("--save", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    samples, seeds = (200_000, 1) if args.quick else (2_000_000, 3)
    rows: list[dict] = []
    with Progress() as progress:
        for seed in progress.track(range(seeds), description="seeds"):
            for name, change in VARIANTS.items():
                found = score(seed, samples, change)
                rows.append({"seed": seed, "row_type": name, **found["model"]})
            rows.append({"seed": seed, "row_type": TEACHER, **found[TEACHER]})
    for row in rows:
        print("seed {seed}  {row_type:>19}  NE {ne:.5f}  AUC {auc:.5f}".format(**row))
    result = {"benchmark": "quality", "environment": environment(), "rows": rows, "floors": floors_of(rows)}
    finish(result, args.save)


def floors_of(rows: list[dict]) -> list[dict]:
    """By how much each variant's NE is above that of fp32, the mean over seeds; nothing is asked of int8."""
    floors = []
    for name, ceiling in (("fp16", 0.0005), ("bf16", 0.0005), ("int8", None)):
        more = above_exact(rows, name, "ne")
        what = f"NE of {name} rows above that of fp32 rows ({'at most' if ceiling else 'reported'})"
        floors.append(
            {"name": what, "value": round(more, 6), "floor": ceiling, "ok": ceiling is None or more <= ceiling}
        )
    lost = -above_exact(rows, "fp32, bf16 products", "auc")
    what = "AUC lost by 16-bit dense products (at most)"
    return [*floors, {"name": what, "value": round(lost, 6), "floor": 0.001, "ok": lost <= 0.001}]


def above_exact(rows: list[dict], name: str, metric: str) -> float:
    """The mean difference to fp32."""
    exact = {r["seed"]: r[metric] for r in rows if r["row_type"] == "fp32"}
    more = [r[metric] - exact[r["seed"]] for r in rows if r["row_type"] == name]
    return sum(more) / len(more)


if __name__ == "__main__":
    main()
