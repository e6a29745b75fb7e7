"""Training steps of a DLRM on a CPU a second: rowwise, TorchRec over FBGEMM, and nn.EmbeddingBag, in fp32 and bf16.

    python benchmarks/train_step.py [--quick] [--save benchmarks/results/train_step.json]

13 dense numbers, 26 tables of 1,000 to 1,000,000 rows (log-uniform) of dim 64, one Zipf(1.05) id a feature, bottom
MLP 512-256-64, top 512-512-256-1, batch 2,048; row-wise Adagrad on rows (plain torch has only Adagrad), the same fused
torch optimizer on the dense layers of every side. All sides take the same steps interleaved (A B A B) in one process,
from the same weights; the losses of the first steps are checked to agree. bf16 is autocast over fp32 parameters. A
time is the minimum of the repeats. Peak memory is that of a process which holds one side only. What 16-bit products
cost in AUC is in `quality.py`. Needs the `peers` extra. The last printed line is one JSON object.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from report import environment, finish
from train_sides import BATCH, DENSE_OPTIMIZERS, SIDES, Side, TorchRec, parts_of, same_start

from rowwise.ops import linear
from rowwise.train.recorder import peak_memory_bytes

BATCHES = 4  # that the steps go through
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


def measure_steps(optimizer: str, threads: list[int], seconds: float, dmp: bool) -> list[dict]:
    makers = {**SIDES, "TorchRec fp32": lambda o: TorchRec(o, False, dmp=True)} if dmp else SIDES
    sides: dict[str, Side] = {name: make(optimizer) for name, make in makers.items()}
    same_start(list(sides.values()))
    parts = [parts_of(seed) for seed in range(BATCHES)]
    batches = {name: [side.prepare(p) for p in parts] for name, side in sides.items()}
    # The sides differ in the order of sums, so they drift apart; two steps on they are still near.
    losses = {name: [float(side.step(batches[name][k])) for k in range(LOSSES)] for name, side in sides.items()}
    check_losses(losses)
    rows = []
    for n in threads:
        torch.set_num_threads(n)
        times: dict[str, list[float]] = {name: [] for name in sides}
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(times["rowwise fp32"]) < 5:
            for name, side in sides.items():
                batch = batches[name][len(times[name]) % BATCHES]
                begin = time.perf_counter()
                side.step(batch)
                times[name].append(time.perf_counter() - begin)
        for name, found in times.items():
            rows.append(row_of(name, optimizer, n, found))
            print("{side:14} {optimizer:7} {threads}T  {ms:7.2f} ms  {samples_s:7,.0f} samples/s".format(**rows[-1]))
    return rows


def row_of(name: str, optimizer: str, threads: int, times: list[float]) -> dict:
    best = min(times)
    return {
        "kind": "step",
        "side": name,
        "optimizer": optimizer,
        "threads": threads,
        "ms": best * 1e3,
        "samples_s": BATCH / best,
        "noise": sorted(times)[len(times) // 2] / best - 1,
        "repeats": len(times),
    }


def peak_of(name: str) -> int:
    """Bytes that a process with one side has held at most, after some steps."""
    side = SIDES[name]("adam")
    batches = [side.prepare(parts_of(seed)) for seed in range(BATCHES)]
    for batch in batches * 2:
        side.step(batch)
    return peak_memory_bytes()


def measure_memory() -> list[dict]:
    rows = []
    for name in SIDES:
        command = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]]
        command += [__file__, "--peak-of", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        rows.append({"kind": "memory", "side": name, "peak_bytes": int(done.stdout.split()[-1])})
        print(f"{name:14} peak memory {rows[-1]['peak_bytes'] / 1e9:.2f} GB", flush=True)
    return rows


def floors_of(rows: list[dict]) -> list[dict]:
    speed = {(r["side"], r["optimizer"], r["threads"]): r["samples_s"] for r in rows if r["kind"] == "step"}
    floors = []
    for ours, theirs, floor in RATIOS:
        for (side, optimizer, n), samples_s in speed.items():
            if side == ours:
                ratio = samples_s / speed[theirs, optimizer, n]
                name = f"{ours} against {theirs}, {optimizer}, {n} thread{'s' * (n > 1)}"
                ok = floor is None or ratio >= floor
                floors.append({"name": name, "value": round(ratio, 3), "floor": floor, "ok": ok})
    return floors


SECTIONS = ("steps", "memory")


def measure(section: str, args: argparse.Namespace) -> list[dict]:
    if section == "memory":
        return measure_memory()
    optimizers = list(DENSE_OPTIMIZERS)[:1] if args.quick else DENSE_OPTIMIZERS
    return [r for name in optimizers for r in measure_steps(name, args.threads, 6 if args.quick else 30, args.dmp)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a coarser answer in under a minute; no memory")
    parser.add_argument("--save", type=Path, help="where to write the JSON")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="of the sections")
    parser.add_argument("--dmp", action="store_true", help="TorchRec fp32 by way of DistributedModelParallel")
    parser.add_argument("--peak-of", choices=list(SIDES), help="print the peak memory of a process with this side only")
    args = parser.parse_args()
    if args.peak_of:
        print(peak_of(args.peak_of))
        return
    torch.manual_seed(0)
    print(f"linear layers use {linear.chosen()}")
    rows: list[dict] = []
    for section in args.only or SECTIONS[: 1 if args.quick else 2]:
        rows += measure(section, args)
    made = {**environment(), "library": linear.chosen()}
    finish({"benchmark": "train_step", "environment": made, "rows": rows, "floors": floors_of(rows)}, args.save)


if __name__ == "__main__":
    main()
