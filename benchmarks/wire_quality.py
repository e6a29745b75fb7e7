"""What do narrower numbers between ranks cost in quality?

    python benchmarks/wire_quality.py [--quick | --smoke] [--data data] [--save]

NE and AUC of recipes trained on two ranks, by type of the wire.

Those are `movielens-dlrm` and `complete-journey-dlrm`, their tables cut by rows over two ranks that are threads, so
that looked-up vectors and their gradients travel as the type says; each rank has half of every batch. `far`: each rank
is a rack of its own, and dense sums between racks are of that type, with and without feedback of what was rounded; of
the first recipe. All types of a seed start from the same weights and see the same samples. What a type costs is held
against what another seed does. The last printed line is one JSON object.

Takes: 30 minutes; --quick 1 minute
Needs: `rowwise data get movielens-100k` and `rowwise data get complete-journey`
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from parts.report import at_most, exactly, finish, options, parsed, show
from parts.tiny_data import make_tiny
from parts.wire_training import train
from rich.progress import Progress

from rowwise import Topology
from rowwise.recipes.compose import resolve
from rowwise.recipes.find import load
from rowwise.tables.spec import Codecs, Wire, WireType

SEEDS = 3
RECIPES = ("movielens-dlrm", "complete-journey-dlrm")


class Way(NamedTuple):
    """How numbers travel; `exact`: the way that it is compared with."""

    wire: Wire
    world: Topology
    exact: str = "fp32"
    feedback: bool = True


def vectors_in(kind: WireType) -> Way:
    codecs = Codecs(forward=kind, backward=kind)
    return Way(Wire(host=codecs, network=codecs), Topology(devices=2))


def sums_far_in(kind: str, *, feedback: bool = True) -> Way:
    wire = Wire(far=kind, error_feedback=True)
    return Way(wire, Topology(hosts=2, groups=(1, 1)), "far fp32", feedback)


FAR = ("int8", "int4", "topk:1%")
WAYS = {str(kind): vectors_in(kind) for kind in WireType}
WAYS |= {f"far {kind}": sums_far_in(kind) for kind in ("fp32", *FAR)}
WAYS |= {f"far {kind}, no feedback": sums_far_in(kind, feedback=False) for kind in FAR}
QUICK = ("fp32", "fp16", "int8", "far fp32", "far int8")
NARROW = [name for name in QUICK if WAYS[name].exact != name]


def changes(rows: Sequence[dict], recipe: str, wire: str) -> list[float]:
    """By how much NE is above that of the exact way, seed by seed."""
    ne = {(r["seed"], r["wire"]): r["ne"] for r in rows if r["recipe"] == recipe}
    return [value - ne[seed, WAYS[wire].exact] for (seed, kind), value in ne.items() if kind == wire]


def floors_of(rows: list[dict]) -> list[dict]:
    """The mean change of NE, held against how far apart the seeds are; of one seed nothing is asked."""
    floors = []
    for recipe, wire in dict.fromkeys((r["recipe"], r["wire"]) for r in rows if WAYS[r["wire"]].exact != r["wire"]):
        way, more = WAYS[wire], changes(rows, recipe, wire)
        exact = [r["ne"] for r in rows if r["recipe"] == recipe and r["wire"] == way.exact]
        # Nothing is asked of top-k, which trains for longer before it stops early, nor without feedback.
        held = len(exact) > 1 and way.feedback and "topk" not in wire
        name = f"{recipe}: NE over a wire of {wire} above {way.exact}, mean of {len(more)} seeds; floor: seeds' spread"
        floors.append(at_most(name, statistics.mean(more), max(exact) - min(exact) if held else None))
    return floors


def main() -> None:
    args = parsed(options("wire_quality", __doc__, only=RECIPES, data=True))
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            args.data = make_tiny(Path(folder))
        rows = measure(args)
    for row in rows:
        show(row)
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    finish("wire_quality", rows, floors, args)


def smoke_floors(rows: list[dict]) -> list[dict]:
    """All wires train for as long, and a narrow one changes what is learned."""
    differ = [wire for wire in NARROW if any(changes(rows, RECIPES[0], wire))]
    return [exactly("wires", len(rows), len(QUICK)), exactly("narrow wires whose NE differs", len(differ), len(NARROW))]


def measure(args: argparse.Namespace) -> list[dict]:
    """A row for each recipe, seed and wire."""
    recipes, seeds, names = (RECIPES[:1], 1, QUICK) if args.quick else (args.only, SEEDS, tuple(WAYS))
    rows: list[dict] = []
    with Progress() as progress:
        task = progress.add_task("training", total=len(recipes) * seeds)
        for recipe in recipes:
            wires = [name for name in names if recipe == RECIPES[0] or not name.startswith("far")]
            for seed in range(seeds):
                less = ["train.epochs=1"] if args.smoke else []
                resolved = resolve(load(recipe, [f"seed={seed}", f"data.folder={args.data.absolute()}", *less]))
                for wire in wires:
                    progress.update(task, description=f"{recipe}, seed {seed}, {wire}", advance=1 / len(wires))
                    way = WAYS[wire]
                    found = train(resolved, way.wire, way.world, feedback=way.feedback)
                    rows.append({"recipe": recipe, "seed": seed, "wire": wire, **found})
    return rows


if __name__ == "__main__":
    main()
