"""How well do learned costs predict what is measured, and how good are plans that were searched with them?

    python benchmarks/calibrate.py [--quick | --smoke] [--only sets] [--folder DIR] [--save]

    sets        `rowwise calibrate --minutes 10`, in --folder, where it goes on: what it says of sets that it
                never learned from, beside the noise of its own measurements
    chosen      tasks from the pool of made-up tables: the plan that the search chooses with the profile, run on two
                real processes, beside what was predicted of it
    plans       twelve random plans of one model on two real gloo processes, predicted and measured, beside our plan and
                the baselines' plans, all of them in turns
    dreamshard  the shipped policy on tables that it never saw, beside greedy methods, NeuroShard's and our search

A time is the 20 % quantile over rounds, of the slower rank. The last printed line is one JSON object.

Takes: 40 minutes; --quick 3 minutes
Needs: nothing else
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch
from parts import calibrate_dreamshard
from parts import planner_tasks as tasks
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from scipy.stats import spearmanr

from rowwise.planning.calibrate.steps import StepMeasurement, StepTimes, measure_plans
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.hardware import Hardware, Machine, hardware_named, read_hardware
from rowwise.planning.perf.learned import model_of
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.methods.named import METHODS, run_method
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import forecast, make_plan
from rowwise.planning.planner.problem import NO_UNIT, Placement, PlacementProblem, PlanRequest
from rowwise.planning.planner.search import search
from rowwise.tables.spec import Table, Topology

SECTIONS = ("sets", "chosen", "plans", "dreamshard")
BOUNDED = "networks that keep bounds"
POOL = tasks.DATA / "dlrm856_like_tables.csv"
WORLD = 2
MAX_BYTES = 1 << 30  # of a task's tables
RANDOM_PLANS = 12
SMOKE_SECTIONS = ("chosen", "plans", "dreamshard")  # a calibration of less than 30 s cannot be fitted
PRESET = "xeon"  # whose rates a smoke run goes by


def measure_sets(args: argparse.Namespace) -> list[dict]:
    """As a user would: the command line, and what it leaves."""
    minutes = 1 if args.quick else 10  # a slow machine has to measure the fewest sets that can be fitted
    given = ["--minutes", str(minutes), "--nproc", str(WORLD), "--tables", str(POOL), "--dim", "64"]
    subprocess.run([sys.executable, "-m", "rowwise", "calibrate", str(args.folder), *given], check=True)
    quality = msgspec.json.decode((args.folder / "quality.json").read_bytes())
    return [{key: value for key, value in quality.items() if key not in ("predicted_s", "measured_s")}]


def sets_floors(rows: list[dict]) -> list[dict]:
    (row,) = rows
    found = next(one for one in row["errors"] if one["model"] == BOUNDED)
    raw_most = max(0.10, row["raw_noise"] + 0.03)
    return [
        at_most("sets held out: error, the machine's drift taken out", found["error"], max(0.10, row["noise"] + 0.03)),
        at_most("sets held out: error with drift, beside noise with drift", found["raw_error"], raw_most),
        at_least("sets held out: Kendall's tau", found["tau"], 0.9),
    ]


def task(number: int, hardware: Hardware) -> PlanRequest:
    """Tables of the pool that this machine can hold, and a batch that keeps it busy for some tens of milliseconds."""
    rng, pool = np.random.default_rng((77, number)), tasks.pool()
    made: list[Workload] = []
    for index in range(int(rng.integers(8, 25))):
        rows, access = pool[rng.integers(len(pool))]
        table = Table(name=f"t{index}", rows=min(rows, 2_000_000), dim=int(rng.choice(tasks.DIMS)))
        kept = msgspec.structs.replace(access, active=min(access.active or rows, table.rows))
        if (sum(w.table.rows * w.table.row_bytes for w in made) + table.rows * table.row_bytes) < MAX_BYTES:
            made.append(Workload(table=table, access=kept))
    where = Machine(topology=Topology(devices=WORLD), hardware=hardware)
    batch = int(2 ** rng.uniform(10.5, 12.5)) // WORLD * WORLD
    model = model_of(hardware, where.topology)
    return PlanRequest(workloads=tuple(made), machine=where, model=model, batch=batch, constraints=rules(made))


def model(hardware: Hardware) -> PlanRequest:
    """Tables of one model, small enough for many plans to be in memory together, with work for tens of milliseconds."""
    rng, made = np.random.default_rng(3), []
    for index in range(20):
        rows, dim = int(10 ** rng.uniform(3, 5.3)), int(rng.choice((16, 32, 64)))
        access = Access(pooling=round(float(np.exp(rng.normal(1.2, 1.0))), 2), zipf_a=float(rng.uniform(0.4, 1.2)))
        made.append(Workload(table=Table(name=f"t{index}", rows=rows, dim=dim), access=access))
    where = Machine(topology=Topology(devices=WORLD), hardware=hardware)
    costs = model_of(hardware, where.topology)
    return PlanRequest(workloads=tuple(made), machine=where, model=costs, batch=8192, constraints=rules(made))


def rules(workloads: list[Workload]) -> Constraints:
    """Whole rows or whole columns: row-wise optimizer state of columns has to be agreed on, which is not modelled."""
    layouts = ("table_wise", "row_wise")
    return Constraints(layouts={w.table.name: layouts for w in workloads})


def profile(args: argparse.Namespace) -> Hardware:
    if args.smoke:
        return hardware_named(PRESET)
    return read_hardware((args.folder / "machine.json").read_bytes())


def measure_chosen(args: argparse.Namespace) -> list[dict]:
    hardware, rows = profile(args), []
    for number in range(1 if args.smoke else 2 if args.quick else 12):
        question = task(number, hardware)
        planned = make_plan(question, seconds=0.5)
        (step,) = measure_plans(
            StepMeasurement(question.workloads, (planned.plan,), question.batch, rounds=args.rounds)
        )
        rows.append({"task": number, "tables": len(question.workloads), **compared(planned.plan.forecast, step)})
        show(rows[-1])
    return rows


def compared(expected, step: StepTimes) -> dict:
    return {
        "predicted_ms": expected.expected_s * 1e3,
        "cost_ms": expected.step_s * 1e3,
        "measured_ms": step.seconds * 1e3,
        "off": abs(expected.expected_s - step.seconds) / step.seconds,
        "noise": step.noise,
        "predicted_stages_ms": {k: [1e3 * s for s in v] for k, v in expected.stages_s.items()},
        "measured_stages_ms": {k: [1e3 * s for s in v] for k, v in step.stages_s.items()},
    }


def chosen_floors(rows: list[dict]) -> list[dict]:
    off = float(np.median([row["off"] for row in rows]))
    return [at_most("chosen plans: median error of the prediction", off, 0.07)]


def measure_plans_of_a_model(args: argparse.Namespace) -> list[dict]:
    """All plans in the same processes, in turns."""
    question = model(profile(args))
    problem = make_problem(question)
    rng = np.random.default_rng(12)
    plans = {f"random {k}": spread_out(problem, rng) for k in range(2 if args.smoke else RANDOM_PLANS)}
    found = search(problem, seconds=0.5)
    plans["ours"] = found.placement
    for name in METHODS:
        result = run_method(name, problem)
        if result.cost is not None and name != "random":
            placed = placement_of(problem, result)
            if placed is not None:
                plans[name] = placed
    made = {name: problem.plan(placement) for name, placement in plans.items()}
    order = StepMeasurement(question.workloads, tuple(made.values()), question.batch, rounds=args.rounds)
    steps = measure_plans(order, shared_memory=False)
    rows = []
    for (name, placement), step in zip(plans.items(), steps, strict=True):
        searched = replace(found, placement=placement, cost=problem.cost(placement))
        rows.append({"plan": name, **compared(forecast(problem, searched), step)})
        show(rows[-1])
    return rows


def spread_out(problem: PlacementProblem, rng: np.random.Generator) -> Placement:
    """As random as plans get: how even, and how many tables have their rows spread, is drawn once for each plan."""
    lean, cut = rng.uniform(0.05, 0.95), rng.uniform(0, 1)
    begins = zip(problem.item_begin[:-1], problem.item_begin[1:], strict=True)
    choice_I = np.array([first if rng.random() > cut else last - 1 for first, last in begins], np.int32)
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, np.int32)
    for option in choice_I:
        for piece in problem.pieces_of(int(option)):
            whole = problem.kind_of(int(option)).unit_kind == "rank"
            unit_N[piece] = int(rng.random() > lean) if whole else problem.units - 1
    return Placement(choice_I, unit_N)


def placement_of(problem: PlacementProblem, result) -> Placement | None:
    """Baselines give pieces; each item's are those of one option, unless columns were halved unevenly."""
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, np.int32)
    unit_N[result.piece_S] = result.rank_S
    options = problem.option_of_N[result.piece_S]
    items = problem.item_of_O[options]
    if len(set(items.tolist())) != len(problem.members) or len(items) != len(problem.members):
        return None
    choice_I = np.zeros(len(problem.members), np.int32)
    choice_I[items] = options
    return Placement(choice_I, unit_N)


