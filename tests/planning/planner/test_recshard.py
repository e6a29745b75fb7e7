"""RecShard's method beside brute force, beside its program as the paper has it, and beside whole tables."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from from_benchmarks import part
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from planning.planner.asked import question, stored

from rowwise import SpecError, Topology
from rowwise.planning.perf.access import Access
from rowwise.planning.planner.methods.named import run_method
from rowwise.planning.planner.methods.recshard import CUTS, SplitCurve, fill_memory, pin_hottest
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import plan_by_method
from rowwise.planning.planner.replan import replan
from rowwise.tables.spec import Table
from rowwise.tables.store.policy import WAYS

FEW = settings(max_examples=15, deadline=None, derandomize=True)
program = part("recshard_program")
SKEWS = (0.4, 0.8, 1.05, 1.3)


def asked(rows, pooling, skews, *, fill, world=1, tiers=("device", "host")):
    """Tables whose rows take 1 / fill of the devices' memory."""
    tables = [Table(name=f"t{i}", rows=n, dim=32) for i, n in enumerate(rows)]
    access = [Access(pooling=p, zipf_a=a) for p, a in zip(pooling, skews, strict=True)]
    memory = fill * sum(map(stored, tables)) / world
    made = question(tables, Topology(devices=world), memory, access=access, host_bytes=10**12, tiers=tiers)
    if "disk" not in tiers:
        return made
    hardware = structs.replace(made.machine.hardware, host_bytes=0, disk_bytes=10**12)
    machine = structs.replace(made.machine, hardware=hardware)
    return replace(made, machine=machine, model=replace(made.model, hardware=hardware))


def curve(seconds, sizes):
    return SplitCurve.of(np.arange(len(sizes)), np.array(sizes, float), np.array(seconds, float))


@given(
    steps=st.lists(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), min_size=1, max_size=4),
    share=st.floats(0, 1),
)
def test_marginal_gains_are_the_best_cuts_but_for_the_last_step(steps, share):
    """With steps of one byte, no choice of cuts is better; of all choices, by brute force."""
    falling = [sorted(gains, reverse=True) for gains in steps]
    curves = [curve(np.cumsum([100, *(-g for g in gains)]), range(len(gains) + 1)) for gains in falling]
    limit = int(share * sum(map(len, steps)))
    points = fill_memory(curves, range(len(curves)), limit)
    choices = itertools.product(*(range(len(c.bytes_P)) for c in curves))
    best = min(
        sum(c.seconds_P[p] for c, p in zip(curves, choice, strict=True)) for choice in choices if sum(choice) <= limit
    )
    assert sum(c.seconds_P[p] for c, p in zip(curves, points.values(), strict=True)) == pytest.approx(best)
    assert sum(points.values()) <= limit
    assert fill_memory(curves, range(len(curves)), -1) is None


@pytest.mark.slow
@settings(FEW, max_examples=6)
@given(
    tables=st.lists(
        st.tuples(st.integers(2_000, 200_000), st.floats(1, 30), st.sampled_from(SKEWS)), min_size=1, max_size=5
    ),
    fill=st.floats(0.15, 0.8),
)
def test_one_device_is_near_the_program_of_the_paper(tables, fill):
    problem = make_problem(asked(*zip(*tables, strict=True), fill=fill))
    result, best = run_method("recshard", problem), program.optimum_s(problem)
    assert result.cost is not None
    assert best * (1 - 1e-6) <= program.slowest_s(problem, result) <= best * 1.25


@pytest.mark.slow  # the program of the paper takes seconds
@pytest.mark.parametrize("seed", range(4))
def test_devices_are_balanced_as_by_the_program_of_the_paper(seed):
    draw = np.random.default_rng(seed)
    rows, pooling = draw.integers(20_000, 300_000, 9).tolist(), draw.uniform(1, 20, 9).tolist()
    problem = make_problem(asked(rows, pooling, draw.choice(SKEWS, 9).tolist(), fill=0.4, world=2), CUTS[::2])
    result, best = run_method("recshard", problem), program.optimum_s(problem)
    assert best * (1 - 1e-6) <= program.slowest_s(problem, result) <= best * 1.08


@pytest.mark.parametrize("world", [1, 2])
def test_hot_rows_fill_the_memory_and_leave_room_for_a_step(world):
    request = asked(
        [100_000, 400_000, 50_000], [1, 1, 1], [1.05, 1.2, 0.6], fill=0.3, world=world, tiers=("device", "disk")
    )
    made = plan_by_method(request, "recshard")
    tiles = [tile for tile in made.plan.tiles if tile.tier == "disk"]
    assert tiles
    assert max(size[0] for size in made.plan.forecast.memory_bytes) >= 0.85 * made.plan.forecast.limits_bytes[0]
    curves = {w.table.name: unique for w, unique in zip(request.workloads, _distinct(request), strict=True)}
    for tile in tiles:
        window = tile.cache_rows - tile.pinned_rows
        assert window == pytest.approx(min(tile.cache_rows, max(curves[tile.table], WAYS)), rel=0.05)
    assert any(tile.pinned_rows for tile in tiles)
    assert pin_hottest(made.plan, request) == made.plan
    with pytest.raises(SpecError, match="pins rows: expected a new plan by --method recshard"):
        replan(request, made.plan)


def _distinct(request):
    """Expected distinct rows of a batch, by sums over all rows."""
    for workload in request.workloads:
        weight_R = np.arange(1, workload.table.rows + 1.0) ** -workload.access.zipf_a
        yield -np.expm1(request.batch * workload.access.pooling * np.log1p(-weight_R / weight_R.sum())).sum()


def test_split_tables_read_less_from_the_lower_tier_than_whole_tables():
    """At a fifth of the bytes, tables of 1.05: hot rows of all tables, or all rows of some tables."""
    rows = [50_000 * (i + 1) for i in range(6)]
    request = asked(rows, [5] * 6, [1.05] * 6, fill=0.2)
    split = plan_by_method(request, "recshard").plan
    whole = run_method("recshard", make_problem(request, (0.0,)))
    assert split.forecast.step_s < 0.5 * whole.cost


def test_a_table_that_fits_nowhere_has_no_plan():
    request = asked([100_000], [1], [1.0], fill=0.5, tiers=("device",))
    with pytest.raises(SpecError, match="method recshard found no plan that fits"):
        plan_by_method(request, "recshard")
