"""How good are plans beside published ways to make them, and beside bounds that nothing beats?

    python benchmarks/planner.py [--quick | --smoke] [--only SUITE] [--save]

Every suite is a set of tasks drawn by seed (planner_tasks.py), the same for all methods; costs are of one model, so the
search is compared and not the model. Times are of the whole: options, bound, search.

    ns4, ns8     NeuroShard's protocol on 4 and 8 devices; on 4 also against a bound proven by a mixed-integer program
    pool         856 tables on 16, 64 and 128 devices, memory 70 to 97 % full
    torchrec     tables, columns, rows and copies under TorchRec's own estimates (needs torchrec)
    replan       856 tables on 16 devices after their pooling has drifted
    lists        published lists of tables, all layouts
    giant        12 T parameters in 64 to 1,000 tables, on 128 and 1,024 devices with two tiers of memory
    wide         2,002 tables on 128 devices

Takes: 30 minutes; --quick 1 minute
Needs: the extra `peers`, for the suite torchrec
"""

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import msgspec
import numpy as np
from parts import planner_tasks as tasks
from parts.report import at_least, at_most, exactly, finish, geomean, has_peer, options, parsed, show

from rowwise.parallel.plan import Plan, Tier
from rowwise.planning.perf.access import Workload
from rowwise.planning.perf.hardware import Machine, hardware_named
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.perf.torchrec import TorchRecModel
from rowwise.planning.planner.methods.named import METHODS, run_method
from rowwise.planning.planner.milp import certify
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import PlacementProblem, PlanRequest
from rowwise.planning.planner.replan import replan
from rowwise.planning.planner.search import search
from rowwise.tables.spec import Topology

SUITES = ("ns4", "ns8", "pool", "torchrec", "replan", "lists", "giant", "wide")
SECONDS = 0.5  # of effort for a small task; the whole should stay under half a second
GIANT_SECONDS = 20.0
CERTIFY_s = 28.0
SORTS = ("storage", "perf")  # in which TorchRec places tables
BOTH: frozenset[Tier] = frozenset({"device", "host"})  # more than the runtime runs: planners are compared
MIXED = ("table_wise", "column_wise", "row_wise", "replicated")


def ours(question: PlanRequest, seconds: float, seed: int = 0) -> tuple[PlacementProblem, dict]:
    begin_s = time.perf_counter()
    problem = make_problem(question)
    found = search(problem, seconds=seconds, seed=seed)
    took_s = time.perf_counter() - begin_s
    row = {
        "cost_s": found.cost,
        "bound_s": found.bound.cost,
        "fits": not found.over,
        "took_s": took_s,
        "gap": found.gap,
    }
    exact = problem.cost(found.placement)
    valid = math.isclose(exact, found.cost, rel_tol=1e-9) and found.bound.cost <= found.cost * (1 + 1e-9)
    return problem, row | {"valid": bool(valid and problem.fits(found.placement) == (not found.over))}


def compared(name: str, question: PlanRequest, seconds: float, baselines: tuple[str, ...] = tuple(METHODS)) -> dict:
    problem, row = ours(question, seconds)
    others = {}
    for baseline in baselines:
        begin_s = time.perf_counter()
        result = run_method(baseline, problem)
        others[baseline] = {"cost_s": result.cost, "took_s": time.perf_counter() - begin_s}
    return {"task": name, "tables": len(question.workloads), **row, "others": others}


def _certified(seed: int) -> tuple[int, float, float]:
    problem = make_problem(tasks.ns4(seed))
    found = search(problem, seconds=2.0, seed=1)  # another search than the one that is judged
    begin_s = time.perf_counter()
    proven = certify(problem, found, CERTIFY_s)
    return seed, proven.bound.cost, time.perf_counter() - begin_s