def plans_floors(rows: list[dict]) -> list[dict]:
    some = [row for row in rows if row["plan"].startswith("random")]
    rank = float(spearmanr([r["predicted_ms"] for r in some], [r["measured_ms"] for r in some]).statistic)
    ours = next(row for row in rows if row["plan"] == "ours")
    others = [row for row in rows if row["plan"] in METHODS]
    best = min(others, key=lambda row: row["measured_ms"])
    noise = float(np.median([row["noise"] for row in rows]))
    ratio = ours["measured_ms"] / best["measured_ms"]
    return [
        at_least("random plans: Spearman's rank correlation of predicted and measured", rank, 0.8),
        at_most(f"our plan over the best baseline's ({best['plan']}), measured; noise {noise:.3f}", ratio, 1 + noise),
    ]


def measure_dreamshard(args: argparse.Namespace) -> list[dict]:
    rows = calibrate_dreamshard.run(1 if args.smoke else 4 if args.quick else 20)
    for row in rows:
        show(row)
    return rows


MEASURES = {
    "sets": (measure_sets, sets_floors),
    "chosen": (measure_chosen, chosen_floors),
    "plans": (measure_plans_of_a_model, plans_floors),
    "dreamshard": (measure_dreamshard, calibrate_dreamshard.floors_of),
}


