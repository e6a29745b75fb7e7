"""How much do incremental checkpoints and fewer bits leave to be written and read, and what do they cost?

    python benchmarks/checkpoint_delta.py [--quick | --smoke] [--only bytes] [--data data] [--save]

Sections:

    bytes    ten checkpoints of 26 tables of dim 64 at Zipf(1.05) traffic, an id a feature, so many samples apart: what
             is written, and how long writing and reading back take (files are in the page cache)
    quality  NE of recipes that went back to a rounded checkpoint half-way, beside those that went back to an exact one,
             which is as if they had not stopped; what it costs is held against what another seed does

The last printed line is one JSON object.

Takes: 30 minutes; --quick 3 minutes
Needs: 3 GB of disk; for quality `rowwise data get movielens-100k` and `rowwise data get complete-journey`
"""

import argparse
import copy
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from parts.batches import bags_of, names_of, tables_of
from parts.ops_work import Work, ids_for, rows_for
from parts.recipe_job import job_of
from parts.report import at_least, at_most, environment, exactly, finish, options, parsed, show
from parts.tiny_data import make_tiny
from rich.progress import track
from torch import nn

from rowwise import Adam, Embeddings, RowWiseAdagrad
from rowwise.checkpoint.policy import RESTORES
from rowwise.checkpoint.read import Checkpoint
from rowwise.train.saved import CheckpointFolder, CheckpointReduction
from rowwise.train.snapshot import collect, restore

DIM, FEATURES, BATCH, COUNT = 64, 26, 8192, 10
OPTIMIZERS = {"row-wise adagrad": RowWiseAdagrad(lr=0.01), "adam": Adam(lr=0.001)}
WAYS = {
    "full": CheckpointReduction(),
    "full, 8 bits": CheckpointReduction(bits=8),
    "full, 4 bits": CheckpointReduction(bits=4),
    "incremental": CheckpointReduction(incremental=True),
    "incremental, 8 bits": CheckpointReduction(incremental=True, bits=8),
    "incremental, 4 bits": CheckpointReduction(incremental=True, bits=4),
}
RECIPES = ("movielens-dlrm", "complete-journey-dlrm")
STEPS = {"movielens-dlrm": 4 * 157, "complete-journey-dlrm": None}  # None: as many as its epoch has
SEEDS, AT_LEAST, SMOKE_STEPS = 3, 6.0, 4
SECTIONS = ("bytes", "quality")
SMALLEST = ["incremental, 4 bits", "incremental, 8 bits"]


class Traffic(NamedTuple):
    """Samples between two checkpoints, for tables of up to so many rows."""

    rows: int
    samples: int
    optimizer: str = "row-wise adagrad"


# A sample has an id of each table, so what counts is how many there are for each row of the largest.
TRAFFIC = [Traffic(300_000, 30_000), Traffic(300_000, 100_000), Traffic(300_000, 300_000)]
TRAFFIC += [Traffic(300_000, 100_000, "adam")]


class Net(nn.Module):
    def __init__(self, rows: Sequence[int], optimizer: str) -> None:
        super().__init__()
        self.embeddings = Embeddings(tables_of(rows, DIM, optimizer=OPTIMIZERS[optimizer]))


def train(model: Net, rows: list[int], samples: int, seed: int) -> None:
    names = names_of(len(rows))
    for number, first in enumerate(range(0, samples, BATCH)):
        size = min(BATCH, samples - first)
        ids = ids_for(rows, Work(DIM, size, 1, "zipf", 1, ""), 1000 * seed + number)
        vectors = model.embeddings(bags_of(names, ids)).matrix_BS
        vectors.backward(torch.randn(vectors.shape))
        model.embeddings.update()


def measure_bytes(traffic: Traffic, count: int) -> list[dict]:
    """All ways save the same state: each finds the marks as they are since the last time."""
    rows = rows_for(FEATURES, 1_000, traffic.rows)
    torch.manual_seed(0)
    model = Net(rows, traffic.optimizer)
    touched = model.embeddings.arena.track()
    with tempfile.TemporaryDirectory() as folder:
        saved = {name: CheckpointFolder(Path(folder) / name, reduction=less) for name, less in WAYS.items()}
        found = {name: {"bytes": [], "write_s": [], "chain": []} for name in WAYS}
        shares = []
        for step in track(range(count), description=f"{traffic.samples:,} samples apart, {traffic.optimizer}"):
            train(model, rows, traffic.samples, step)
            marks = touched.marks_R.clone()
            shares.append(float(marks.float().mean()))
            for name, one in saved.items():
                touched.marks_R.copy_(marks)
                begin = time.perf_counter()
                one.save(step, *collect(model, {}))
                found[name]["write_s"].append(time.perf_counter() - begin)
                chain_bytes = one.open().manifest.chain_bytes
                found[name]["bytes"].append(chain_bytes[-1])
                found[name]["chain"].append(len(chain_bytes) - 1)
                one.prune(1, None)
        reads = {name: read(one.open(), model) for name, one in saved.items()}
    share = statistics.mean(shares[1:])
    return [
        {
            "kind": "bytes",
            "way": name,
            **traffic._asdict(),
            "touched": share,
            "written": sum(values["bytes"]),
            **values,
            **reads[name],
        }
        for name, values in found.items()
    ]


