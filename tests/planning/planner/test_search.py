"""The search against every placement there is; what C computes against numpy; bounds that nothing ever beats."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from from_benchmarks import planner_tasks
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from msgspec import structs
from planning.perf.networks import profile
from planning.planner.asked import question
from planning.planner.small_questions import count_placements, placements, questions, random_placement

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.planning.perf.learned import LearnedModel
from rowwise.planning.perf.memory import FLOAT_bytes, memory_bytes
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.planner.bound import OptionTotals, linear_bound, threshold_bound
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.infeasible import InfeasibleError
from rowwise.planning.planner.kinds import PlacementKind
from rowwise.planning.planner.layouts import LAYOUTS
from rowwise.planning.planner.machines import machine_named
from rowwise.planning.planner.methods.named import METHODS, run_method
from rowwise.planning.planner.milp import certify
from rowwise.planning.planner.native import AnnealingEffort, Homes, NativeProblem
from rowwise.planning.planner.options import TableArrays, make_problem, price_pieces
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import PlanRequest
from rowwise.planning.planner.search import min_split_options, search, search_best
from rowwise.tables.row_optimizers import RowWiseAdagrad
from rowwise.tables.spec import Table, Topology, state_width

FEW = settings(max_examples=25, deadline=None)
SLIGHTLY = 1e-9


@FEW
@given(asked=questions(), seed=st.integers(0, 99))
def test_c_costs_what_numpy_does(asked, seed):
    problem, rng = make_problem(asked), np.random.default_rng(seed)
    for _ in range(5):
        placement = random_placement(problem, rng)
        cost, over = NativeProblem(problem).cost(placement.unit_N)
        assert cost == pytest.approx(problem.cost(placement), rel=1e-12)
        assert (over == 0) == problem.fits(placement)


@FEW
@given(asked=questions(tiers=True), seed=st.integers(0, 99), form=st.sampled_from(("scaled", "published")))
def test_c_evaluates_networks_as_numpy_does(asked, seed, form):
    learned = with_networks(asked, profile(seed, form, bounded=seed % 2 == 0))
    test_c_costs_what_numpy_does.hypothesis.inner_test(learned, seed)


@settings(max_examples=15, deadline=None)
@given(asked=questions(tables=3), seed=st.integers(0, 99), form=st.sampled_from(("scaled", "published")))
def test_bounds_hold_for_networks_whose_weights_are_not_negative(asked, seed, form):
    problem = make_problem(with_networks(asked, profile(seed, form)))
    assume(count_placements(problem) <= 20_000)
    best = min((problem.cost(p) for p in placements(problem) if problem.fits(p)), default=np.inf)
    found = search(problem, seconds=0.05)
    assert found.bound.cost <= best * (1 + SLIGHTLY)
    if np.isfinite(best):
        assert best * (1 - SLIGHTLY) <= found.cost <= best * 1.02


def test_networks_with_weights_below_zero_prove_nothing():
    asked = question([Table(name="a", rows=1000, dim=8), Table(name="b", rows=10, dim=8)], Topology(devices=2), 10**6)
    asked = with_networks(asked, profile(3, "published", bounded=False))
    planned = make_plan(asked, seconds=0.01)
    assert planned.plan.forecast.bound_s is None
    with pytest.raises(SpecError, match="convex, so no bound"):
        make_plan(asked, seconds=0.01, certify_s=1.0)


@FEW
@given(asked=questions(), seed=st.integers(0, 9))
def test_the_best_few_are_different_and_in_order(asked, seed):
    problem = make_problem(asked)
    found = search_best(problem, 4, seconds=0.01, seed=seed, prove=False)
    costs = [one.cost for one in found]
    assert 1 <= len(found) <= 4
    assert costs == sorted(set(costs))
    assert costs[0] == search(problem, seconds=0.01, seed=seed, prove=False).cost
    for one in found:
        assert problem.cost(one.placement) == pytest.approx(one.cost, rel=1e-9)


def with_networks(asked, hardware):
    memory = asked.machine.hardware
    hardware = structs.replace(
        memory, kernels=hardware.kernels, launch_s=hardware.launch_s, device_bytes=memory.device_bytes
    )
    machine = structs.replace(asked.machine, hardware=hardware)
    return replace(asked, machine=machine, model=LearnedModel.of(hardware, machine.topology))


@FEW
@given(asked=questions(tiers=True), seed=st.integers(0, 99))
def test_annealing_keeps_what_it_is_told_and_never_gets_worse(asked, seed):
    problem = make_problem(asked)
    native, start = NativeProblem(problem), random_placement(problem, np.random.default_rng(seed))
    effort = AnnealingEffort(moves=2000, seed=seed)
    found = native.anneal(start, effort)
    cost, over = native.cost(start.unit_N)
    assert (found.over, found.cost) <= (over, cost * (1 + SLIGHTLY)) or found.over < over
    assert native.cost(found.placement.unit_N) == pytest.approx((found.cost, found.over), rel=1e-9, abs=1e-12)
    again = native.anneal(start, effort).placement
    assert np.array_equal(again.unit_N, found.placement.unit_N)
    for item, option in enumerate(found.placement.choice_I):
        units = found.placement.unit_N[list(problem.pieces_of(int(option)))]
        assert problem.item_begin[item] <= option < problem.item_begin[item + 1]
        rule = problem.rule_I[item]
        assert rule < 0 or problem.allowed_RU[rule, units].all()
    taken = np.concatenate([list(problem.pieces_of(int(option))) for option in found.placement.choice_I])
    assert sorted(taken) == sorted(np.flatnonzero(found.placement.unit_N >= 0))


@settings(max_examples=15, deadline=None)
@given(asked=questions(tables=3))
def test_the_search_finds_the_best_of_all_placements_and_no_bound_is_above_it(asked):
    problem = make_problem(asked)
    assume(count_placements(problem) < 4000)
    costs = [problem.cost(placement) for placement in placements(problem) if problem.fits(placement)]
    searched = search(problem, seconds=0.1)
    threshold = threshold_bound(problem)
    linear = linear_bound(problem, threshold) if np.isfinite(threshold.cost) else threshold
    if not costs:
        assert searched.over > 0
        return
    best = min(costs)
    assert not searched.over
    assert searched.cost == pytest.approx(best, rel=1e-6)
    assert threshold.cost <= best * (1 + SLIGHTLY)
    assert threshold.cost <= linear.cost * (1 + SLIGHTLY)
    assert linear.cost <= best * (1 + SLIGHTLY)
    proven = certify(problem, searched, 5.0)
    assert proven.bound.cost <= best * (1 + SLIGHTLY)
    assert proven.gap <= max(searched.gap, 1e-12)


@FEW
@given(asked=questions(tables=1, tiers=True), seed=st.integers(0, 99))
def test_no_placement_with_lower_tiers_costs_less_than_its_bound(asked, seed):
    problem, rng = make_problem(asked), np.random.default_rng(seed)
    bound = linear_bound(problem, threshold_bound(problem))
    every = placements(problem) if count_placements(problem) < 2000 else iter(())
    some = (random_placement(problem, rng) for _ in range(50))
    for placement in itertools.chain(every, some):
        assert not problem.fits(placement) or problem.cost(placement) >= bound.cost * (1 - SLIGHTLY)


@FEW
@given(asked=questions(tables=3, tiers=True), parts=st.integers(1, 7), layout=st.sampled_from(LAYOUTS))
def test_pieces_are_priced_as_if_each_was_alone(asked, parts, layout):
    columns, curves = TableArrays.of(asked), Curves.of(asked.workloads, asked.batch)
    for table in range(len(asked.workloads)):
        kind = PlacementKind(layout, min(parts, int(columns.blocks_T[table])) if layout.cuts_columns else 1)
        shards = columns.shards(kind, np.array([table]), asked)
        priced = price_pieces(asked, columns, curves, kind, np.array([table]))
        assert np.array_equal(priced.load_NK, asked.model.loads(shards, curves))
        assert np.array_equal(priced.link_N, asked.model.links_s(shards, curves))
        assert np.array_equal(priced.bytes_NM, memory_bytes(shards, curves, asked.buffers))


def test_annealing_ends_after_its_work_or_its_time():
    """Pieces on many ranks take more work to move, and count as more moves."""
    tables = [Table(name=f"t{i}", rows=100_000, dim=8) for i in range(6)]
    access = [Access(pooling=20.0, zipf_a=0.9)] * len(tables)
    only = Constraints(layouts={"*": ("table_row_wise",)})
    problem = make_problem(question(tables, Topology(hosts=2, devices=32), 1e9, access=access, constraints=only))
    native, start = NativeProblem(problem), random_placement(problem, np.random.default_rng(0))
    worked = native.anneal(start, AnnealingEffort(moves=20_000))
    assert worked.moves < 20_000
    assert not worked.out_of_time
    late = native.anneal(start, AnnealingEffort(moves=20_000, limit_s=0.0))
    assert late.moves == 1024
    assert late.out_of_time


@pytest.mark.slow
def test_a_few_huge_tables_on_many_devices_are_near_their_bound():
    """Pieces of columns alone leave a third of memory empty. The budget is a fifth of the benchmark's."""
    machine = machine_named("16x8xzionex")
    model, tiers = Roofline(machine.hardware, machine.topology), frozenset({"device", "host"})
    asked = PlanRequest(
        workloads=tuple(planner_tasks().model_f(64)), machine=machine, model=model, batch=65536, tiers=tiers
    )
    planned = make_plan(asked, seconds=4.0)
    assert planned.searched.gap < 0.35
    assert planned.searched.over == 0


