"""How fast is a training step of a DLRM beside TorchRec, nn.EmbeddingBag and this machine's limit?

    python benchmarks/train_step.py [--quick | --smoke] [--save]

13 dense numbers, 26 tables of 1,000 to 1,000,000 rows (log-uniform) of dim 64, one Zipf(1.05) id a feature, bottom
MLP 512-256-64, top 512-512-256-1, batch 2,048; row-wise Adagrad on rows (plain torch has only Adagrad), the same fused
torch optimizer on the dense layers of every side. All sides take the same steps interleaved (A B A B) in one process,
from the same weights; the losses of the first steps are checked to agree. bf16 is autocast over fp32 parameters. A
time is the minimum of the repeats. Peak memory is that of a process which holds one side only. What 16-bit products
cost in AUC is in `quality.py`. What is counted in the limit of a step is in `parts/limits.py`. The last printed line is
one JSON object.

Takes: 5 minutes; --quick 1 minute
Needs: the extra `peers`
"""

import argparse
import os
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from parts.command import run_part
from parts.dlrm import BOTTOM, DENSE, FEATURES, TOP, WIDTH
from parts.limits import PEAK_SIZE, SMOKE_SIZE, Rows, dlrm_flops, limit_of, peak_flops_s, rows_s, share_floor
from parts.report import at_least, environment, exactly, finish, has_peer, options, parsed, show
from parts.train_sides import BATCHES, DENSE_OPTIMIZERS, FULL, SIDES, SMOKE, Side, Size, parts_of, same_start

from rowwise.tables.ops import linear

OURS = "rowwise fp32"
LOSSES = 3  # first steps, whose losses have to agree
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
RATIOS = (  # ours, theirs, at least
    ("rowwise fp32", "TorchRec fp32", 2.2),
    ("rowwise bf16", "TorchRec fp32", 3.0),
    ("rowwise fp32", "torch fp32", 2.6),
    ("rowwise bf16", "TorchRec bf16", None),
    ("rowwise bf16", "torch bf16", None),
)


def check_losses(losses: dict[str, list[float]]) -> None:
    """Of the first steps, against our own in fp32."""
    for name, mine in losses.items():
        for a, b in zip(mine, losses["rowwise fp32"], strict=True):
            if not abs(a - b) <= TOLERANCE[name.split()[-1]] * b:
                raise AssertionError(f"losses of the first steps: {name} {mine}, rowwise {losses['rowwise fp32']}")


def measure_steps(optimizer: str, args: argparse.Namespace, size: Size) -> list[dict]:
    sides = {name: SIDES[name](optimizer, size) for name in args.sides}
    same_start(list(sides.values()))
    parts = [parts_of(seed, size) for seed in range(BATCHES)]
    batches = {name: [side.prepare(p) for p in parts] for name, side in sides.items()}
    # The sides differ in the order of sums, so they drift apart; two steps on they are still near.
    losses = {name: [float(side.step(batches[name][k])) for k in range(LOSSES)] for name, side in sides.items()}
    check_losses(losses)
    rows = []
    for n in args.threads:
        torch.set_num_threads(n)
        limits = [limit_s(sides[OURS], batches[OURS], size)]
        times = take_turns(sides, batches, 0.0 if args.smoke else 6.0 if args.quick else 30.0)
        # Before and after: while the limit is measured the machine may be slower than it can be.
        limit = min(*limits, limit_s(sides[OURS], batches[OURS], size), key=lambda found: found["limit_ms"])
        for name, found in times.items():
            rows.append(row_of(name, optimizer, n, found, size) | (limit if name.endswith("fp32") else {}))
            if name.endswith("fp32"):
                rows[-1]["limit_share"] = rows[-1]["limit_ms"] / rows[-1]["ms"]
            show(rows[-1])
    return rows


def limit_s(side: Side, batches: list, size: Size) -> dict[str, float]:
    """Of a step in fp32, on torch's threads; the tables of all sides are alike."""
    flops = dlrm_flops(len(batches[0].labels_BK), (DENSE, *BOTTOM), (WIDTH, *TOP), FEATURES + 1)
    rows = [Rows(side.model.embeddings, batch.sparse) for batch in batches]
    return limit_of(flops, peak_flops_s(PEAK_SIZE if size == FULL else SMOKE_SIZE), rows_s(rows, 5))


def take_turns(sides: dict[str, Side], batches: dict[str, list], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[OURS]) < (5 if seconds else 1):
        for name, side in sides.items():
            batch = batches[name][len(times[name]) % BATCHES]
            begin = time.perf_counter()
            side.step(batch)
            times[name].append(time.perf_counter() - begin)
    return times


def row_of(name: str, optimizer: str, threads: int, times: list[float], size: Size) -> dict:
    best = min(times)
    return {
        "kind": "step",
        "side": name,
        "optimizer": optimizer,
        "threads": threads,
        "ms": best * 1e3,
        "samples_s": size.batch / best,
        "noise": sorted(times)[len(times) // 2] / best - 1,
        "repeats": len(times),
    }


def measure_memory(args: argparse.Namespace) -> list[dict]:
    rows = []
    for name in [OURS] if args.smoke else args.sides:
        peak_bytes = int(run_part("train_sides", name, *(["--smoke"] if args.smoke else [])))
        rows.append({"kind": "memory", "side": name, "peak_bytes": peak_bytes})
        show(rows[-1])
    return rows


def floors_of(rows: list[dict]) -> list[dict]:
    steps = [r for r in rows if r["kind"] == "step"]
    speed = {(r["side"], r["optimizer"], r["threads"]): r["samples_s"] for r in steps}
    floors = []
    for ours, theirs, floor in RATIOS:
        for (side, optimizer, n), samples_s in speed.items():
            if side == ours:
                name = f"{ours} against {theirs}, {optimizer}, {n} thread{'s' * (n > 1)}"
                floors.append(at_least(name, samples_s / speed[theirs, optimizer, n], floor))
    for r in steps:
        if r["side"] == OURS:
            floors.append(share_floor("{side}, {optimizer}, threads: {threads}".format(**r), r["limit_share"]))
    return floors


def smoke_floors(rows: list[dict], args: argparse.Namespace) -> list[dict]:
    """`check_losses` raises where sides do not agree."""
    steps = [row for row in rows if row["kind"] == "step"]
    return [exactly("sides whose losses agree, on 1 and 2 threads", len(steps), 2 * len(args.sides))]


SECTIONS = ("steps", "memory")


def measure(section: str, args: argparse.Namespace, size: Size) -> list[dict]:
    if section == "memory":
        return measure_memory(args)
    optimizers = list(DENSE_OPTIMIZERS)[:1] if args.quick else DENSE_OPTIMIZERS
    return [row for name in optimizers for row in measure_steps(name, args, size)]


def main() -> None:
    parser = options("train_step", __doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="of the sections; --quick: steps")
    args = parsed(parser)
    size = SMOKE if args.smoke else FULL
    with_peer = has_peer("torchrec", args)
    args.sides = [name for name in SIDES if with_peer or not name.startswith("TorchRec")]
    torch.manual_seed(0)
    print(f"linear layers use {linear.current_library()}")
    rows: list[dict] = []
    for section in args.only or SECTIONS[: 1 if args.quick and not args.smoke else 2]:
        rows += measure(section, args, size)
    made = {**environment(), "library": linear.current_library()}
    floors = smoke_floors(rows, args) if args.smoke else floors_of(rows)
    finish("train_step", rows, floors, args, environment=made)


if __name__ == "__main__":
    main()
