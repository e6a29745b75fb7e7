"""What do narrower numbers between ranks cost in quality?

    python benchmarks/wire_quality.py [--quick | --smoke] [--data data] [--save]

NE and AUC of recipes trained on two ranks, by type of the wire.

Those are `movielens-dlrm` and `complete-journey-dlrm`, their tables cut by rows over two ranks that are threads, so
that looked-up vectors and their gradients travel as the type says; each rank has half of every batch. All types of a
seed start from the same weights and see the same samples. What a type costs is held against what another seed does.
The last printed line is one JSON object.

Takes: 20 minutes; --quick 1 minute
Needs: `rowwise data get movielens-100k` and `rowwise data get complete-journey`
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from parts.report import at_most, exactly, finish, options, parsed, show
from parts.tiny_data import make_tiny
from parts.wire_training import train
from rich.progress import Progress

from rowwise import Topology
from rowwise.recipes.compose import resolve
from rowwise.recipes.find import load
from rowwise.tables.spec import Codecs, Wire, WireType

WORLD, SEEDS, EXACT = 2, 3, "fp32"
RECIPES = ("movielens-dlrm", "complete-journey-dlrm")
WIRES = {str(kind): Codecs(forward=kind, backward=kind) for kind in WireType}


def changes(rows: Sequence[dict], recipe: str, wire: str) -> list[float]:
    """By how much NE is above that of fp32, seed by seed."""
    ne = {(r["seed"], r["wire"]): r["ne"] for r in rows if r["recipe"] == recipe}
    return [value - ne[seed, EXACT] for (seed, kind), value in ne.items() if kind == wire]


def floors_of(rows: list[dict]) -> list[dict]:
    """The mean change of NE, held against how far apart the seeds are; of one seed nothing is asked."""
    floors = []
    for recipe in dict.fromkeys(r["recipe"] for r in rows):
        exact = [r["ne"] for r in rows if r["recipe"] == recipe and r["wire"] == EXACT]
        spread = max(exact) - min(exact) if len(exact) > 1 else None
        for wire in dict.fromkeys(r["wire"] for r in rows if r["wire"] != EXACT):
            more = changes(rows, recipe, wire)
            name = f"{recipe}: NE over a wire of {wire} above fp32, mean of {len(more)} seeds; floor: the seeds' spread"
            floors.append(at_most(name, statistics.mean(more), spread))
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
    return [
        exactly("wires", len(rows), 3),
        exactly("NEs that differ", len({row["ne"] for row in rows}), 3),
    ]


def measure(args: argparse.Namespace) -> list[dict]:
    """A row for each recipe, seed and wire."""
    recipes, seeds = (RECIPES[:1], 1) if args.quick else (args.only, SEEDS)
    wires = {name: WIRES[name] for name in (EXACT, "fp16", "int8")} if args.quick else WIRES
    rows: list[dict] = []
    with Progress() as progress:
        task = progress.add_task("training", total=len(recipes) * seeds * len(wires))
        for recipe in recipes:
            for seed in range(seeds):
                resolved = resolve(
                    load(
                        recipe,
                        [
                            f"seed={seed}",
                            f"data.folder={args.data.absolute()}",
                            *(["train.epochs=1"] if args.smoke else []),
                        ],
                    )
                )
                for wire, codecs in wires.items():
                    progress.update(task, description=f"{recipe}, seed {seed}, {wire}")
                    rows.append(
                        {
                            "recipe": recipe,
                            "seed": seed,
                            "wire": wire,
                            **train(resolved, Wire(host=codecs, network=codecs), Topology(devices=WORLD)),
                        }
                    )
                    progress.advance(task)
    return rows


if __name__ == "__main__":
    main()