@FEW
@given(asked=questions(tables=6, tiers=True))
def test_a_plan_is_valid_and_takes_the_memory_that_it_says(asked):
    try:
        planned = make_plan(asked, seconds=0.02)
    except InfeasibleError:
        reject()
    plan, forecast = planned.plan, planned.plan.forecast
    tables = {w.table.name: w.table for w in asked.workloads}
    plan.validate(list(tables.values()))
    assert type(plan).from_json(plan.to_json()) == plan
    device = [0] * plan.world
    for tile in plan.tiles:
        table = tables[tile.table]
        share = (tile.cols[1] - tile.cols[0]) / table.dim
        rows = tile.rows[1] - tile.rows[0] if tile.tier == "device" else tile.cache_rows
        device[tile.rank] += rows * (table.row_bytes + FLOAT_bytes * state_width(table)) * share
    for rank, used in enumerate(forecast.memory_bytes):
        assert all(size <= limit for size, limit in zip(used, forecast.limits_bytes, strict=True))
        assert device[rank] <= used[0] * (1 + SLIGHTLY) + 64
    assert forecast.bound_s <= forecast.step_s * (1 + SLIGHTLY)
    constraints = asked.constraints
    for name, ranks in constraints.pin.items():
        assert {tile.rank for tile in plan.tiles_of(name)} <= set(ranks)
    for group in constraints.together:
        held = [[tile.rank for tile in plan.tiles_of(name)] for name in group]
        assert all(ranks == held[0] for ranks in held)


