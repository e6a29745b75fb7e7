"""What do the ways to shard dense parameters send, hold and take, beside torch's own over gloo?

    python benchmarks/dense_parallel.py [--only ways construction overlap] [--quick | --smoke] [--save]

The dense side of DHEN, cross and linear interactions, on 4 processes of this machine: replicated, sharded over all, and
sharded over groups of 2. Torch's are DDP, FSDP2 and FSDP2 on a mesh of 2 x 2, with gloo's collectives; ours run over
shared memory and over gloo. Then the construction of a model of 200 million parameters: how much memory a rank needs.
AdamW divides small gradients by their size, so their last digits show in later losses: those of DDP and of our
all-reduce differ, too. Last, hybrid sharding over a simulated link (`overlap`): steps whose sums of gradients run one
after the other, in turn with steps whose sums overlap the backward, and when each of these sums began and ended. The
link sleeps and takes no processor. Processes share two cores, so other times are of one machine's memory rather than of
links; ratios are of one run.

Takes: 4 minutes; --quick 1 minute
Needs: 3 GB of memory
"""

import statistics
import tempfile
from math import prod
from pathlib import Path

from parts.dense_parallel_work import measure, measure_overlap, measure_torch, units_of
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from rich.progress import track

from rowwise.parallel.comm.simulated_link import SimulatedLink
from rowwise.parallel.comm.spawn import run_processes
from rowwise.planning.perf.dense_parallel import fsdp_cost, replicated_cost
from rowwise.train.settings import DenseParallel

WORLD = 4
LINK = SimulatedLink(latency_s=0.002, bytes_s=1e8)
KINDS = {
    "replicate": DenseParallel(),
    "full": DenseParallel(kind="full"),
    "full, no reshard": DenseParallel(kind="full", reshard=False),
    "full, bf16": DenseParallel(kind="full", params="bf16"),
    "hybrid": DenseParallel(kind="hybrid", shards=2),
}
SIZES = {  # of the steps, and of the construction
    "smoke": ({"layers": 2, "dim": 32, "steps": 4, "batch": 16}, {"layers": 2, "dim": 32, "steps": 1, "batch": 4}),
    "quick": ({"layers": 4, "dim": 64, "steps": 20, "batch": 64}, {"layers": 8, "dim": 640, "steps": 1, "batch": 4}),
    "full": ({"layers": 4, "dim": 128, "steps": 50, "batch": 256}, {"layers": 20, "dim": 640, "steps": 1, "batch": 4}),
}


def predicted(found: dict, parallel: DenseParallel) -> float:
    shapes = units_of(found)
    if parallel.kind == "replicate":
        return replicated_cost(shapes, WORLD, 2).sent_bytes
    shards, bf16 = parallel.shards or WORLD, parallel.params == "bf16"
    return fsdp_cost(shapes, WORLD, shards, 2, reshard=parallel.reshard, bf16=bf16).sent_bytes


def steps_of(name: str, size: dict) -> dict:
    """One way to shard, by three sides in one run."""
    parallel = KINDS[name]
    ours = {shared: run_processes(WORLD, measure, parallel, size, shared_memory=shared)[0] for shared in (True, False)}
    row = {
        "kind": name,
        "sent_bytes": ours[True]["sent_bytes"],
        "predicted_bytes": predicted(ours[True], parallel),
        "shared_memory_ms": 1e3 * ours[True]["step_s"],
        "gloo_ms": 1e3 * ours[False]["step_s"],
        "losses": ours[False]["losses"],
    }
    if name in ("replicate", "full", "hybrid"):
        with tempfile.TemporaryDirectory() as folder:
            theirs = run_processes(WORLD, measure_torch, parallel, size, str(Path(folder) / "store"))[0]
        row |= {"torch_ms": 1e3 * theirs["step_s"], "torch_losses": theirs["losses"]}
    return row