def run_ns4(quick: bool) -> list[dict]:
    count = 6 if quick else 40
    rows = [compared(f"ns4-{seed}", tasks.ns4(seed), SECONDS) | {"seed": seed} for seed in range(count)]
    if not quick:
        with ProcessPoolExecutor(2) as pool:
            for seed, bound_s, took_s in pool.map(_certified, range(count)):
                rows[seed] |= {"certified_s": max(bound_s, rows[seed]["bound_s"]), "certify_took_s": took_s}
                show(rows[seed])
    return rows


def run_ns8(quick: bool) -> list[dict]:
    return [compared(f"ns8-{seed}", tasks.ns8(seed), SECONDS) for seed in range(3 if quick else 20)]


def run_pool(quick: bool) -> list[dict]:
    few = tuple(name for name in METHODS if name != "neuroshard")
    cases = [
        ("856x16 70 %", 16, 0.7, 0.6, tuple(METHODS)), ("856x16 97 %", 16, 0.97, 0.6, few),
        ("856x16 97 % long", 16, 0.97, 3.5, ()), ("856x128 70 %", 128, 0.7, 5.0, few),
        ("856x64 97 %", 64, 0.97, 5.0, few), ("856x64 97 % short", 64, 0.97, 0.5, ()),
    ]  # fmt: skip
    if quick:
        cases = [("856x16 70 %", 16, 0.7, 0.6, few), ("856x16 97 %", 16, 0.97, 0.6, few)]
    rows = []
    for name, devices, fill, seconds, baselines in cases:
        rows.append(compared(name, tasks.pool_task(devices, fill), seconds, baselines))
        show(rows[-1])
    return rows


def asked_of_torchrec(workloads: list[Workload], devices: int) -> PlanRequest:
    where = tasks.machine(devices, 1 << 42)
    return tasks.question(workloads, where, MIXED, lambda hardware, topology: TorchRecModel(topology))


def beside_torchrec(name: str, question: PlanRequest, seconds: float, sorts: tuple[str, ...] = SORTS) -> dict:
    from parts.planner_torchrec import torchrec_rating

    _, row = ours(question, seconds)
    for sort in sorts:
        cost_s, took_s = torchrec_rating(question, sort)
        row[f"torchrec_{sort}"] = {"cost_s": cost_s, "took_s": took_s}
    row = {"task": name, **row}
    show(row)
    return row


def run_torchrec(quick: bool) -> list[dict]:
    rows = []
    for seed in range(2 if quick else 12):
        question = asked_of_torchrec(tasks.ns_tables(seed, 20, 120, 31 * tasks.GiB), 8)
        rows.append(beside_torchrec(f"mixed-{seed}", question, SECONDS))
    if not quick:
        question = with_layouts(asked_of_torchrec(tasks.pool_tables(), 16), ("table_wise", "column_wise"))
        rows.append(beside_torchrec("856x16", question, 0.6, ("storage",)))
    return rows


def with_layouts(question: PlanRequest, layouts: tuple[str, ...]) -> PlanRequest:
    return replace(question, constraints=msgspec.structs.replace(question.constraints, layouts={"*": layouts}))


def drifted(question: PlanRequest, seed: int, sigma: float = 0.3) -> PlanRequest:
    rng = np.random.default_rng(seed)
    moved = []
    for w, factor in zip(question.workloads, np.exp(rng.normal(0, sigma, len(question.workloads))), strict=True):
        access = msgspec.structs.replace(w.access, pooling=w.access.pooling * float(factor))
        moved.append(msgspec.structs.replace(w, access=access))
    return replace(question, workloads=tuple(moved))


def replanned(question: PlanRequest, old: Plan, seed: int) -> dict:
    found = replan(drifted(question, seed), old)
    searched = found.planned.searched
    return {
        "task": f"drift-{seed}", "cost_s": found.new_cost, "bound_s": searched.bound.cost,
        "old_cost_s": found.old_cost, "took_s": searched.seconds, "moved_share": found.moved_share,
        "fits": not searched.over, "valid": True,
    }  # fmt: skip