@FEW
@given(asked=questions(tables=10))
def test_methods_say_what_their_plans_cost_and_do_not_beat_the_bound(asked):
    problem = make_problem(asked)
    bound = threshold_bound(problem)
    for name in METHODS:
        found = run_method(name, problem)
        if found.cost is None:
            continue
        load = np.zeros((problem.topology.world, problem.phi.width))
        link, used = np.zeros(len(load)), np.zeros((len(load), len(problem.limit_M)))
        np.add.at(load, found.rank_S, problem.pieces.load_NK[found.piece_S])
        np.add.at(link, found.rank_S, problem.pieces.link_N[found.piece_S])
        np.add.at(used, found.rank_S, problem.pieces.bytes_NM[found.piece_S])
        assert found.cost == pytest.approx(problem.phi(load).max() + link.max(), rel=1e-9)
        assert (used <= problem.limit_M).all()
        assert found.cost >= bound.cost * (1 - SLIGHTLY)


def test_effort_and_seed_decide_the_plan(question_of_ten):
    one, two = (make_plan(question_of_ten, seconds=0.05, seed=3) for _ in range(2))
    assert one.plan == two.plan
    assert make_plan(question_of_ten, seconds=0.05).searched.moves > 10_000


def test_homes_hold_pieces_back(question_of_ten):
    problem = make_problem(question_of_ten)
    start = search(problem, seconds=0.02).placement
    home = np.where(start.unit_N >= 0, (start.unit_N + 1) % problem.topology.world, 0).astype(np.int32)
    homes = Homes(home, problem.pieces.bytes_NM[:, 0].copy())
    dear = NativeProblem(problem, homes).anneal(start, AnnealingEffort(moves=50_000, bytes_price=1.0)).placement
    at_home = dear.unit_N == home
    assert at_home[dear.unit_N >= 0].mean() > 0.9


