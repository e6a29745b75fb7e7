"""Orders of hosts on the lab: probes, all-reduces and training in the given order and in the order found."""

import csv
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from msgspec import structs

from parts import BENCHMARKS
from parts.network_accuracy import PROFILE
from parts.report import at_least, at_most, exactly, show
from rowwise.base.textfile import decode_json
from rowwise.cli.net_show import slow_hosts
from rowwise.planning.perf.hardware import Hardware, Machine, read_hardware
from rowwise.planning.perf.links import LinkArrays, Network, NetworkHost, read_network
from rowwise.planning.planner.order import Sum, find_order
from rowwise.planning.simulate.simulation import SimulatedMachine, simulate
from rowwise.recipes.find import load
from rowwise.recipes.simulated import simulated_model
from rowwise.train.dense import BUCKET_BYTES

MB = 1 << 20
BAD = [0, 4, 1, 5, 2, 6, 3, 7]  # hosts of the two racks in turn
STEP = {"train.batch": 2048, "data.rows": 60_000, "data.test_rows": 2000, "log.every": 4}


def load_lab():
    """The lab of the tests, by its file."""
    if "lab" not in sys.modules:
        path = BENCHMARKS.parent / "tests/lab.py"
        spec = importlib.util.spec_from_file_location("lab", path)
        sys.modules["lab"] = importlib.util.module_from_spec(spec)
        sys.path.append(str(path.parent))  # where ranks find it
        spec.loader.exec_module(sys.modules["lab"])
    return sys.modules["lab"]


def lab_floors(args) -> tuple[list[dict], dict]:
    floors, measured = [], {}
    lab = load_lab()
    if reason := lab.missing():
        print(f"left out: no lab: {reason}", flush=True)
        return [], {"lab": reason}
    for part in (order_floors,) if args.smoke else (order_floors, slow_floors, training_floors):
        of_part, of_rows = part(lab, args)
        floors += of_part
        measured |= of_rows
    return floors, measured


def random_links(hosts: int, seed: int, groups: int = 2, oversubscription: float = 4.0) -> LinkArrays:
    """Hosts dealt to racks at random, links that vary, an oversubscribed uplink of each rack."""
    rng = np.random.default_rng(seed)
    group_H = rng.permutation(np.arange(hosts) % groups)
    far_HH = group_H[:, None] != group_H
    latency_HH = np.where(far_HH, 60e-6, 20e-6) * rng.uniform(0.9, 1.1, (hosts, hosts))
    rate_HH = 1.25e9 * rng.uniform(0.8, 1.0, (hosts, hosts))
    np.fill_diagonal(latency_HH, 0.0)
    np.fill_diagonal(rate_HH, np.inf)
    uplink_G = np.bincount(group_H, minlength=groups) * 1.25e9 / oversubscription
    return LinkArrays(latency_HH, rate_HH, group_H.astype(np.int64), uplink_G)


