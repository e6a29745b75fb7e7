"""Sums of dense gradients in two levels, by their type between groups."""

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parts import BENCHMARKS
from parts.report import at_least, exactly, show
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
LINKS = Network(
    hosts=tuple(NetworkHost(name=f"h{k}") for k in range(RACKS.hosts)),
    link=PairLink(latency_s=1e-4, rate_Bps=HOST_MBIT * 1e6 / 8),
    groups=tuple(RACKS.group_of(host) for host in range(RACKS.hosts)),
    uplink_Bps=(UPLINK_MBIT * 1e6 / 8,) * len(RACKS.groups),
).arrays()


def wire_floors(args: argparse.Namespace) -> tuple[list[dict], dict[str, Any]]:
    """What sums take in the lab."""
    if reason := missing():
        print(f"sums in the lab left out: {reason}", flush=True)
        return [], {"sums": []}
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
    return floors, {"sums": rows}


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