def construction_of(size: dict) -> dict:
    found = run_processes(WORLD, measure, KINDS["full"], size, shared_memory=True)
    units, own = units_of(found[0]).units, units_of(found[0]).own
    sizes = [4 * sum(map(prod, unit)) for unit in units]
    whole = sum(sizes) + 4 * sum(map(prod, own))
    return {
        "parameters": whole // 4,
        "whole_bytes": whole,
        "bound_bytes": 1.15 * (whole / WORLD + max(sizes)),
        "peak_bytes": max(one["grown_bytes"] for one in found),
    }


def worst(one: list[float], other: list[float]) -> float:
    """The largest difference between losses, in millionths of them."""
    return 1e6 * max(abs(a - b) / b for a, b in zip(one, other, strict=True))


def way_floors(steps: dict, args) -> tuple[list[dict], list[dict]]:
    rows = [steps_of(name, steps) for name in track(KINDS, "steps")]
    first = rows[0]["losses"]
    floors = []
    for row in rows:
        name = row["kind"]
        row["off_replicated"] = worst(row["losses"], first)
        if "torch_losses" in row:
            row["off_torch"] = worst(row["losses"], row["torch_losses"])
        floors.append(
            at_most(f"{name}: bytes, off the formula", abs(row["sent_bytes"] / row["predicted_bytes"] - 1), 0.01)
        )
        if name != "full, bf16":
            floors.append(
                at_most(f"{name}: millionths that losses are off replicated ones", row["off_replicated"], 10.0)
            )
        if "torch_losses" in row:
            floors.append(at_most(f"{name}: millionths that losses are off torch's", row["off_torch"], 10.0))
    ratios = [row["torch_ms"] / row["shared_memory_ms"] for row in rows if "torch_ms" in row]
    if not args.smoke:
        floors.append(
            at_least("speed over shared memory, torch over gloo is 1", statistics.geometric_mean(ratios), 1.0)
        )
    for row in rows:
        row.pop("losses"), row.pop("torch_losses", None)
    return floors, rows


def construction_floors(size: dict, args) -> tuple[list[dict], list[dict]]:
    built = construction_of(size)
    floor = at_most("peak memory of construction, of the bound", built["peak_bytes"] / built["bound_bytes"], 1.0)
    return [] if args.smoke else [floor], [built]


def overlap_floors(size: dict, args) -> tuple[list[dict], list[dict]]:
    rows, floors = [], []
    for transport, shared in (("shared memory", True), ("gloo", False)):
        ranks = run_processes(WORLD, measure_overlap, 2, size, shared_memory=shared, link=LINK)
        equal = all(rank["losses"]["in_turn"] == rank["losses"]["together"] for rank in ranks)
        row = {
            "transport": transport,
            "in_turn_ms": 1e3 * statistics.median(rank["in_turn_s"] for rank in ranks),
            "together_ms": 1e3 * statistics.median(rank["together_s"] for rank in ranks),
            "events": ranks[0]["events"],
        }
        units = row["events"]
        begun = sum(unit["all_reduce_begin_ms"] < units[-1]["reduce_scatter_begin_ms"] for unit in units[:-1])
        floors.append(exactly(f"overlap over {transport}: losses have the bits of sums in turn", int(equal), 1))
        if not args.smoke:
            name = f"overlap over {transport}: all-reduces that begin during the backward, of all but the last"
            floors.append(at_least(name, begun / (len(units) - 1), 0.5))
            ratio = row["in_turn_ms"] / row["together_ms"]
            floors.append(at_least(f"overlap over {transport}: step with sums in turn over overlapped", ratio, 1.1))
        rows.append(row)
    return floors, rows


def main() -> None:
    args = parsed(options("dense_parallel", __doc__, only=("ways", "construction", "overlap")))
    steps, construction = SIZES["smoke" if args.smoke else "quick" if args.quick else "full"]
    parts = {"ways": (way_floors, steps), "construction": (construction_floors, construction)}
    parts["overlap"] = (overlap_floors, steps)
    floors, rows = [], []
    for name in args.only:
        measure_part, size = parts[name]
        of_part, of_rows = measure_part(size, args)
        for row in of_rows:
            show(row)
        floors += of_part
        rows += of_rows
    finish("dense_parallel", rows, floors, args)


if __name__ == "__main__":
    main()
