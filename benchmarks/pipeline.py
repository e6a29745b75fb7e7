"""How much of communication, disk reads and waiting do the pipelined steps of a training hide?

    python benchmarks/pipeline.py [--quick | --smoke] [--only delay] [--save]

Two processes of one thread each train a DLRM by `Trainer`: 13 dense numbers, 26 tables of dim 64 with row-wise Adagrad,
Zipf(1.05) ids, Adam on the dense layers. `train.pipeline_depth` is the number of steps in flight; 1 is sequential.
Depths take turns (A B A B) in the same processes; a time is the 20 % quantile over blocks of steps. A slower link is
simulated (`comm/delayed.py`): a collective begins after a latency, or when its bytes are sent. Sections:

    delay       a link whose latencies take as long in a sequential step as all else, and one whose bytes do
    busy        the link of this machine, both cores at work: what the pipeline costs where there is nothing to hide

The last printed line is one JSON object.

Takes: 10 minutes; --quick 3 minutes
Needs: nothing else
"""

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Freed memory stays with the process, on both sides: else TorchRec's tables alone take up to twice as long, or not.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 31))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 33))

from parts import pipeline_ranks
from parts.pipeline_ranks import Order
from parts.report import at_most, environment, exactly, finish, options, parsed
from parts.shard_work import Load, Shape

from rowwise.comm.spawn import run_processes

WORLD = 2
GLOO, SHARED = "gloo", "shared memory"
HIDDEN, BUSY = 0.70, 1.02  # time of a pipelined step over that of a sequential one
PIPELINED = "depth 2"  # what a recipe has if it says nothing


def launched(function: Callable[..., list[dict]], order: Order) -> list[dict]:
    """What the first rank of a fresh group found."""
    rows = run_processes(WORLD, function, order, shared_memory=order.transport == SHARED)[0]
    for row in rows:
        print(describe(row), flush=True)
    return rows


def describe(row: dict) -> str:
    line = "{section:8} {transport:13} link {link:10} {side:18} {ms:7.2f} ms  noise {noise:.2f}".format(**row)
    more = "  latency {latency_ms:.2f} ms x {latencies:.1f}, compute {compute_ms:.1f} ms"
    return line + (more.format(**row) if "compute_ms" in row else "")


def orders(args: argparse.Namespace) -> list[Order]:
    """One for each transport."""
    if args.smoke:
        about = {"shape": Shape.of(100, 1_000, small=True), "load": Load(64, 2), "blocks": 1, "updates": 3}
        return [Order(transport=SHARED, **about)]
    blocks, depths = (2, (1, 2)) if args.quick else (8, (1, 2, 3))
    about = {"shape": Shape.of(10_000, 100_000), "load": Load(2048, 5), "blocks": blocks, "updates": 12}
    return [Order(transport=transport, depths=depths, **about) for transport in args.transports]


def measure_delay(args: argparse.Namespace) -> list[dict]:
    return [row for order in orders(args) for row in launched(pipeline_ranks.delayed, order)]


def measure_busy(args: argparse.Namespace) -> list[dict]:
    return [row for order in orders(args) for row in launched(pipeline_ranks.busy, order)]


MEASURES: dict[str, Callable[[argparse.Namespace], list[dict]]] = {"delay": measure_delay, "busy": measure_busy}


def floors_of(rows: list[dict]) -> list[dict]:
    by = {section: [row for row in rows if row["section"] == section] for section in MEASURES}
    return depth_floors(by["delay"], HIDDEN) + depth_floors(by["busy"], BUSY)


def depth_floors(rows: list[dict], most: float) -> list[dict]:
    """Pipelined over sequential steps; the depth of the default is held to the floor."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row["transport"], row["link"]), {})[row["side"]] = row["ms"]
    floors = []
    for (transport, link), found in cells.items():
        for side in (side for side in found if side != "depth 1"):
            name = f"{rows[0]['section']}: {side} over sequential, {transport}, link: {link}"
            floors.append(at_most(name, found[side] / found["depth 1"], most if side == PIPELINED else None))
    return floors


def smoke_floors(rows: list[dict], sections: list[str]) -> list[dict]:
    """No times."""
    measured = [row for row in rows if "ms" in row]
    return [
        exactly("sections", len({row["section"] for row in rows}), len(sections)),
        exactly("times that are positive", sum(row["ms"] > 0 for row in measured), len(measured)),
    ]


def main() -> None:
    parser = options("pipeline", __doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(MEASURES), default=list(MEASURES))
    parser.add_argument("--transports", nargs="+", choices=(GLOO, SHARED), help="--quick: shared memory")
    args = parsed(parser)
    args.transports = args.transports or ((SHARED,) if args.quick else (GLOO, SHARED))
    rows = [row for section in args.only for row in MEASURES[section](args)]
    floors = smoke_floors(rows, args.only) if args.smoke else floors_of(rows)
    finish({"benchmark": "pipeline", "environment": environment(), "rows": rows, "floors": floors}, args)


if __name__ == "__main__":
    main()
