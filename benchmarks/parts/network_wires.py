"""Sums of dense gradients in two levels, and what their types between groups cost in quality."""

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parts import BENCHMARKS
from parts.report import at_least, at_most, exactly, show
from rowwise.parallel.comm.interface import Comm
from rowwise.planning.perf.hardware import hardware_named
from rowwise.planning.perf.links import Network, NetworkHost, PairLink
from rowwise.planning.perf.sums import SumCosts
from rowwise.planning.perf.wires import two_level_bytes
from rowwise.tables.spec import FarType, Topology, Wire

sys.path.insert(0, str(BENCHMARKS.parent / "tests"))

from lab import Lab, missing

RACKS = Topology(hosts=8, groups=(4, 4))
HOST_MBIT, UPLINK_MBIT = 200.0, 50.0  # a rack of 4 hosts of 200 has an uplink of 50: 16 to 1
SIZES_MB = (0.25, 1.0)
WIRES = {
    "ring": Wire(),
    "flat int8": Wire(dense="int8", error_feedback=True),
    "two levels, fp32": Wire(far="fp32"),
    "two levels, bf16": Wire(far="bf16", error_feedback=True),
    "two levels, int8": Wire(far="int8", error_feedback=True),
    "two levels, int4": Wire(far="int4", error_feedback=True),
    "two levels, topk:1%": Wire(far="topk:1%", error_feedback=True),
}
FP32, FAR = "fp32", ("int8", "int4", "topk:1%")
SEEDS = 3
LINKS = Network(
    hosts=tuple(NetworkHost(name=f"h{k}") for k in range(RACKS.hosts)),
    link=PairLink(latency_s=1e-4, rate_Bps=HOST_MBIT * 1e6 / 8),
    groups=tuple(RACKS.group_of(host) for host in range(RACKS.hosts)),
    uplink_Bps=(UPLINK_MBIT * 1e6 / 8,) * len(RACKS.groups),
).arrays()
TRAINING_WORLD = Topology(hosts=2, groups=(1, 1))


def wire_floors(args: argparse.Namespace) -> tuple[list[dict], dict[str, Any]]:
    """Points 9 and 10: what sums take in the lab, and the quality of what they are rounded to."""
    floors, found = sum_floors(args)
    more, quality = quality_floors(args)
    return floors + more, {"sums": found, "far_types": quality}


