"""What do the recipes that ship reach, on made-up data and two public datasets?

    python benchmarks/zoo.py [--quick | --smoke] [--only movielens discs] [--data data] [--save]

Several seeds each. Seeds change the initial weights and the order of the rows; which rows are to train, validate and
test on is the same for all. Metrics are of the test rows, with the checkpoint that was best on validation rows where
there are such. `--quick` is MovieLens and one seed. The last printed line is one JSON object.

Takes: 15 minutes; --quick 1 minute
Needs: `rowwise data get` for complete-journey, discs, movielens-100k and its -sequences and -histories
"""

import json
import statistics
import tempfile
from pathlib import Path

from parts.command import rowwise
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from parts.tiny_data import make_tiny
from rich.progress import Progress

from rowwise.ingest.datasets.catalog import FROM_FILES
from rowwise.recipes.find import load, names

SEEDS = 3
SMOKE, PICTURES = "complete-journey-dlrm", "discs-pictures"
FLOORS = {  # recipe: metric, bound, whether it is the least
    "complete-journey-dlrm": (("auc", 0.908, True), ("ne", 0.604, False)),
    "complete-journey-history": (("auc", 0.912, True),),
    "movielens-wide-deep": (("auc", 0.775, True),),
}


def train(name: str, seed: int, data: Path) -> dict:
    """One run of a recipe, as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        words = load(name).about.run.split()[1:]  # with the number of ranks
        changes = ["--set", f"seed={seed}", "--set", f"data.folder={data.absolute()}"]
        if name == PICTURES:
            changes += ["--set", f"model.item_pictures.folder={data.absolute() / 'discs' / 'pictures'}"]
        result = json.loads(rowwise(*words, "--runs", folder, "--json", *changes))
    (values,) = result["test"].values()
    metrics = {m: values[m] for m in ("auc", "ne", "recall@10", "recall@50", "ndcg@10") if m in values}
    about = {"steps": result["steps"], "wall_s": result["wall_s"], "memory_gb": result["peak_memory_bytes"] / 1e9}
    return {"recipe": name, "seed": seed, **metrics, **about}


def floors_of(rows: list[dict]) -> list[dict]:
    floors = []
    for name, wanted in FLOORS.items():
        mine = [row for row in rows if row["recipe"] == name]
        for metric, bound, least in wanted if mine else ():
            value = statistics.mean(row[metric] for row in mine)
            what = f"{name}: {metric}, mean of {len(mine)} seeds"
            floors.append((at_least if least else at_most)(what, value, bound))
    return floors


def main() -> None:
    parser = options("zoo", __doc__, data=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="recipes whose names begin so")
    args = parsed(parser)
    if args.smoke:
        with tempfile.TemporaryDirectory() as folder:
            row = train(SMOKE, 0, make_tiny(Path(folder)))
        floors = [
            exactly("steps of an epoch of made-up rows", row["steps"], 2),
            exactly("metrics of test rows", int(row["auc"] > 0 and row["ne"] > 0), 1),
        ]
        finish("zoo", [row], floors, args)
        return
    beginnings = tuple(args.only or ("movielens" if args.quick else "",))
    chosen = [name for name in names() if name.startswith(beginnings) and load(name).data.dataset not in FROM_FILES]
    rows: list[dict] = []
    with Progress() as progress:
        task = progress.add_task("training", total=len(chosen) * (1 if args.quick else SEEDS))
        for name in chosen:
            for seed in range(1 if args.quick else SEEDS):
                progress.update(task, description=f"{name}, seed {seed}")
                rows.append(train(name, seed, args.data))
                show(rows[-1])
                progress.advance(task)
    finish("zoo", rows, floors_of(rows), args)


if __name__ == "__main__":
    main()
