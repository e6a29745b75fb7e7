"""How much of communication, disk reads and waiting do the pipelined steps of a training hide?

    python benchmarks/pipeline.py [--quick | --smoke] [--only delay] [--save]

Two processes of one thread each train a DLRM by `Trainer`: 13 dense numbers, 26 tables of dim 64 with row-wise Adagrad,
Zipf(1.05) ids, Adam on the dense layers. `train.pipeline_depth` is the number of steps in flight; 1 is sequential.
Depths take turns (A B A B) in the same processes; a time is the 20 % quantile over blocks of steps. A slower link is
simulated (`comm/delayed.py`): a collective begins after a latency, or when its bytes are sent. Sections:

    delay       a link whose latencies take as long in a sequential step as all else, and one whose bytes do
    busy        the link of this machine, both cores at work: what the pipeline costs where there is nothing to hide
    torchrec    over gloo beside TorchRec, as it is and under TrainPipelineSparseDist, of which the faster counts: the
                same plan, weights and batches, without latency and with one of 1/4 of our sequential step and of all
                of it before every collective of either side (`parts/pipeline_c10d.py`)

The last printed line is one JSON object.

Takes: 10 minutes; --quick 3 minutes
Needs: the extra `peers` for TorchRec
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Freed memory stays with the process, on both sides: else TorchRec's tables alone take up to twice as long, or not.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 31))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 33))

from parts import pipeline_ranks
from parts.pipeline_ranks import Order
from parts.report import at_least, at_most, environment, exactly, finish, has_peer, options, parsed
from parts.shard_work import Load, Shape

from rowwise.comm.spawn import run_processes

WORLD = 2
GLOO, SHARED = "gloo", "shared memory"
HIDDEN, BUSY = 0.70, 1.02  # time of a pipelined step over that of a sequential one
PEER, ALIKE = 1.8, 0.1  # times TorchRec's samples a second; share of the latency by which the links may differ
PIPELINED = "depth 2"  # what a recipe has if it says nothing


def launched(function: Callable[..., list[dict]], order: Order) -> list[dict]:
    """What the first rank of a fresh group found."""
    rows = run_processes(WORLD, function, order, shared_memory=order.transport == SHARED)[0]
    for row in rows:
        print(describe(row), flush=True)
    return rows


def describe(row: dict) -> str:
    line = "{section:8} {transport:13} link {link:10} {side:18} {ms:7.2f} ms  noise {noise:.2f}".format(**row)
    if "compute_ms" in row:
        line += "  latency {latency_ms:.2f} ms, compute {compute_ms:.1f} ms".format(**row)
    if "latencies" in row:
        line += ", {latencies:.1f} latencies in a sequential step".format(**row)
    return line


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


def measure_torchrec(args: argparse.Namespace) -> list[dict]:
    if not has_peer("torchrec", args):
        return []
    from parts import pipeline_torchrec

    order = replace(orders(args)[0], transport=GLOO)
    return launched(pipeline_torchrec.against, order)


MEASURES: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "delay": measure_delay,
    "busy": measure_busy,
    "torchrec": measure_torchrec,
}


def floors_of(rows: list[dict]) -> list[dict]:
    by = {section: [row for row in rows if row["section"] == section] for section in MEASURES}
    return depth_floors(by["delay"], HIDDEN) + depth_floors(by["busy"], BUSY) + torchrec_floors(by["torchrec"])


def cells_of(rows: list[dict]) -> dict[tuple[str, str], dict[str, float]]:
    """Of each transport and link: the milliseconds of each side."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row["transport"], row["link"]), {})[row["side"]] = row["ms"]
    return cells


def depth_floors(rows: list[dict], most: float) -> list[dict]:
    """Pipelined over sequential steps; the depth of the default is held to the floor."""
    floors = []
    for (transport, link), found in cells_of(rows).items():
        for side in (side for side in found if side != "depth 1"):
            name = f"{rows[0]['section']}: {side} over sequential, {transport}, link: {link}"
            floors.append(at_most(name, found[side] / found["depth 1"], most if side == PIPELINED else None))
    return floors


def torchrec_floors(rows: list[dict]) -> list[dict]:
    floors = []
    for (_, link), found in cells_of(rows).items():
        theirs = min(ms for side, ms in found.items() if not side.startswith("depth"))
        for side in (side for side in found if side.startswith("depth")):
            name = f"torchrec: {side} against the faster TorchRec, latency {link} of a step"
            floors.append(at_least(name, theirs / found[side], PEER if side == PIPELINED else None))
    for link, row in {row["link"]: row for row in rows if row["latency_ms"]}.items():
        apart = abs(row["our_exchange_ms"] - row["their_exchange_ms"]) / row["latency_ms"]
        floors.append(at_most(f"torchrec: difference of the links over the latency, {link} of a step", apart, ALIKE))
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