def sum_floors(args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    if reason := missing():
        print(f"sums in the lab left out: {reason}", flush=True)
        return [], []
    rounds = 1 if args.smoke else 5 if args.quick else 9
    rows: list[dict] = []
    with Lab(RACKS.groups, host=HOST_MBIT, uplink=UPLINK_MBIT) as lab:
        for size_mb in SIZES_MB[-1:] if args.quick else SIZES_MB:
            found_W = lab.run(sums_of_rank, int(size_mb * 1e6) // 4, rounds)
            for name, wire in WIRES.items():
                rows.append({"sum": name, "size_mb": size_mb, **_row_of(name, wire, found_W, int(size_mb * 1e6) // 4)})
    ring_s = {row["size_mb"]: row["seconds"] for row in rows if row["sum"] == "ring"}
    floors = [exactly("sums: ranks with other bits", sum(row["other_bits"] for row in rows), 0)]
    floors += [exactly("sums: bytes beside the formula's", sum(row["bytes_beside_formula"] for row in rows), 0)]
    for row in rows:
        row["ring_over"] = round(ring_s[row["size_mb"]] / row["seconds"], 3)
        show(row)
        least = {"two levels, fp32": 1.1, "two levels, int8": 2.0}.get(row["sum"]) if row["size_mb"] == 1.0 else None
        if row["sum"].startswith("two") and not args.smoke:
            name = f"a ring over {row['sum']}: seconds of a sum of {row['size_mb']} MB at 16:1"
            floors.append(at_least(name, row["ring_over"], least))
    return floors, rows


def _row_of(name: str, wire: Wire, found_W: Sequence[dict], numbers: int) -> dict[str, Any]:
    """Seconds of the slowest rank, as the median of rounds; bytes of all ranks of the first rack over its uplink."""
    rounds = zip(*(found["seconds"][name] for found in found_W), strict=True)
    sent_W = [found["sent"][name] for found in found_W]
    beside = 0
    if wire.far is not None:
        want_W = two_level_bytes(RACKS, numbers, FarType.parse(wire.far))
        beside = sum(
            abs(sent[link] - want[link]) for sent, want in zip(sent_W, want_W, strict=True) for link in RACKS.links
        )
    return {
        "predicted_s": round(SumCosts(RACKS, LINKS, hardware_named("cpu"), (numbers,)).seconds(wire), 5),
        "seconds": round(statistics.median(map(max, rounds)), 5),
        "uplink_bytes": sum(sent["uplink"] for sent in sent_W[: RACKS.groups[0]]),
        "bytes_beside_formula": beside,
        "other_bits": len({found["bits"][name] for found in found_W}) - 1,
    }


def sums_of_rank(rank: int, numbers: int, rounds: int) -> dict[str, Any]:
    """Sums of every kind, one after the other, round after round."""
    from rowwise.parallel.comm.launch import connect
    from rowwise.train.dense import DenseGradients

    comm = connect()
    comm.topology = RACKS
    parameters = [nn.Parameter(torch.zeros(numbers))]
    reducers = {name: DenseGradients(parameters, comm.split([comm.ranks]), wire) for name, wire in WIRES.items()}
    gradient_N = torch.randn(numbers, generator=torch.Generator().manual_seed(rank))
    seconds: dict[str, list[float]] = {name: [] for name in WIRES}
    bits, sent = {}, {}
    for number in range(rounds + 1):
        for name, reducer in reducers.items():
            parameters[0].grad = gradient_N.clone()
            meet(comm)
            before, begin_s = comm.sent.counts.copy(), time.perf_counter()
            reducer.finish()
            if number:  # the first connects
                seconds[name].append(time.perf_counter() - begin_s)
            gone = comm.sent.counts - before
            sent[name] = {
                k: sum(n for (_, kind, link), n in gone.items() if link == k and (kind != "all_reduce" or n > 64))
                for k in RACKS.links
            }
            bits[name] = parameters[0].grad.numpy().tobytes()
    meet(comm)
    return {
        "seconds": seconds,
        "sent": sent,
        "bits": {name: hashlib.sha256(data).hexdigest() for name, data in bits.items()},
    }


def meet(comm: Comm) -> None:
    comm.all_reduce(torch.zeros(1), "barrier").wait()


def quality_floors(args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """NE of `movielens-dlrm` on 2 ranks, each a rack of its own, by the type of its dense sums between racks."""
    from parts.tiny_data import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        data = make_tiny(Path(folder)) if args.smoke else Path(getattr(args, "data", "data"))
        if not (data / "movielens-100k").is_dir():
            print(f"quality left out: no {data}/movielens-100k: expected `rowwise data get movielens-100k`", flush=True)
            return [], []
        rows = [row for seed in range(1 if args.quick else SEEDS) for row in quality_rows(data, seed, smoke=args.smoke)]
    exact = {row["seed"]: row["ne"] for row in rows if row["far"] == FP32}
    spread = max(exact.values()) - min(exact.values())
    floors: list[dict] = []
    for far in FAR:
        for feedback in (True, False):
            more = [row["ne"] - exact[row["seed"]] for row in rows if (row["far"], row["feedback"]) == (far, feedback)]
            name = f"movielens-dlrm: NE with sums far in {far} {'with' if feedback else 'without'} feedback above fp32"
            is_held = feedback and not far.startswith("topk") and not args.quick
            floors.append(
                at_most(f"{name}, mean of {len(more)} seeds", statistics.mean(more), spread if is_held else None)
            )
    return floors, rows


def quality_rows(data: Path, seed: int, *, smoke: bool) -> list[dict]:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from parts.wire_training import train
    from rowwise.recipes.compose import resolve
    from rowwise.recipes.find import load

    changes = [f"seed={seed}", f"data.folder={data.absolute()}", *(["train.epochs=1"] if smoke else [])]
    resolved, rows = resolve(load("movielens-dlrm", changes)), []
    for far, feedback in ((FP32, True), *((far, feedback) for far in FAR for feedback in (True, False))):
        wire = Wire(far=far, error_feedback=True)
        row = {"seed": seed, "far": far, "feedback": feedback and far != FP32}
        row |= train(resolved, wire, TRAINING_WORLD, feedback=feedback)
        show(row)
        rows.append(row)
    return rows
