"""How much do losses for noisy labels save, when a share of the training labels is wrong?

    python benchmarks/noise.py [--quick | --smoke] [--only movielens digits] [--data data] [--save]

Plants 0 to 40 % wrong labels among the training rows of MovieLens-100k, a tenth of Complete Journey and scikit-learn's
digits, and trains to the end, without early stopping: a click model, or one logit for each of ten classes. Test labels
are right. `drop` is what is lost between the best evaluation and the last one, which early stopping would have saved.
`--quick` has digits only, one seed and the shares 0 and 20 %. The last printed line is one JSON object. `--save FILE`
writes after each training; `--measured FILE` continues from there.

Takes: 50 minutes; --quick 1 minute
Needs: `rowwise data get` for movielens-100k and complete-journey; scikit-learn
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from parts.noise_peers import LastBatch, Sharpness
from parts.noise_work import WORLDS, World, run
from parts.report import at_least, at_most, exactly, finish, options, parsed, save, show
from rich.progress import Progress

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
SEEDS = 3
KEYS = ("world", "wrong", "loss", "seed")  # of a training
PLAIN, SMC, AUGMENTED, AUGMENTED_SMC = "log loss", "smc", "augmented", "augmented, smc"
LAST_BATCH, SHARPNESS = "last mini-batch", "SAM, dense parameters"
AUGMENT = "augment"  # stands for the changes of a dataset
OBJECTIVES = {LAST_BATCH: LastBatch, SHARPNESS: Sharpness}  # that are no losses of a recipe
RISE = 20  # of a training's steps, in which co-teaching's share rises; in the paper those of 10 of 200 epochs
MORE_AUC = 0.02  # of smc over log loss, with 20 % wrong labels
LOSSES = {
    PLAIN: [],
    "label smoothing .1": ["train.label_smoothing=0.1"],
    "bootstrap, soft": ["train.objective.kind=bootstrap"],
    "bootstrap, hard": ["train.objective.kind=bootstrap", "train.objective.hard=true"],
    "gce": ["train.objective.kind=gce"],
    SMC: ["train.objective.kind=smc", "train.objective.steps={steps}"],
    LAST_BATCH: [],
    SHARPNESS: [],
    AUGMENTED: [AUGMENT],
    AUGMENTED_SMC: [AUGMENT, "train.objective.kind=smc", "train.objective.steps={steps}"],
    "co-teaching .2": ["train.objective.kind=co_teaching", "train.objective.steps={rise}"],
}


def measure(args: argparse.Namespace, folder: Path) -> list[dict]:
    """A row for each training; seeds are in the outer loop, so that rows up to any time are a table of fewer seeds."""
    shares, seeds = ((0.0, 0.2), 1) if args.quick else (args.shares, args.seeds)
    measured = (row for file in args.measured for row in json.loads(file.read_text())["rows"])
    known = {tuple(row[key] for key in KEYS): row for row in measured}
    rows: list[dict] = list(known.values())
    with Progress() as progress:
        task = progress.add_task("training", total=len(args.only) * len(shares) * len(args.losses) * seeds)
        for seed in range(seeds):
            for name in args.only:
                for share in shares:
                    place = folder / f"{name}-{share}"
                    if not place.exists():
                        WORLDS[name].write(args.data.absolute(), place, share)
                    for loss in args.losses:
                        progress.advance(task)
                        if (name, share, loss, seed) in known:
                            continue
                        made = changes(loss, WORLDS[name], smoke=args.smoke)
                        found = run(WORLDS[name], place, seed, made, OBJECTIVES.get(loss))
                        rows.append({"world": name, "wrong": share, "loss": loss, "seed": seed, **found})
                        show(rows[-1])
                        save({"benchmark": "noise", "run": "in part", "rows": rows}, args.save)
    return rows


def changes(loss: str, world: World, *, smoke: bool) -> list[str]:
    made: list[str] = []
    for change in LOSSES[loss]:
        steps = {"steps": world.steps, "rise": world.steps // RISE}
        made += world.augment if change == AUGMENT else [change.format(**steps)]
    return made + (["train.steps=10"] if smoke else [])


def values_of(rows: list[dict], world: str, wrong: float, loss: str) -> list[float]:
    metric = WORLDS[world].metric
    return [r[metric] for r in rows if (r["world"], r["wrong"], r["loss"]) == (world, wrong, loss)]


def floors_of(rows: list[dict]) -> list[dict]:
    """Of smc: what it saves with a fifth of the labels wrong, and that it costs nothing beyond the seeds' spread."""
    floors: list[dict] = []
    if not {PLAIN, SMC} <= {row["loss"] for row in rows}:
        return floors
    for world in dict.fromkeys(row["world"] for row in rows):
        metric = WORLDS[world].metric
        ours, plain = (statistics.mean(values_of(rows, world, 0.2, loss)) for loss in (SMC, PLAIN))
        floor = MORE_AUC if metric == "auc" else None
        floors.append(at_least(f"{world}, 20 % wrong: {metric} of smc above log loss", ours - plain, floor))
        exact = values_of(rows, world, 0.0, PLAIN)
        lost = statistics.mean(exact) - statistics.mean(values_of(rows, world, 0.0, SMC))
        spread = max(exact) - min(exact) if len(exact) > 1 else None
        floors.append(at_most(f"{world}, none wrong: {metric} that smc loses; floor: the seeds' spread", lost, spread))
    return floors


def main() -> None:
    parser = options("noise", __doc__, data=True)
    parser.add_argument("--only", nargs="+", choices=WORLDS, help="of the datasets")
    parser.add_argument(
        "--losses", nargs="+", choices=LOSSES, default=list(LOSSES), help="without log loss and smc: no floors"
    )
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of wrong labels")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="trainings of each loss and share")
    parser.add_argument("--measured", nargs="+", type=Path, default=[], metavar="FILE", help="keep the rows of FILEs")
    args = parsed(parser)
    args.only = args.only or (["digits"] if args.quick else list(WORLDS))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    finish("noise", rows, floors, args)


def smoke_floors(rows: list[dict]) -> list[dict]:
    """All losses train for as long, and each learns something else."""
    return [
        exactly("trainings", len(rows), 2 * len(LOSSES)),
        exactly("NEs that differ", len({row["ne"] for row in rows}), 2 * len(LOSSES)),
    ]


if __name__ == "__main__":
    main()