def smoke_floors(rows: list[dict]) -> list[dict]:
    """What was predicted and measured is more than nothing; times are not asked."""
    timed = [row for row in rows if "measured_ms" in row]
    counts = Counter(row["section"] for row in rows)
    return [
        exactly("rows of chosen", counts["chosen"], 1),
        at_least("plans beside random ones, and those of baselines", counts["plans"], 4),
        exactly("plans with times, predicted and measured", sum(r["predicted_ms"] > 0 for r in timed), len(timed)),
    ]


def main() -> None:
    parser = options("calibrate", __doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="of the sections")
    parser.add_argument("--folder", type=Path, help="of the calibration: a new one, unless told")
    args = parsed(parser)
    torch.set_num_threads(1)
    args.rounds = 2 if args.smoke else 9 if args.quick else 40
    only = args.only or (SMOKE_SECTIONS if args.smoke else SECTIONS)
    rows, floors = [], []
    with tempfile.TemporaryDirectory() as made:
        args.folder = args.folder or Path(made) / "calibration"
        measured = args.smoke or "sets" in only or (args.folder / "machine.json").exists()
        if not measured and {"chosen", "plans"} & set(only):
            parser.error("--only chosen or plans needs --folder with a profile, or sets")
        for section in only:
            measure, judge = MEASURES[section]
            found = measure(args)
            rows += [{"section": section, **row} for row in found]
            floors += [] if args.smoke else judge(found)
    floors = smoke_floors(rows) if args.smoke else floors
    finish("calibrate", rows, floors, args)


if __name__ == "__main__":
    main()