def read(checkpoint: Checkpoint, model: Net) -> dict[str, float]:
    """The time on the clock, and that of all threads."""
    again = copy.deepcopy(model)
    times, busy = [], []
    for _ in range(5):
        begin, begin_busy = time.perf_counter(), time.process_time()
        restore(checkpoint, again, {})
        times.append(time.perf_counter() - begin)
        busy.append(time.process_time() - begin_busy)
    exact = all(chunk.bits is None for entry in checkpoint.manifest.tensors.values() for chunk in entry.chunks)
    if exact and not torch.equal(again.embeddings.arena.rows, model.embeddings.arena.rows):
        raise AssertionError(f"{checkpoint.folder} does not give back what was saved")
    return {"read_s": min(times), "read_busy_s": min(busy)}


def bytes_of(args: argparse.Namespace) -> list[dict]:
    found = []
    quick = Traffic(2_000, 100) if args.smoke else Traffic(30_000, 10_000)
    for traffic in [quick] if args.quick else TRAFFIC:
        rows = measure_bytes(traffic, 4 if args.quick else COUNT)
        full = next(row for row in rows if row["way"] == "full")
        for row in rows:
            row["less"] = full["written"] / row["written"]
            show(row)
        found += rows
    return found


def quality_of(args: argparse.Namespace) -> list[dict]:
    found = []
    if args.smoke:
        args.data, args.recipes = make_tiny(args.made), args.recipes[:1]
    jobs = [(recipe, seed) for recipe in args.recipes for seed in range(1 if args.quick else SEEDS)]
    for recipe, seed in track(jobs, description="training"):
        for bits in (32, 8, 4):
            scores = go_back_half_way(recipe, seed, bits, args)
            found.append({"kind": "quality", "recipe": recipe, "seed": seed, "bits": bits, **scores})
            show(found[-1])
    return found


def go_back_half_way(recipe: str, seed: int, bits: int, args: argparse.Namespace) -> dict[str, float]:
    """Train half of the steps, save, and train the others in a model that knows nothing but what was saved."""
    from rowwise.recipes.compose import make_evaluator, make_model, make_settings, resolve
    from rowwise.recipes.find import load
    from rowwise.train.run_folder import RunFolder
    from rowwise.train.trainer import Trainer

    data = args.data.absolute()
    steps = SMOKE_STEPS if args.smoke else STEPS[recipe] or steps_of(recipe, data)
    folder = Path(tempfile.mkdtemp())
    try:
        for end in (steps // 2, steps):
            changes = [f"seed={seed}", f"data.folder={data}", f"train.steps={end}", f"save.bits={bits}"]
            changes += ["evaluate.patience=null", "evaluate.every=1000000"]
            resolved = resolve(load(recipe, changes))
            model = make_model(resolved)
            trainer = Trainer(job_of(resolved, model), make_settings(resolved.recipe), RunFolder(folder))
            if end == steps:
                trainer.resume(CheckpointFolder(folder / "ckpt").open())
            if trainer.run().step != end:
                raise AssertionError(f"{recipe} ended before step {end}")
        tasks = make_evaluator(resolved, model, resolved.rows.test)().tasks
        scores = next(iter(tasks.values()))
        return {name: scores[name] for name in ("ne", "auc")}
    finally:
        shutil.rmtree(folder)


def steps_of(recipe: str, data: Path) -> int:
    """Of an epoch."""
    from rowwise.recipes.compose import make_model, resolve
    from rowwise.recipes.find import load

    resolved = resolve(load(recipe, [f"data.folder={data.absolute()}"]))
    return sum(1 for _ in job_of(resolved, make_model(resolved)).batches(None))


def floors_of(rows: Sequence[dict]) -> list[dict]:
    floors = []
    for row in rows:
        if row["kind"] == "bytes" and row["way"].startswith("incremental"):
            floor = AT_LEAST if row["way"].endswith("8 bits") and row["optimizer"] != "adam" else None
            name = f"bytes of full ones over those of {row['way']}, {row['samples']} samples apart, {row['optimizer']}"
            floors.append(at_least(name, row["less"], floor))
    return floors + quality_floors([row for row in rows if row["kind"] == "quality"])


def quality_floors(rows: Sequence[dict]) -> list[dict]:
    """The mean change of NE, held against how far apart the seeds are; of one seed nothing is asked."""
    floors = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        ne = {(row["seed"], row["bits"]): row["ne"] for row in rows if row["recipe"] == recipe}
        exact = [value for (_, bits), value in ne.items() if bits == 32]
        spread = max(exact) - min(exact) if len(exact) > 1 else None
        for few in (8, 4):
            more = statistics.mean(value - ne[seed, 32] for (seed, bits), value in ne.items() if bits == few)
            name = f"{recipe}: NE with {few} bits above 32, mean of {len(exact)} seeds; floor: the seeds' spread"
            floors.append(at_most(name, more, spread))
    return floors


def smoke_floors(rows: Sequence[dict]) -> list[dict]:
    """That exact checkpoints give back what was saved is checked where they are read."""
    written = {row["way"]: row["written"] for row in rows if row["kind"] == "bytes"}
    kinds = Counter(row["kind"] for row in rows)
    smallest = sorted(written, key=written.get)[:2]
    return [
        exactly("ways to save less", len(written), len(WAYS)),
        exactly("increments in 4 and in 8 bits are smallest", int(smallest == SMALLEST), 1),
        exactly("rows of quality", kinds["quality"], 3),
    ]


def main() -> None:
    parser = options("checkpoint_delta", __doc__, only=SECTIONS, data=True)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, help="whose quality is measured")
    args = parsed(parser)
    measures = {"bytes": bytes_of, "quality": quality_of}
    with tempfile.TemporaryDirectory() as folder:
        args.made = Path(folder)
        rows = [row for section in args.only for row in measures[section](args)]
    made = {**environment(), "restores": RESTORES}
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    finish("checkpoint_delta", rows, floors, args, environment=made)


if __name__ == "__main__":
    main()
