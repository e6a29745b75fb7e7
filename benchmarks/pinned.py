"""When do pinned rows beat a cache of the same memory, and what does RecShard's planning method read from slow memory?

    python benchmarks/pinned.py [--quick | --smoke] [--folder DIR] [--save]

- hits: the cache of tables on disk over drawn accesses, with LRU, LFU and pinned rows in as many slots. The hottest
  rows of half a million accesses are pinned, but for slots for the distinct rows of a batch; these accesses also fill
  the other caches. Then half a million accesses more are counted, with popularity that stays, and with popularity
  that drifts: a share of all rows take each other's places in the ranking, a hundredth of it at a time.
- rows: time to put the rows of a batch into slots for a lookup and for its update, rows on disk. Policies take turns of
  ten steps; times are the least of these, wall time and processor time. With `hits only` all ids are cached: the cost
  of finding slots alone.
- program: RecShard's method beside the mixed-integer program that it was published as: seconds of the slowest device.
- plan: share of lookups that read the lower tier, and seconds of devices, with hot rows of all tables on the devices,
  and with whole tables on them or below, by the cost model.

Memory beside the slots: LRU none, LFU 2 bytes a row of the table, pinned rows a quarter of a byte. The last printed
line is one JSON object.

Takes: 3 minutes, .6 GB of disk; --quick 1 minute
Needs: nothing
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from parts.planner_tasks import BATCH, machine, pool_tables, question, size_bytes, workload
from parts.recshard_program import optimum_s, piece_seconds, slowest_s
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from parts.tiers_policy import zipf_rows

from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.planning.planner.methods.named import run_method
from rowwise.planning.planner.methods.recshard import CUTS
from rowwise.planning.planner.native import MethodResult
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.problem import PlacementProblem, PlanRequest
from rowwise.recipes.pinned_rows import ExactCounts
from rowwise.tables.store.disk import DiskRows
from rowwise.tables.store.policy import WAYS
from rowwise.tables.store.row_store import NO_ROWS, SlotIds, SlotTable
from rowwise.tables.store.sizes import cache_slots, overflow_slots

SECTIONS = ("hits", "rows", "program", "plan")
POLICIES = ("lru", "lfu", "pinned")
TURNS = 100  # of the drift
DRIFTS = (0.0, 0.1, 0.5, 2.0)  # shares of the rows whose rank changes during the counted accesses
SKEW = 1.05


def zipf_ranks(skew: float, rows: int, count: int, seed: int) -> np.ndarray:
    weight_R = np.arange(1, rows + 1.0) ** -skew
    places = np.searchsorted(np.cumsum(weight_R / weight_R.sum()), np.random.default_rng(seed).random(count))
    return places.clip(max=rows - 1)


def drifting_rows(skew: float, rows: int, count: int, drift: float, seed: int) -> np.ndarray:
    """Accesses by Zipf's law: the first half with one ranking, the second while it changes."""
    draw, ranks_N = np.random.default_rng(seed + 1), zipf_ranks(skew, rows, 2 * count, seed)
    row_of_R = draw.permutation(rows)
    parts = [row_of_R[ranks_N[:count]]]
    for part_N in np.array_split(ranks_N[count:], TURNS):
        moved = draw.choice(rows, round(drift * rows / TURNS), replace=False)
        row_of_R[moved] = row_of_R[draw.permutation(moved)]
        parts.append(row_of_R[part_N])
    return np.concatenate(parts)


def hottest(rows_N: np.ndarray, count: int) -> torch.Tensor:
    counts = ExactCounts()
    counts.add(torch.from_numpy(rows_N))
    counts.merge()
    return counts.hottest()[:count].sort().values


