"""A learned placement policy beside greedy ones and the search, on tables that it never saw. Whole tables only.

The 856 made-up tables are split in half by a seed: the shipped policy was trained on one half, on 10 to 60 tables and 2
to 8 devices; tasks here are of the other half, some of them larger than any that it was trained on. Costs are those of
the cost model itself, never of the network that the policy was trained by.
"""

import time

import numpy as np

from parts import planner_tasks as tasks
from parts.report import at_most
from rowwise.planning.planner.methods.dreamshard import load_policy, place_by_policy
from rowwise.planning.planner.methods.named import METHODS, run_method
from rowwise.planning.planner.native import NativeProblem
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.problem import PlacementProblem, PlanRequest
from rowwise.planning.planner.search import search

ABOUT = (
    "half of the 856 made-up tables of benchmarks/tables/dlrm856_like_tables.csv, with 4 to 128 columns each, and "
    "halves of columns"
)
SPLIT = 2022
WORLDS = range(2, 9)  # trained on
SETTINGS = ((20, 4), (50, 4), (80, 8), (100, 16))  # tables and devices
FILL = 0.5  # of memory
LARGEST = 1.02  # of the largest table: what a device has at least
GREEDY = ("random", "size", "dim", "lookup", "size-lookup", "ldm")
COST_ONLY = "cost network alone"
SECONDS = 0.2


def halves() -> tuple[np.ndarray, np.ndarray]:
    """Tables to train on, and tables to judge by."""
    shuffled = np.random.default_rng(SPLIT).permutation(len(tasks.pool()))
    return np.split(shuffled, 2)


def training(worlds: range = WORLDS, most: int | None = None) -> list[PlanRequest]:
    """All tables to train on with each number of columns, on every number of devices."""
    known = tasks.pool()
    made = [
        tasks.workload(f"t{c}x{dim}", known[c][0], dim, known[c][1]) for c in halves()[0][:most] for dim in tasks.DIMS
    ]
    plenty = 2 * tasks.size_bytes(made)
    return [tasks.question(made, tasks.machine(world, plenty), layouts=("table_wise",)) for world in worlds]


def held_out(tables: int, devices: int, seed: int) -> PlanRequest:
    """A task of tables that were not trained on, no two alike."""
    known, rng = tasks.pool(), np.random.default_rng([seed, tables, devices])
    chosen, dims = rng.choice(halves()[1], tables, replace=False), rng.choice(tasks.DIMS, tables)
    made = [
        tasks.workload(f"t{i}", known[c][0], int(d), known[c][1])
        for i, (c, d) in enumerate(zip(chosen, dims, strict=True))
    ]
    largest = max(w.table.rows * w.table.row_bytes for w in made)
    limit = max(tasks.size_bytes(made) / devices / FILL, largest * LARGEST)
    return tasks.question(made, tasks.machine(devices, limit), layouts=("table_wise",))


def costs_of(problem: PlacementProblem) -> dict[str, tuple[float | None, float]]:
    """Of each method: what its placement costs, or nothing if it does not fit, and how long it took."""
    found = {}
    for name in METHODS:
        begin_s = time.perf_counter()
        cost = run_method(name, problem).cost
        found[name] = cost, time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    unit_N = place_by_policy(problem, load_policy(), costs_alone=True)
    took_s = time.perf_counter() - begin_s
    found[COST_ONLY] = (None if unit_N is None else NativeProblem(problem).cost(unit_N)[0]), took_s
    return found


def setting(tables: int, devices: int, count: int) -> list[dict]:
    """A row for each method: its cost over the search's, where all methods fit and wherever it fits itself."""
    ours, found = [], []
    for seed in range(count):
        problem = make_problem(held_out(tables, devices, seed))
        searched = search(problem, seconds=SECONDS)
        ours.append(searched.cost if not searched.over else np.nan)
        found.append(costs_of(problem))
    rows = []
    # Methods that know nothing of memory fit so rarely that no task would be left: they are held to those they fit.
    fit = {name: np.array([one[name][0] is not None for one in found]) for name in found[0]}
    common = [name for name, fits in fit.items() if fits.mean() >= 0.5]
    all_fit = np.all([fit[name] for name in common], axis=0)
    for name in found[0]:
        over = np.array([np.nan if one[name][0] is None else one[name][0] for one in found]) / np.array(ours)
        same = all_fit & fit[name]
        rows.append({
            "tables": tables, "devices": devices, "method": name, "tasks": count, "fit": int(fit[name].sum()),
            "compared": int(same.sum()), "over_search": round(float(over[same].mean()), 4) if same.any() else None,
            "over_search_all_it_fits": round(float(over[fit[name]].mean()), 4) if fit[name].any() else None,
            "took_ms": round(float(np.median([one[name][1] for one in found])) * 1e3, 2),
            "over": {seed: round(float(over[seed]), 4) for seed in np.flatnonzero(fit[name]).tolist()},
        })  # fmt: skip
    return rows


def run(tasks_each: int) -> list[dict]:
    return [row for tables, devices in SETTINGS for row in setting(tables, devices, tasks_each)]


def against(rows: list[dict], name: str) -> tuple[float, int]:
    """The policy's mean cost over a method's, on tasks that both fit, and how many these are."""
    by = {row["method"]: row["over"] for row in rows}
    both = by["dreamshard"].keys() & by[name].keys()
    return (float(np.mean([by["dreamshard"][k] / by[name][k] for k in both])) if both else np.nan), len(both)


def floors_of(rows: list[dict]) -> list[dict]:
    """Better than every greedy one in every setting, task by task on average; and it fits as often as any of them."""
    floors = []
    for tables, devices in SETTINGS:
        mine = [row for row in rows if (row["tables"], row["devices"]) == (tables, devices)]
        name = f"calibrate_dreamshard: {tables} tables on {devices}"
        ratios = [ratio for ratio, count in (against(mine, greedy) for greedy in GREEDY) if count]
        fits = {row["method"]: row["fit"] for row in mine}
        floors += [
            at_most(f"{name}, cost over the best greedy one's", max(ratios), 1.0),
            at_most(f"{name}, tasks that more greedy ones fit", max(fits[g] for g in GREEDY) - fits["dreamshard"], 0),
        ]
    return floors