def time_collectives(rank: int, size: int, repeats: int, hosts: list[str]) -> dict[str, list[float]]:
    """Seconds of all-reduces and all-to-alls in the given order and in that of `hosts`, in turn."""
    import torch

    from rowwise.parallel.comm.launch import HostOrder, meet

    meeting = meet(60.0)
    comms = {"given": meeting.join(), "found": meeting.join(HostOrder(hosts=tuple(hosts)))}
    world, one, sums = len(hosts), torch.zeros(1), torch.zeros(size // 4)
    parts = [len(sums) // world] * world
    times: dict[str, list[float]] = {f"{name}_{kind}": [] for kind in ("sum", "exchange") for name in comms}
    for _ in range(repeats + 1):
        for key, taken in times.items():
            name, _, kind = key.partition("_")
            comms["given"].all_reduce(one, "meet").wait()
            begin_s = time.perf_counter()
            if kind == "sum":
                comms[name].all_reduce(sums, "sums").wait()
            else:
                comms[name].all_to_all(sums[: sum(parts)], parts, parts, "parts").wait()
            taken.append(time.perf_counter() - begin_s)
    comms["given"].all_reduce(one, "end").wait()
    for comm in comms.values():
        comm.close()
    return {key: taken[1:] for key, taken in times.items()}


def timed(racks, given, hosts: list[str], repeats: int) -> dict[str, float]:
    """Median seconds of the slowest rank."""
    found = racks.run(time_collectives, MB, repeats, hosts, order=given)
    return {key: statistics.median(max(times[key][k] for times in found) for k in range(repeats)) for key in found[0]}


def probed(lab, racks, order, folder: Path) -> tuple[Network, float]:
    begin_s = time.perf_counter()
    codes = racks.run(lab.run_command, ["rowwise", "net", "probe", "net.json"], str(folder), order=order)
    assert not any(codes), codes
    return read_network(folder / "net.json"), time.perf_counter() - begin_s


def order_floors(lab, args) -> tuple[list[dict], dict]:
    """Random orders of hosts: are racks found, and what does the order gain?"""
    rows = []
    repeats = 1 if args.smoke else 5
    for seed in range(1 if args.smoke else 4 if args.quick else 20):
        given = random.Random(seed).sample(range(8), 8)
        with lab.Lab() as racks, tempfile.TemporaryDirectory() as folder:
            network, probe_s = probed(lab, racks, given, Path(folder))
            found = find_order(network.arrays(), Sum("all_reduce", MB), noise=network.noise)
            hosts = [network.hosts[host].name for host in found.order]
            times = timed(racks, given, hosts, repeats)
            rack_of = [racks.hosts[host].rack for host in given]
        numbers = list(dict.fromkeys(rack_of))
        right = network.groups == tuple(numbers.index(rack) for rack in rack_of)
        rows.append(
            {
                "given": given,
                "right": right,
                "probe_s": round(network.probed.seconds, 1),
                "command_s": round(probe_s, 1),
                "given_s": times["given_sum"],
                "found_s": times["found_sum"],
                "gain": times["given_sum"] / times["found_sum"],
                "all_to_all": times["given_exchange"] / times["found_exchange"],
                "predicted_given_s": found.given_s,
                "predicted_found_s": found.seconds,
            }
        )
        show(rows[-1])
    gains = [row["gain"] for row in rows]
    errors = [abs(row["predicted_given_s"] / row["given_s"] - 1) for row in rows]
    errors += [abs(row["predicted_found_s"] / row["found_s"] - 1) for row in rows]
    if args.smoke:
        return [at_least("lab: orders measured", len(rows), 1)], {}
    floors = [
        at_least("lab at 4:1: share of orders in which racks are found", np.mean([r["right"] for r in rows]), 0.95),
        at_least("lab: all-reduce of 1 MB, median of given over found", statistics.median(gains), 1.6),
        at_least("lab: all-reduce of 1 MB, least of given over found", min(gains), 0.95),
        at_most("lab: all-to-all, off what it was", max(abs(r["all_to_all"] - 1) for r in rows), 0.05),
        at_most("lab: ring formula off measured, most", max(errors), 0.15),
        at_most("lab: seconds of a probe, most", max(row["probe_s"] for row in rows), 15.0),
    ]
    return floors, {"orders": rows, "formula_error_median": statistics.median(errors)}


def slow_floors(lab, args) -> tuple[list[dict], dict]:
    """A host at 30 % of the rate is named, and without an oversubscribed uplink there is one group."""
    with lab.Lab(uplink=None, slow={3: 60.0}) as racks, tempfile.TemporaryDirectory() as folder:
        slow, _ = probed(lab, racks, list(range(8)), Path(folder))
    with lab.Lab(uplink=None) as racks, tempfile.TemporaryDirectory() as folder:
        equal, _ = probed(lab, racks, list(range(8)), Path(folder))
    named = [host for host, _ in slow_hosts(slow.arrays())]
    found = find_order(equal.arrays(), Sum("all_reduce", MB), noise=equal.noise)
    print("slow host", named, "groups", slow.group_count, equal.group_count, "gain", found.gain, flush=True)
    floors = [
        exactly("lab: the host at 30 % of the rate, as named", named[0] if len(named) == 1 else -1, 3),
        exactly("lab without contention: groups", equal.group_count, 1),
        exactly("lab without contention: an order is worthwhile", int(found.is_worthwhile), 0),
    ]
    return floors, {"equal_gain": found.gain}


def step_s(run: Path) -> float:
    """Median seconds of a step of rank 0, after the first."""
    phases: dict[str, list[float]] = {}
    with (run / "stages.csv").open() as file:
        for row in csv.DictReader(file):
            if row["rank"] == "0" and int(row["step"]) > 2:
                phases.setdefault(row["phase"], []).append(float(row["measured_s"]))
    return sum(statistics.median(times) for times in phases.values())


def train(lab, racks, folder: Path, words: list[str]) -> Path:
    """A run in the bad order of the lab, with more words of the command."""
    folder.mkdir()
    command = ["rowwise", "train", "dlrm-synthetic", "--timeout", "90", *words]
    codes = racks.run(lab.run_command, command, str(folder), order=BAD, limit_s=110.0)
    assert not any(codes), codes
    return folder / "runs/dlrm-synthetic/1"


def racks_of_lab(uplink_Bps: float) -> str:
    """The lab's network as a file made by hand, so that runs differ in the order alone."""
    hosts = tuple(NetworkHost(name=f"h{k}") for k in BAD)
    link = {"latency_s": 1e-4, "rate_Bps": 25e6}
    groups, uplinks = [host // 4 for host in BAD], [uplink_Bps] * 2
    return json.dumps(
        {"hosts": [{"name": h.name} for h in hosts], "link": link, "groups": groups, "uplink_Bps": uplinks}
    )


def shared_by(hardware: Hardware, ranks: int) -> Hardware:
    """The profile of a machine whose processors so many ranks share."""
    slower = max(1.0, ranks / len(os.sched_getaffinity(0)))
    linears = hardware.linears
    if linears is not None:
        grids = {name: np.array(getattr(linears, name)) * slower for name in ("forward_s", "backward_s")}
        linears = structs.replace(linears, **{name: to_tuples(grid) for name, grid in grids.items()})
    overheads = tuple(structs.replace(one, seconds=one.seconds * slower) for one in hardware.overheads)
    return structs.replace(hardware, flops=hardware.flops / slower, linears=linears, overheads=overheads)


def to_tuples(grid: np.ndarray) -> tuple:
    return tuple(map(to_tuples, grid)) if grid.ndim > 1 else tuple(grid.tolist())


def predicted_gain(sizes: dict, uplink_Bps: float, hardware: Hardware) -> float:
    """Simulated steps in the bad order over those in the order that --network takes."""
    given = decode_json(racks_of_lab(uplink_Bps), Network)
    found = find_order(given.arrays(), Sum("all_reduce", BUCKET_BYTES), noise=given.noise)
    ordered, recipe = (
        given.among([given.hosts[host].name for host in found.order]),
        load("dlrm-synthetic", changes_of(sizes)),
    )
    steps = []
    for network in (given, ordered):
        machine = Machine(network.topology(), shared_by(hardware, len(network.hosts)))
        place = SimulatedMachine(machine=machine, network=network, even=True)
        steps.append(simulate(simulated_model(recipe, machine), place, explain=False).step_s)
    return steps[0] / steps[1]


def changes_of(sizes: dict) -> list[str]:
    return [f"{key}={value}" for key, value in sizes.items()]


def training_floors(lab, args) -> tuple[list[dict], dict]:
    """Training in a bad order beside the same with --network: where dense layers dominate, and where tables do."""
    rows = []
    cases = [(200.0, 512), (50.0, 512), (200.0, 64)]
    sizes_of = {width: STEP | dict.fromkeys(("model.bottom", "model.top"), f"[{width},{width}]") for _, width in cases}
    profile = None if args.runs is None else args.runs / PROFILE
    predicted: list[float] = []
    if profile is not None and profile.exists():
        hardware = read_hardware(profile.read_bytes())
        predicted = [predicted_gain(sizes_of[width], uplink * 1e6 / 8, hardware) for uplink, width in cases]
    for uplink, width in cases:
        sizes = sizes_of[width] | {"train.steps": 14}
        changes = [word for change in changes_of(sizes) for word in ("--set", change)]
        times: dict[str, list[float]] = {"given": [], "ordered": []}
        for number in range(1 if args.quick else 3):
            for name in times:
                with lab.Lab(uplink=uplink) as racks, tempfile.TemporaryDirectory() as top:
                    (Path(top) / "net.json").write_text(racks_of_lab(uplink * 1e6 / 8))
                    more = ["--network", "../net.json"] if name == "ordered" else []
                    times[name].append(step_s(train(lab, racks, Path(top) / f"{name}{number}", [*changes, *more])))
        given_s, ordered_s = (statistics.median(taken) for taken in times.values())
        rows.append({"uplink": uplink, "width": width, "given_s": given_s, "ordered_s": ordered_s})
        show(rows[-1])
    gains = [row["given_s"] / row["ordered_s"] for row in rows]
    floors = [
        at_least("lab at 4:1, layers of 512: step in a bad order over --network", gains[0], 1.5),
        at_least("lab at 16:1, layers of 512: step in a bad order over --network", gains[1], 2.2),
        at_least("lab at 4:1, layers of 64: step in a bad order over --network", gains[2], None),
    ]
    for (uplink, width), gain, wanted in zip(cases, gains, predicted, strict=False):  # without a profile: none
        name = f"lab at {800 / uplink:g}:1, layers of {width}: simulated gain of the order off the measured one"
        floors.append(at_most(name, abs(wanted / gain - 1), 0.20))
    return floors, {"training": rows, "predicted_gains": predicted}