def open_rows(
    folder: Path, policy: str, rows: int, cached: int, profile_N: np.ndarray, batch: int, width: int
) -> DiskRows:
    """A table on disk whose slots are `cached` ones and their overflow, with any policy."""
    slots = cache_slots(cached)
    total = slots + max(overflow_slots(slots), batch)
    window = max(
        WAYS, int(np.mean([len(np.unique(part)) for part in np.array_split(profile_N, len(profile_N) // batch)]))
    )
    pinned_rows = hottest(profile_N, slots - window) if policy == "pinned" else NO_ROWS
    table = SlotTable(
        name="t",
        rows=rows,
        row_memory=torch.zeros(total, width, dtype=torch.uint8),
        state_memory=torch.zeros(total, 1),
        slot_rows=torch.empty(total, dtype=torch.int64),
        overflow=total - len(pinned_rows) - (slots - len(pinned_rows)) // WAYS * WAYS,
        pinned_rows=pinned_rows,
        initial=lambda rows_U: (torch.zeros(len(rows_U), width, dtype=torch.uint8), torch.zeros(len(rows_U), 1)),
    )
    return DiskRows([table], folder, policy="lru" if policy == "lru" else "lfu")


def step(disk: DiskRows, ids_N: torch.Tensor, *, updates: bool = True) -> None:
    """Pin the rows of a batch for a lookup, and for its update."""
    ids = SlotIds(ids_N, torch.tensor([0, len(ids_N)]), [0])
    for changes in (False, True)[: 1 + updates]:
        with disk.pin(ids, changes=changes, counts=not changes):
            pass


def measure_hits(folder: Path, args: argparse.Namespace) -> list[dict]:
    rows, count, batch = (5_000, 20_000, 128) if args.smoke else (100_000, 500_000, 512)
    cases = [(skew, share, 0.0) for skew in (0.8, SKEW, 1.2) for share in (0.01, 0.05, 0.2)]
    cases += [(SKEW, share, drift) for share in (0.05, 0.2) for drift in DRIFTS[1:]]
    found = []
    for skew, share, drift in [(SKEW, 0.2, 0.0), (SKEW, 0.2, 2.0)] if args.quick else cases:
        trace_N = drifting_rows(skew, rows, count, drift, seed=1)
        row = {"section": "hits", "skew": skew, "cached": share, "drift": drift}
        for policy in POLICIES:
            disk = open_rows(folder, policy, rows, int(share * rows), trace_N[:count], batch, 16)
            before = disk.counters(0)
            for begin in range(0, len(trace_N), batch):
                before = disk.counters(0) if begin < count else before
                step(disk, torch.from_numpy(trace_N[begin : begin + batch]), updates=False)
            counted = disk.counters(0).since(before)
            row[policy] = counted.hit_rate
        found.append(row)
        show(row)
    return found


def measure_rows(folder: Path, args: argparse.Namespace) -> list[dict]:
    rows, batch, turns = (20_000, 512, 2) if args.smoke else (400_000, 4096, 4 if args.quick else 20)
    width, profile, cached = 256, 250 * batch, rows // 10
    trace_N = zipf_rows(rows, profile + 400 * batch)
    disks = {p: open_rows(folder, p, rows, cached, trace_N[:profile], batch, width) for p in POLICIES}
    batches = [torch.from_numpy(part) for part in np.array_split(trace_N[profile:], 400)]
    hot_N = hottest(trace_N[:profile], cached // 4)
    hits = [hot_N[torch.randint(len(hot_N), (batch,), generator=torch.Generator().manual_seed(n))] for n in range(20)]
    for disk in disks.values():
        for begin in range(0, rows, 1 << 16):  # all rows are on the disk, where they take room
            rows_U = torch.arange(begin, min(rows, begin + (1 << 16)))
            disk.write(0, rows_U, torch.zeros(len(rows_U), width, dtype=torch.uint8), torch.zeros(len(rows_U), 1))
        for ids_N in (*batches[:100], *hits):
            step(disk, ids_N)
    return [
        row
        for kind, steps in (("all ids", batches[100:]), ("hits only", hits))
        for row in take_turns(disks, steps, turns, {"section": "rows", "kind": kind, "rows": rows, "cached": cached})
    ]


def take_turns(disks: dict[str, DiskRows], steps: list[torch.Tensor], turns: int, about: dict) -> list[dict]:
    """Time of each policy for the same steps."""
    times: dict[str, list[tuple[float, float]]] = {policy: [] for policy in disks}
    befores = {policy: disk.use() for policy, disk in disks.items()}
    for turn in range(turns):
        for policy, disk in disks.items():
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            for n in range(10):
                step(disk, steps[(turn * 10 + n) % len(steps)])
            times[policy].append((time.perf_counter() - begin_s, time.process_time() - begin_cpu_s))
    found = []
    for policy, disk in disks.items():
        use = disk.use().since(befores[policy])
        wall_s, cpu_s = (min(seconds) / 10 for seconds in zip(*times[policy], strict=True))
        row = {"policy": policy, "hit_rate": use.tables["t"].hit_rate}
        row |= {"ids_s": len(steps[0]) / wall_s, "cpu_ns": cpu_s / len(steps[0]) * 1e9}
        row |= {"reads": use.reads / turns / 10, "writes": use.tables["t"].writes / turns / 10}
        found.append(about | row)
        show(found[-1])
    return found


def small_request(seed: int) -> PlanRequest:
    """Nine tables on two devices with room for four tenths of their bytes, the rest in host memory."""
    draw = np.random.default_rng(seed)
    tables = [
        workload(f"t{i}", int(draw.integers(20_000, 300_000)), 32, Access(pooling=draw.uniform(1, 20), zipf_a=a))
        for i, a in enumerate(draw.choice((0.4, 0.8, 1.05, 1.3), 9).tolist())
    ]
    return with_host_memory(tables, 2, 0.4)


def with_host_memory(tables: list[Workload], devices: int, fill: float, batch: int = BATCH) -> PlanRequest:
    """Devices with room for a share of the tables' bytes, in front of host memory for all of them."""
    where = machine(devices, fill * size_bytes(tables) / devices)
    hardware = structs.replace(where.hardware, host_bytes=4 * size_bytes(tables))
    request = question(tables, structs.replace(where, hardware=hardware), ("table_wise",), batch=batch)
    return replace(request, tiers=frozenset({"device", "host"}))


def measure_program(args: argparse.Namespace) -> list[dict]:
    found = []
    for seed in range(1 if args.quick else 6):
        problem = make_problem(small_request(seed), CUTS[::6] if args.smoke else CUTS[::3])
        begin_s = time.perf_counter()
        result = run_method("recshard", problem)
        method_s, begin_s = time.perf_counter() - begin_s, time.perf_counter()
        best_s = optimum_s(problem)
        took = {"method_s": method_s, "program_s": time.perf_counter() - begin_s}
        found.append({"section": "program", "seed": seed, "ratio": slowest_s(problem, result) / best_s, **took})
        show(found[-1])
    return found


def skewed_tables(count: int, most_rows: int) -> list[Workload]:
    draw = np.random.default_rng(0)
    rows = np.geomspace(most_rows / 500, most_rows, count).astype(int)
    skews, pooling = draw.uniform(0.8, 1.3, count), draw.uniform(1, 20, count)
    laws = zip(rows.tolist(), skews.tolist(), pooling.tolist(), strict=True)
    return [workload(f"t{i}", n, 64, Access(pooling=p, zipf_a=a)) for i, (n, a, p) in enumerate(laws)]


def measure_plan(args: argparse.Namespace) -> list[dict]:
    """Whole tables are those of the same method with no cut between nothing and all rows."""
    tasks = [("26 skewed tables", skewed_tables(26, 2_000_000), 4, fill) for fill in (0.1, 0.3)]
    tasks += [] if args.quick else [("856 tables", pool_tables(), 16, 0.1)]
    found = []
    for name, tables, devices, fill in tasks:
        request = with_host_memory(tables, devices, fill, BATCH if devices == 16 else 4096)
        row = {"section": "plan", "tables": name, "devices": devices, "fill": fill}
        for kind, cuts in (("split", CUTS), ("whole", (0.0,))):
            problem, begin_s = make_problem(request, cuts), time.perf_counter()
            result = run_method("recshard", problem)
            row[f"{kind}_took_s"] = time.perf_counter() - begin_s
            seconds_S = piece_seconds(problem)[result.piece_S]
            busy_W = np.bincount(result.rank_S, seconds_S, devices)
            row |= {f"{kind}_slow": slow_share(problem, result), f"{kind}_ms": float(busy_W.max()) * 1e3}
            row[f"{kind}_balance"] = float(busy_W.max() / busy_W.mean())
        found.append(row)
        show(row)
    return found


def slow_share(problem: PlacementProblem, result: MethodResult) -> float:
    """The share of lookups whose row is below the devices, by each table's law."""
    curves = Curves.of(problem.request.workloads, problem.request.batch)
    options = problem.option_of_N[result.piece_S]
    table_S = np.array([problem.members[int(problem.item_of_O[o])][0] for o in options])
    kinds = [problem.kind_of(int(o)) for o in options]
    share_S = np.array([1.0 if kind.tier == "device" else kind.cached for kind in kinds])
    rows_S = np.array([problem.request.workloads[t].table.rows for t in table_S])
    pooling_S = curves.pooling_T[table_S]
    return float(1 - pooling_S @ curves.head(table_S, share_S * rows_S) / pooling_S.sum())


def floors_of(rows: list[dict]) -> list[dict]:
    floors: list[dict] = []
    of = {name: [row for row in rows if row["section"] == name] for name in SECTIONS}
    for row in of["hits"]:
        what = "{cached:.0%} cached, Zipf({skew}), drift {drift}".format(**row)
        steady, over_lru, over_lfu = not row["drift"], row["pinned"] - row["lru"], row["pinned"] - row["lfu"]
        floors.append(at_least(f"hit rate of pinned over LRU, {what}", over_lru, 0.0 if steady else None))
        floors.append(at_least(f"hit rate of pinned over LFU, {what}", over_lfu, -0.02 if steady else None))
    cost = {(row["kind"], row["policy"]): row["cpu_ns"] for row in of["rows"]}
    for kind, policy in cost:
        if policy != "pinned":
            ratio, floor = cost[kind, policy] / cost[kind, "pinned"], 1.0 if kind == "hits only" else None
            floors.append(at_least(f"processor time of {policy} over pinned, {kind}", ratio, floor))
    floors += [at_most(f"over the program's optimum, {row['seed']}", row["ratio"], 1.08) for row in of["program"]]
    for row in of["plan"]:
        what = "{tables}, {fill:.0%} of the bytes".format(**row)
        floors.append(at_least(f"times fewer slow reads, {what}", row["whole_slow"] / row["split_slow"], 1.0))
    return floors


def smoke_floors(rows: list[dict]) -> list[dict]:
    """No times."""
    steady = [row for row in rows if row["section"] == "hits" and not row["drift"]]
    plans = [row for row in rows if row["section"] == "plan"]
    return [
        exactly(
            "cases in which pinned rows hit more than LRU", sum(r["pinned"] > r["lru"] for r in steady), len(steady)
        ),
        exactly("plans with fewer slow reads", sum(r["split_slow"] < r["whole_slow"] for r in plans), len(plans)),
    ]


def main() -> None:
    parser = options("pinned", __doc__, only=SECTIONS)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    args = parsed(parser)
    torch.set_num_threads(1)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows += measure_hits(Path(folder), args) if "hits" in args.only else []
        rows += measure_rows(Path(folder), args) if "rows" in args.only else []
    rows += measure_program(args) if "program" in args.only else []
    rows += measure_plan(args) if "plan" in args.only else []
    finish("pinned", rows, smoke_floors(rows) if args.smoke else floors_of(rows), args)


if __name__ == "__main__":
    main()