@pytest.fixture
def question_of_ten():
    tables = [Table(name=f"t{i}", rows=1000 * (i + 1) ** 3, dim=32) for i in range(10)]
    access = [Access(pooling=1 + i % 4, zipf_a=0.9) for i in range(10)]
    only = Constraints(layouts={"*": ("table_wise", "column_wise")})
    return question(tables, Topology(devices=4), 1e9, access=access, constraints=only)


@pytest.mark.slow
def test_hot_rows_on_the_device_leave_few_accesses_to_the_host():
    """In simulated batches, several times fewer rows come from the host than by the best plan of whole tables."""
    tables = [Table(name=f"t{i}", rows=200_000 * (1 + i % 3), dim=32) for i in range(9)]
    access = [Access(pooling=4 + i % 5, zipf_a=1.05 + 0.05 * (i % 4), zipf_q=5) for i in range(9)]
    stored = sum(t.rows * (t.row_bytes + 4) for t in tables)
    asked = question(tables, Topology(devices=2), 0.15 * stored, access=access, host_bytes=4 * stored)
    mixed = make_plan(asked, seconds=0.3).plan
    problem = make_problem(asked, cached=(0.0,))
    searched = search(problem, seconds=0.3)
    whole = problem.plan(searched.placement)
    assert mixed.forecast.step_s < searched.cost
    rng, fetched = np.random.default_rng(0), {}
    for name, plan in (("mixed", mixed), ("whole", whole)):
        fetched[name] = 0
        for table, how in zip(tables, access, strict=True):
            weights = (np.arange(1, table.rows + 1) + how.zipf_q) ** -how.zipf_a
            ids = rng.choice(table.rows, int(how.pooling * 4096), p=weights / weights.sum())
            tile = plan.tiles_of(table.name)[0]
            if tile.tier == "host":
                share = tile.cache_rows / (tile.rows[1] - tile.rows[0])
                fetched[name] += int((ids >= share * table.rows).sum())
    assert fetched["mixed"] * 2 < fetched["whole"]


@pytest.mark.few(1)
@pytest.mark.parametrize("fill", [0.5, 0.8])
def test_memory_of_two_tiers_that_is_nearly_full_is_packed(fill):
    """Neither tier holds the tables alone, and the cheapest layouts leave gaps."""
    rng, machine = np.random.default_rng(0), machine_named("2x4xzionex:device=1GB,host=8GB")
    room_bytes = 8 * 1e9 + 2 * 8e9
    rows = rng.lognormal(0, 1.5, 120)
    rows = np.minimum((rows / rows.sum() * fill * room_bytes / 132).astype(int) + 1, int(0.5e9 * 8 / 132))
    workloads = [
        Workload(
            table=Table(name=f"t{k}", rows=int(n), dim=32, optimizer=RowWiseAdagrad()), access=Access(pooling=20.0)
        )
        for k, n in enumerate(rows)
    ]
    model, tiers = Roofline(machine.hardware, machine.topology), frozenset({"device", "host"})
    asked = PlanRequest(workloads=tuple(workloads), machine=machine, model=model, batch=4096, tiers=tiers)
    assert search(make_problem(asked), seconds=0.1, prove=False).over == 0


def test_items_are_split_as_little_as_bounds_allow(question_of_ten):
    problem = make_problem(question_of_ten)
    totals = OptionTotals.of(problem)
    whole = min_split_options(problem, totals, 1.0, 1.0)
    assert all(problem.kind_of(int(option)).parts == 1 for option in whole)
    tight = min_split_options(problem, totals, float(totals.phi_O.min()), float(totals.link_O[totals.link_O > 0].min()))
    assert any(problem.kind_of(int(option)).parts > 1 for option in tight)
