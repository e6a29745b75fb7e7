"""How fast are training steps over two processes beside TorchRec's, how do they scale, and what do they send?

    python benchmarks/shard_step.py [--quick | --smoke] [--only speed] [--save]

TorchRec's is DistributedModelParallel; one thread each, over gloo. 13 dense numbers, 26 tables of dim 64 in fp32 with
row-wise Adagrad, Zipf(1.05) ids, Adam on the dense layers; both sides take the same plan, start from the same weights,
are checked to compute the same, and take turns (A B A B) in the same two processes. rowwise's ranks talk over gloo as
TorchRec's do, or through shared memory. TorchRec runs as it is and under TrainPipelineSparseDist; the faster one
counts. A time is the 20 % quantile over blocks of steps, of the slower rank. Sections:

    speed    whole steps of a DLRM (bottom 512-256-64, top 512-512-256-1), and its tables alone: lookup, exchange,
             backward, update
    scaling  a DLRM with many ids and next to no dense layers, by one process and by two
    bytes    what travels in a step, beside the formulas of Neo
    plans    the largest difference between weights after 20 steps by each plan and after 20 steps in one process

The limit of a step (`parts/limits.py`) is that of a rank's samples and of as many rows as they ask for, measured on
both at once; what travels between ranks is not in it. `--peer-only` leaves rowwise out. The last printed line is one
JSON object.

Takes: 30 minutes; --quick 3 minutes
Needs: the extra `peers`
"""

import argparse
import json
import os
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Freed memory stays with the process, on both sides: else TorchRec's tables alone take up to twice as long, or not.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 31))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 33))

import torch
from parts import shard_bytes, shard_plans, shard_rowwise
from parts.limits import share_floor
from parts.report import at_least, at_most, environment, exactly, finish, has_peer, options, parsed, show
from parts.shard_ranks import AHEAD, OURS, THEIRS, Order, everything, scaling, speed
from parts.shard_work import Load, Shape

from rowwise.parallel.comm.spawn import run_processes

WORLD = 2
SECTIONS = ("speed", "scaling", "bytes", "plans")
KINDS = {"speed": ("step", "tables")}  # of the rows of a section, where they are not its name
OURS_ONLY = ("bytes",)
AT_LEAST = {"step": 2.0, "tables": 2.0}  # times TorchRec
GLOO, SHARED = "gloo", "shared memory"
SCALES = {GLOO: 1.4, SHARED: 1.7}  # two processes over one
AGREES = 1e-6  # of what the weights moved


def launched(function: Callable[..., list[dict]], order: Order) -> list[dict]:
    """What the first rank of a fresh group found."""
    rows = run_processes(WORLD, function, order, shared_memory=order.transport == SHARED)[0]
    for row in rows:
        show(row)
    return rows


def measure_speed(args: argparse.Namespace) -> list[dict]:
    shape, seconds = (Shape.of(10_000, 100_000), 1.5) if args.quick else (Shape.of(100_000, 1_000_000), 4)
    loads = tuple(Load(batch, pooling) for batch in (4096, 2048) for pooling in (1, 20))
    rows = []
    for layout in ("table-wise",) if args.quick else ("table-wise", "row-wise"):
        for transport in args.transports:
            some = loads[2:3] if args.quick else loads[: 4 if transport == GLOO else 2]
            about = {"layout": layout, "transport": transport, "loads": some, "sides": args.sides}
            rows += launched(speed, Order(shape=shape, seconds=seconds, **about))
    return rows


def measure_scaling(args: argparse.Namespace) -> list[dict]:
    least, most, seconds = (10_000, 50_000, 1) if args.quick else (100_000, 400_000, 5)
    loads = (Load(2048, 40),) if args.quick else (Load(4096, 40), Load(4096, 100))
    about = {"shape": Shape.of(least, most, small=True), "layout": "table-wise", "loads": loads, "sides": args.sides}
    orders = [Order(seconds=seconds, transport=transport, **about) for transport in args.transports]
    return [row for order in orders for row in launched(scaling, order)]


def measure_plans(args: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(1)
    rows = shard_plans.measure_theirs(run_processes, args.quick)
    return rows + (shard_plans.measure_ours(run_processes, args.quick) if OURS in args.sides else [])


MEASURES: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "speed": measure_speed,
    "scaling": measure_scaling,
    "bytes": lambda args: shard_bytes.measure(run_processes, WORLD, args.quick),
    "plans": measure_plans,
}