def run_replan(quick: bool) -> list[dict]:
    question = tasks.pool_task(16, 0.7)
    old = make_plan(question, seconds=1.0).plan
    return [replanned(question, old, seed) for seed in range(2 if quick else 10)]


def run_lists(quick: bool) -> list[dict]:
    lists = [one for one in tasks.LISTS if not quick or one.devices <= 16]
    few = () if quick else ("random", "size", "dim", "lookup", "size-lookup", "ldm", "neuroshard-grid")
    rows = []
    for one in lists:
        rows.append(compared(one.name, tasks.listed(one), 1.0 if one.devices < 64 else 5.0, few))
        show(rows[-1])
    return rows


def giant_question(tables: int, hosts: int) -> PlanRequest:
    """Neo's largest published model, by its totals, on hosts of 8 devices."""
    where = Machine(topology=Topology(hosts=hosts, devices=8), hardware=hardware_named("zionex"))
    model = Roofline(where.hardware, where.topology)
    return PlanRequest(workloads=tuple(tasks.model_f(tables)), machine=where, model=model, batch=65536, tiers=BOTH)


def planned_whole(name: str, question: PlanRequest, seconds: float) -> dict:
    """A plan with options, bound, search and forecast in one time."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    forecast = make_plan(question, seconds=seconds).plan.forecast
    took_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    row = {
        "task": name, "tables": len(question.workloads), "devices": question.machine.topology.world,
        "cost_s": forecast.step_s, "bound_s": forecast.bound_s, "gap": forecast.gap, "took_s": took_s, "cpu_s": cpu_s,
        "operators_s": [float(np.mean(forecast.operators_s)), max(forecast.operators_s)],
        "links_s": [float(np.mean(forecast.links_s)), max(forecast.links_s)],
        "fullest_bytes": np.array(forecast.memory_bytes).max(0).tolist(),
        "limits_bytes": list(forecast.limits_bytes),
        "fits": bool((np.array(forecast.memory_bytes) <= np.array(forecast.limits_bytes)).all()),
        "valid": forecast.bound_s <= forecast.step_s * (1 + 1e-9),
    }  # fmt: skip
    show(row)
    return row


def run_giant(quick: bool) -> list[dict]:
    cells = () if quick else [(tables, hosts) for hosts in (16, 128) for tables in (64, 256, 1000)]
    return [
        planned_whole(f"12 T in {tables:,} tables, {8 * hosts:,} devices", giant_question(tables, hosts), GIANT_SECONDS)
        for tables, hosts in cells
    ]


def run_wide(quick: bool) -> list[dict]:
    return [] if quick else [planned_whole("2,002 tables", tasks.listed(tasks.LISTS[-1]), 6.0)]


RUN = {
    "ns4": run_ns4, "ns8": run_ns8, "pool": run_pool, "torchrec": run_torchrec, "replan": run_replan,
    "lists": run_lists, "giant": run_giant, "wide": run_wide,
}  # fmt: skip


def ratios(rows: list[dict], baseline: str) -> list[float]:
    """What a baseline costs over ours, where both fit."""
    pairs = [(r["others"][baseline]["cost_s"], r["cost_s"]) for r in rows if r["others"].get(baseline)]
    return [theirs / mine for theirs, mine in pairs if theirs]


def interval(values: list[float]) -> list[float]:
    """Of the geometric mean: 95 % by resampling tasks."""
    rng, logs = np.random.default_rng(0), np.log(values)
    means = np.exp(rng.choice(logs, (2000, len(logs))).mean(1))
    return [round(float(x), 4) for x in np.quantile(means, [0.025, 0.975])]


def baselines_of(rows: list[dict]) -> dict:
    """Of each baseline: how often it fits, its cost over ours with an interval, wins of ours, and its time."""
    found = {}
    for name in METHODS:
        ran = [r["others"][name] for r in rows if r.get("others", {}).get(name)]
        if not ran:
            continue
        over = ratios(rows, name)
        found[name] = {
            "tasks": len(ran), "fit": len(over), "mean_s": round(float(np.mean([o["took_s"] for o in ran])), 4),
            **({"over_ours": round(geomean(over), 4), "interval": interval(over), "worst_for_us": round(min(over), 4),
                "we_win": sum(x > 1 + 1e-6 for x in over), "we_lose": sum(x < 1 - 1e-6 for x in over)} if over else {}),
        }  # fmt: skip
    return found


def floors_of(rows: dict[str, list[dict]]) -> list[dict]:
    every = [r for suite in rows.values() for r in suite]
    lost = [r for r in every if not r["fits"] and any(o["cost_s"] for o in r.get("others", {}).values())]
    floors = [
        at_least(
            "plans whose cost, memory and bound were checked, share", float(np.mean([r["valid"] for r in every])), 1.0
        ),
        at_most("tasks that only another method fits", len(lost), 0),
    ]
    for suite, found in rows.items():
        if found and suite in FLOORS:
            floors += FLOORS[suite](found)
    return floors


def floors_ns4(rows: list[dict]) -> list[dict]:
    floors = [at_most("ns4: seconds a task, median", float(np.median([r["took_s"] for r in rows])), 0.5)]
    proven = [r["cost_s"] / r["certified_s"] for r in rows if "certified_s" in r]
    if proven:
        floors += [
            at_least(
                "ns4: tasks within 1.01 of what is proven, share", float(np.mean([x <= 1.01 for x in proven])), 0.97
            ),
            at_most("ns4: cost over what is proven, median", float(np.median(proven)), 1.002),
            at_most("ns4: seconds of a certificate, longest", max(r["certify_took_s"] for r in rows), 30),
        ]
    return floors


def floors_ns8(rows: list[dict]) -> list[dict]:
    over = ratios(rows, "neuroshard")
    return [
        at_most("ns8: cost over the bound, mean", float(np.mean([r["cost_s"] / r["bound_s"] for r in rows])), 1.025),
        at_most("ns8: seconds a task, median", float(np.median([r["took_s"] for r in rows])), 0.5),
        at_least("ns8: NeuroShard's cost over ours, geometric mean", geomean(over), 1.02),
        at_most("ns8: tasks where NeuroShard is better, share", float(np.mean([x < 1 - 1e-6 for x in over])), 0.05),
        at_least("ns8: NeuroShard's cost over ours, least", min(over), 0.995),
    ]


def floors_pool(rows: list[dict]) -> list[dict]:
    limits = {
        "856x16 70 %": (1.005, 1.0), "856x16 97 %": (1.02, 1.0), "856x16 97 % long": (1.01, 5.0),
        "856x128 70 %": (1.015, 10.0), "856x64 97 %": (1.05, 20.0), "856x64 97 % short": (math.inf, 2.0),
    }  # fmt: skip
    floors = []
    for r in rows:
        cost, took_s = limits[r["task"]]
        if math.isfinite(cost):
            floors.append(at_most(f"{r['task']}: cost over the bound", r["cost_s"] / r["bound_s"], cost))
        floors.append(
            at_most(f"{r['task']}: seconds to a plan that fits", r["took_s"] if r["fits"] else math.inf, took_s)
        )
    return floors


def floors_torchrec(rows: list[dict]) -> list[dict]:
    mixed = [r for r in rows if r["task"] != "856x16"]
    best = [min(r["torchrec_storage"]["cost_s"], r["torchrec_perf"]["cost_s"]) / r["cost_s"] for r in mixed]
    default = [r["torchrec_storage"]["cost_s"] / r["cost_s"] for r in mixed]
    floors = [
        at_least("torchrec: the better of its plans over ours, least", min(best), 1.0),
        at_least("torchrec: its default plan over ours, mean", float(np.mean(default)), 1.1),
    ]
    for r in rows:
        if r["task"] == "856x16":
            floors.append(
                at_least("torchrec: 856x16, its cost over ours", r["torchrec_storage"]["cost_s"] / r["cost_s"], 1.0)
            )
            floors.append(
                at_least("torchrec: 856x16, its time over ours", r["torchrec_storage"]["took_s"] / r["took_s"], 50)
            )
    return floors


def floors_replan(rows: list[dict]) -> list[dict]:
    return [
        at_most("replan: cost over the bound, worst", max(r["cost_s"] / r["bound_s"] for r in rows), 1.02),
        at_most("replan: share of bytes that move, most", max(r["moved_share"] for r in rows), 0.15),
        at_most("replan: seconds, median", float(np.median([r["took_s"] for r in rows])), 0.05),
    ]


def floors_giant(rows: list[dict]) -> list[dict]:
    floors = []
    for r in rows:
        floors.append(at_most(f"{r['task']}: cost over the bound", r["cost_s"] / r["bound_s"], 1.15))
        floors.append(at_most(f"{r['task']}: seconds", r["took_s"], 25))
    return floors


def floors_wide(rows: list[dict]) -> list[dict]:
    return [at_most(f"{r['task']}: seconds", r["took_s"], 30) for r in rows]


FLOORS = {
    "ns4": floors_ns4, "ns8": floors_ns8, "pool": floors_pool, "torchrec": floors_torchrec, "replan": floors_replan,
    "giant": floors_giant, "wide": floors_wide,
}  # fmt: skip


SMOKE_SECONDS = 0.05  # of effort for a plan
SMOKE_METHODS = ("random", "size", "ldm")


def smoke(args: argparse.Namespace) -> dict[str, list[dict]]:
    """A task of each suite."""
    few = tasks.question(tasks.ns_tables(0, 10, 20, 4 * tasks.GiB), tasks.machine(4, 4 * tasks.GiB))
    small = next(one for one in tasks.LISTS if one.name == "nv_tiny")
    rows = {
        "ns4": [compared("ns4-few", few, SMOKE_SECONDS, SMOKE_METHODS)],
        "lists": [compared(small.name, tasks.listed(small), SMOKE_SECONDS, SMOKE_METHODS)],
        "replan": [replanned(few, make_plan(few, seconds=SMOKE_SECONDS).plan, seed=0)],
    }
    if has_peer("torchrec", args):
        workloads = tasks.ns_tables(1, 4, 8, 4 * tasks.GiB)
        rows["torchrec"] = [beside_torchrec("mixed-few", asked_of_torchrec(workloads, 2), SMOKE_SECONDS)]
    return rows


def smoke_floors(rows: dict[str, list[dict]]) -> list[dict]:
    """Whether plans are what they say, and none is below its bound."""
    every = [row for found in rows.values() for row in found]
    others = [other["cost_s"] for row in every for other in row.get("others", {}).values() if other["cost_s"]]
    return [
        exactly("plans whose cost, memory and bound are right", sum(row["valid"] for row in every), len(every)),
        exactly("plans that fit", sum(row["fits"] for row in every), len(every)),
        exactly("baselines that fit, and cost something", sum(cost > 0 for cost in others), len(others)),
    ]


def main() -> None:
    parser = options("planner", __doc__)
    parser.add_argument("--only", choices=SUITES, action="append")
    args = parsed(parser)
    if args.smoke:
        rows = smoke(args)
    else:
        chosen = args.only or [suite for suite in SUITES if not (args.quick and suite == "torchrec")]
        if "torchrec" in chosen:
            has_peer("torchrec", args)  # said before an hour of other suites, not after it
        rows = {suite: RUN[suite](args.quick) for suite in chosen}
    baselines = {suite: baselines_of(found) for suite, found in rows.items() if found and "others" in found[0]}
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    named = [{"suite": suite, **row} for suite, found in rows.items() for row in found]
    finish("planner", named, floors, args, baselines=baselines)


if __name__ == "__main__":
    main()
