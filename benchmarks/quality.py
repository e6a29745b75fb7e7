"""What narrower rows cost in quality: normalised entropy of a DLRM trained on clicks of a planted teacher.

    python benchmarks/quality.py [--quick] [--save benchmarks/results/quality.json]

All models of a seed start from the same rows and see the same samples once, in the same order; they are compared on
samples not trained on. Normalised entropy (NE) is the log loss over that of always saying the base rate. The last
printed line is one JSON object.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from report import environment, finish
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from dlrm_synthetic import DENSE, DIM, World, auc, make_tables

from rowwise import DLRM, Batch, Embeddings, Normal, RowType

BATCH = 2048


def make_model(row_type: RowType, seed: int) -> DLRM:
    torch.manual_seed(seed)  # the same dense layers for every type
    tables = make_tables(DIM, Normal(std=0.05), row_type)
    return DLRM(Embeddings(tables, seed=seed), DENSE, bottom=(64, DIM), top=(64, 1))


def normalised_entropy(logits_B: Tensor, clicks_B: Tensor) -> float:
    rate = clicks_B.mean()
    base = -(rate * rate.log() + (1 - rate) * (1 - rate).log())
    return float(log_loss(logits_B, clicks_B) / base)


def train(models: dict[RowType, DLRM], world: World, steps: int, tell: Progress) -> None:
    """One pass over fresh samples, every model on each of them."""
    optimizers = {
        name: torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        for name, model in models.items()
    }
    for _ in tell.track(range(steps), description=", ".join(models)):
        batch, _ = world.sample(BATCH)
        for name, model in models.items():
            optimizers[name].zero_grad()
            log_loss(model(batch).squeeze(1), batch.labels_BK.squeeze(1)).backward()
            optimizers[name].step()
            model.embeddings.update()


@torch.no_grad()
def score(model: DLRM, batches: list[Batch]) -> dict[str, float]:
    logits_B = torch.cat([model(b).squeeze(1) for b in batches])
    clicks_B = torch.cat([b.labels_BK.squeeze(1) for b in batches])
    return {"ne": normalised_entropy(logits_B, clicks_B), "auc": auc(logits_B, clicks_B)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a coarser answer in under a minute")
    parser.add_argument("--save", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    steps, seeds = (100, 1) if args.quick else (1000, 3)
    rows: list[dict] = []
    with Progress() as progress:
        for seed in range(seeds):
            torch.manual_seed(seed)
            world = World(seed)
            held_out = [world.sample(10_000) for _ in range(20)]
            models = {row_type: make_model(row_type, seed) for row_type in RowType}
            train(models, world, steps, progress)
            batches = [batch for batch, _ in held_out]
            for row_type, model in models.items():
                rows.append({"seed": seed, "row_type": str(row_type), **score(model, batches)})
            logits_B = torch.cat([x for _, x in held_out])
            clicks_B = torch.cat([b.labels_BK.squeeze(1) for b in batches])
            ne, best = normalised_entropy(logits_B, clicks_B), auc(logits_B, clicks_B)
            rows.append({"seed": seed, "row_type": "the teacher", "ne": ne, "auc": best})
    for row in rows:
        print("seed {seed}  {row_type:>11}  NE {ne:.5f}  AUC {auc:.5f}".format(**row))
    result = {"benchmark": "quality", "environment": environment(), "rows": rows, "floors": floors_of(rows)}
    finish(result, args.save)


def floors_of(rows: list[dict]) -> list[dict]:
    """By how much each type's NE is above that of fp32, the mean over seeds; nothing is asked of int8."""
    exact = {r["seed"]: r["ne"] for r in rows if r["row_type"] == "fp32"}
    floors = []
    for row_type, ceiling in (("fp16", 0.0005), ("bf16", 0.0005), ("int8", None)):
        more = [r["ne"] - exact[r["seed"]] for r in rows if r["row_type"] == row_type]
        mean = sum(more) / len(more)
        name = f"NE of {row_type} rows above that of fp32 rows ({'at most' if ceiling else 'reported'})"
        floors.append(
            {"name": name, "value": round(mean, 6), "floor": ceiling, "ok": ceiling is None or mean <= ceiling}
        )
    return floors


if __name__ == "__main__":
    main()
