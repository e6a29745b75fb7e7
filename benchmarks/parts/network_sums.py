"""All-reduces on the lab by size and algorithm, in the given order of hosts and in the order found."""

import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from parts.network_lab import BAD, MB, load_lab, probed
from parts.report import at_least, at_most, show
from rowwise.parallel.comm.sums import AllReduceSizes
from rowwise.planning.planner.order import SMALL_bytes, Sum, find_order
from rowwise.recipes.hosts import choose_sums
from rowwise.train.dense import BUCKET_BYTES


def warm_up(lab) -> None:
    """Start the server of ranks, which imports torch: a lab ends after two minutes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *lab.PRELOADED])
    process = context.Process(target=int)
    process.start()
    process.join()


def time_sums(
    rank: int, hosts: list[str], sums: dict[str, dict[str, tuple]], sizes: list[int], repeats: int
) -> dict[str, list[list[float]]]:
    """Seconds of all-reduces by side and size, in turn; rank k's numbers are k, so that sums are known."""
    import torch

    from rowwise.parallel.comm.launch import HostOrder, meet

    meeting = meet(60.0)
    comms = {}
    for side, rules in sums.items():
        world = replace(meeting.world, name=f"{meeting.world.name}/{side}".replace(" ", "-"))
        order = None if side == "given" else HostOrder(hosts=tuple(hosts))
        comms[side] = replace(meeting, world=world).join(order, sums=rules)
    first = next(iter(comms.values()))
    times: dict[str, list[list[float]]] = {side: [] for side in comms}
    for size in sizes:
        for taken in times.values():
            taken.append([])
        for _ in range(repeats + 1):
            for side, taken in times.items():
                numbers = torch.full((size // 4,), float(rank))
                first.all_reduce(torch.zeros(1), "meet").wait()
                begin_s = time.perf_counter()
                total = comms[side].all_reduce(numbers, "sums").wait()
                taken[-1].append(time.perf_counter() - begin_s)
                assert bool((total == sum(range(len(hosts)))).all()), side
    first.all_reduce(torch.zeros(1), "end").wait()
    for comm in comms.values():
        comm.close()
    return {side: [taken[1:] for taken in of_sizes] for side, of_sizes in times.items()}


def sums_floors(args) -> tuple[list[dict], list[dict]]:
    """All-reduces of several sizes by ring, halving and doubling and tree, in a bad order and in the one found."""
    lab = load_lab()
    if reason := lab.missing():
        return [at_least(f"left out, as there is no lab: {reason}", 0, None)], []
    warm_up(lab)
    powers = (10, 14) if args.smoke else (10, 14, 18, 20) if args.quick else range(10, 21, 2)
    sizes, repeats = [1 << power for power in powers], 1 if args.smoke else 3 if args.quick else 5
    with lab.Lab() as racks, tempfile.TemporaryDirectory() as folder:
        network, _ = probed(lab, racks, BAD, Path(folder))
    net = network.arrays()
    ring = find_order(net, Sum("all_reduce", BUCKET_BYTES), noise=network.noise).order
    hosts, ordered = [network.hosts[host].name for host in ring], net.among(ring)
    identity = tuple(range(len(ring)))
    sums: dict[str, dict[str, tuple]] = {"ring": {"given": (), "found": ()}}
    for algorithm in ("halving_doubling", "tree"):
        found = find_order(ordered, Sum(algorithm, SMALL_bytes), noise=network.noise).order
        orders = {"given": identity, "found": found}
        sums[algorithm] = {
            name: (AllReduceSizes(min_bytes=0, algorithm=algorithm, order=order),) for name, order in orders.items()
        }
    chosen = choose_sums(ordered, network.noise)
    sums["choice"] = {f"{algorithm} found": rules["found"] for algorithm, rules in sums.items()} | {"chosen": chosen}
    rows: list[dict] = [{"size": size} for size in sizes]
    for algorithm, rules in sums.items():  # a lab for each, as labs end after two minutes
        with lab.Lab() as racks:
            ranks = racks.run(time_sums, hosts, rules, sizes, repeats, order=BAD)
        for k, row in enumerate(rows):  # medians of the slowest rank's seconds
            row[algorithm] = {
                side: statistics.median(np.max([times[side][k] for times in ranks], axis=0)) for side in rules
            }
    for row in rows:
        used = [rule.algorithm for rule in chosen if rule.min_bytes <= row["size"]]
        row["chosen"] = used[-1] if used else "ring"
        chosen_s, *others_s = reversed(row["choice"].values())
        row["off_fastest"] = chosen_s / min(others_s)
        show(row)
    if args.smoke:
        return [at_least("lab: sizes of sums measured", len(rows), 2)], rows
    large = [row for row in rows if row["size"] >= MB]
    floors = []
    for algorithm, floor in (("ring", 1.5), ("halving_doubling", 1.3), ("tree", None)):
        gain = min(row[algorithm]["given"] / row[algorithm]["found"] for row in large)
        name = f"lab at 4:1: all-reduces of 1 MB and more by {algorithm}, least of given over found"
        floors.append(at_least(name, gain, floor))
    name = "lab: the algorithm chosen by size over the fastest one, median"
    floors.append(at_most(name, statistics.median(row["off_fastest"] for row in rows), None))
    return floors, rows