def floors_of(rows: list[dict]) -> list[dict]:
    kinds: dict[str, list[dict]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    floors = [f for kind in AT_LEAST for f in speed_floors(kind, kinds.get(kind, []))]
    floors += scaling_floors(kinds.get("scaling", []))
    floors += shard_bytes.floors_of(kinds.get("bytes", []))
    floors += plan_floors(kinds.get("plans", []))
    return floors + limit_floors(rows)


def cells_of(rows: list[dict]) -> dict[tuple, dict[tuple, float]]:
    """Of each layout, batch, pooling and transport: the samples a second of (side, ranks)."""
    cells: dict[tuple, dict[tuple, float]] = {}
    for r in rows:
        cell = cells.setdefault((r["layout"], r["batch"], r["pooling"], r["transport"]), {})
        cell[r["side"], r["ranks"]] = r["samples_s"]
    return cells


def named(cell: tuple) -> str:
    return "{}, batch {}, {} ids, {}".format(*cell)


def speed_floors(kind: str, rows: list[dict]) -> list[dict]:
    what = {"step": "whole steps", "tables": "tables alone"}[kind]
    floors = []
    for cell, found in cells_of(rows).items():
        if (OURS, WORLD) in found:
            theirs = max(s for (side, _), s in found.items() if side != OURS)
            value = found[OURS, WORLD] / theirs
            floors.append(at_least(f"{what} against TorchRec: {named(cell)}", value, AT_LEAST[kind]))
    return floors


def scaling_floors(rows: list[dict]) -> list[dict]:
    floors, cells = [], cells_of(rows)
    for cell, found in cells.items():
        layout, batch, *rest = cell
        for side in (OURS, THEIRS, AHEAD):
            if (side, WORLD) in found:
                alone = OURS if side == OURS else THEIRS, 1
                least = SCALES[cell[3]] if side == OURS else None
                share = cells[layout, batch // WORLD, *rest][alone]
                for what, one in (("the same batch each", share), ("the same batch in all", found[alone])):
                    floors.append(
                        at_least(
                            f"{side}, two processes over one, {what}: {named(cell)}", found[side, WORLD] / one, least
                        )
                    )
    return floors


def plan_floors(rows: list[dict]) -> list[dict]:
    """The share of what weights have moved by which they end elsewhere; bits are asked of elastic."""
    floors = []
    for r in rows:
        most = (0.0 if r["determinism"] == "elastic" else AGREES) if r["side"] == OURS and r["wire"] == "fp32" else None
        share = r["difference"] / r["moved"]
        name = f"{r['side']} on {r['how']}, {r['layout']}, {r['wire']}, {r['determinism']}: away from whole"
        floors.append(at_most(name, share, most) | {"value": float(f"{share:.2g}")})
    return floors


def limit_floors(rows: list[dict]) -> list[dict]:
    name = "{kind}, {layout}, batch {batch}, {pooling} ids, {transport}"
    return [share_floor(name.format(**row), row["limit_share"]) for row in rows if "limit_share" in row]


def smoke(args: argparse.Namespace) -> list[dict]:
    """One group of processes for all that takes turns, as starting it takes most of the time; threads for the rest."""
    about = {"loads": (Load(64, 2), Load(32, 2)), "seconds": 0.05, "sides": args.sides, "transport": SHARED}
    rows = launched(everything, Order(shape=Shape.of(100, 1_000, small=True), layout="table-wise", **about))
    torch.set_num_threads(1)
    rows += shard_bytes.measure(shard_rowwise.on_threads, WORLD, quick=True, wires=("fp32",))
    return rows + shard_plans.measure_ours(run_processes, quick=True)


def smoke_floors(rows: list[dict]) -> list[dict]:
    """Sides are compared before they are timed; bytes and weights are what they are on any machine."""
    plans, sent = ([row for row in rows if row["kind"] == kind] for kind in ("plans", "bytes"))
    kinds = {row["kind"] for row in rows}
    return [
        exactly("sections", len(kinds), len({"step", "tables", "scaling", "bytes", "plans"})),
        exactly("plans that end where one process does", sum(row["ok"] for row in plan_floors(plans)), len(plans)),
        *shard_bytes.floors_of(sent),
    ]


def main() -> None:
    parser = options("shard_step", __doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="the rest stays as saved before")
    parser.add_argument("--peer-only", action="store_true", help="TorchRec alone")
    args = parsed(parser)
    ours_alone = bool(args.only) and set(args.only) <= set(OURS_ONLY)
    with_peer = not ours_alone and has_peer("torchrec", args)
    args.sides = (THEIRS,) if args.peer_only else (OURS, THEIRS) if with_peer else (OURS,)
    args.transports = (GLOO,) if args.peer_only else (SHARED,) if args.quick else (GLOO, SHARED)
    made = environment()
    rows: list[dict] = smoke(args) if args.smoke and not args.only else []
    for section in args.only or (() if args.smoke else SECTIONS):
        if not (args.peer_only and section in OURS_ONLY):
            rows += MEASURES[section](args)
    rows = [{"commit": made["commit"], **row} for row in rows]
    if args.only and args.save and args.save.exists():
        again = [kind for section in args.only for kind in KINDS.get(section, (section,))]
        rows += [row for row in json.loads(args.save.read_text())["rows"] if row["kind"] not in again]
    floors = smoke_floors(rows) if args.smoke and not args.only else floors_of(rows)
    finish("shard_step", rows, floors, args, environment=made)


if __name__ == "__main__":
    main()
