"""Re-planning: what changes is worth its move, and what moves is counted."""

from dataclasses import replace

import numpy as np
import pytest
from from_benchmarks import planner_tasks
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from planning.planner.asked import question

from rowwise import Adam, Plan, RowWiseAdagrad, Sgd, SpecError, Table, Tile, Topology
from rowwise.planning.perf import Access
from rowwise.planning.planner import layouts
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.current_placement import moved_bytes, placement_of_plan
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import NO_UNIT, Placement, PlanRequest
from rowwise.planning.planner.replan import MAX_MOVED, replan

LAYOUTS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "grid", "replicated")
topologies = st.builds(Topology, hosts=st.integers(1, 2), devices=st.integers(1, 3))


@st.composite
def tables_of(draw) -> list[Table]:
    return [
        Table(
            name=f"t{i}",
            rows=draw(st.integers(1, 12)),
            dim=draw(st.sampled_from((4, 8, 13, 16))),
            optimizer=draw(st.sampled_from((Sgd(), Adam(), RowWiseAdagrad()))),
        )
        for i in range(draw(st.integers(1, 4)))
    ]


@st.composite
def plans_of(draw, tables: list[Table], topology: Topology) -> Plan:
    """Layouts on ranks in any order; some tables lower down."""
    tiles: list[Tile] = []
    for table in tables:
        ranks = draw(st.lists(st.integers(0, topology.world - 1), min_size=1, max_size=4, unique=True))
        hosts = draw(st.lists(st.integers(0, topology.hosts - 1), min_size=1, max_size=2))
        ways = (
            layouts.table_wise(table, ranks[0]),
            layouts.row_wise(table, ranks),
            layouts.column_wise(table, ranks),
            layouts.column_wise(table, [ranks[0], *ranks]),
            layouts.row_wise(table, range(topology.world)),
            layouts.grid(table, topology, hosts),
            layouts.replicated(table, range(topology.world)),
        )
        tier = draw(st.sampled_from(("device", "device", "host")))
        tiles += [structs.replace(tile, tier=tier) for tile in draw(st.sampled_from(ways))]
    return Plan(world=topology.world, tiles=tuple(sorted(tiles)))


def moved_cells(old: Plan, new: Plan, tables: list[Table]) -> int:
    """Bytes of rows of `Sgd` tables that are on a rank which had them nowhere."""
    moved = 0
    for table in tables:
        held = np.zeros((2, new.world, table.rows, table.dim), bool)
        for number, plan in enumerate((old, new)):
            for tile in plan.tiles_of(table.name):
                held[number, tile.rank, slice(*tile.rows), slice(*tile.cols)] = True
        moved += 4 * int((held[1] & ~held[0]).sum())
    return moved


@given(st.data())
def test_what_moves_is_what_a_rank_did_not_have(data):
    tables, topology = data.draw(tables_of()), data.draw(topologies)
    tables = [structs.replace(table, optimizer=Sgd()) for table in tables]
    old, new = data.draw(plans_of(tables, topology)), data.draw(plans_of(tables, topology))
    assert moved_bytes(old, new, tables) == moved_cells(old, new, tables)
    assert moved_bytes(old, old, tables) == 0


def small_question(
    tables: list[Table], topology: Topology, pooling: list[float], device_bytes: float = 1e9
) -> PlanRequest:
    access = [Access(pooling=one) for one in pooling]
    return question(tables, topology, device_bytes, access=access, machine="a100-like", batch=64)


@settings(max_examples=30)
@given(st.data())
def test_replanning_is_never_worse_than_keeping_and_says_what_it_moves(data):
    tables, topology = data.draw(tables_of()), data.draw(topologies)
    poolings = st.lists(st.floats(0.1, 5000), min_size=len(tables), max_size=len(tables))
    asked = small_question(tables, topology, data.draw(poolings))
    if data.draw(st.booleans()):
        old = data.draw(plans_of(tables, topology))
        old = structs.replace(old, tiles=tuple(sorted(structs.replace(tile, tier="device") for tile in old.tiles)))
    else:
        old = make_plan(asked, seconds=0.005).plan
    found = replan(small_question(tables, topology, data.draw(poolings)), old, seconds=0.005)
    new = found.planned.plan
    new.validate(tables)
    assert found.new_cost <= found.old_cost * (1 + 1e-9)
    assert found.planned.problem.cost(found.planned.searched.placement) == pytest.approx(found.new_cost, rel=1e-9)
    if not found.recut:
        assert found.moved_share <= MAX_MOVED + 1e-9
    if all(isinstance(table.optimizer, Sgd) for table in tables):
        assert found.moved_bytes == moved_cells(old, new, tables)
    assert found.changed == (old.tiles != new.tiles)


@given(st.data())
def test_a_placement_is_found_again_in_its_plan(data):
    """Whatever the options of the new problem are, the start costs what the plan in force costs."""
    tables, topology = data.draw(tables_of()), data.draw(topologies)
    problem = make_problem(small_question(tables, topology, [1000.0] * len(tables)))
    chosen = [
        data.draw(st.integers(a, b - 1)) for a, b in zip(problem.item_begin, problem.item_begin[1:], strict=False)
    ]
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    begins = {"rank": (0, topology.world), "host": (topology.world, topology.hosts), "all": (problem.units - 1, 1)}
    for option in chosen:
        begin, count = begins[problem.kind_of(option).unit_kind]
        for piece in problem.pieces_of(option):
            unit_N[piece] = begin + data.draw(st.integers(0, count - 1))
    placement = Placement(np.array(chosen, dtype=np.int32), unit_N)
    plan = problem.plan(placement)
    # The same tables at other rates: splits that cannot matter there are no options of that problem.
    other = small_question(tables, topology, [float(data.draw(st.sampled_from((0.001, 1000)))) for _ in tables])
    standing = placement_of_plan(make_problem(other), plan)
    assert not standing.recut
    assert standing.problem.plan(standing.start) == plan
    assert standing.moved_bytes(standing.start) == 0
    full = make_problem(replace(other, constraints=Constraints(layouts={"*": LAYOUTS})))
    assume(len(full.option_kind) == len(problem.option_kind))
    assert standing.problem.cost(standing.start) == pytest.approx(full.cost(placement), rel=1e-12)


def test_a_cut_that_nobody_would_make_any_more_is_kept_and_costs_what_it_costs():
    """Splits of tables that hardly count are left out of a problem; where they are in force, they come back."""
    tables = [Table(name=f"t{i}", rows=100, dim=64, optimizer=Sgd()) for i in range(20)]
    small = Table(name="small", rows=100, dim=8, optimizer=Sgd())
    asked = small_question([*tables, small], Topology(devices=3), [1000.0] * 20 + [0.001])
    tiles = [tile for i, table in enumerate(tables) for tile in layouts.table_wise(table, i % 3)]
    old = Plan(world=3, tiles=tuple(sorted([*tiles, *layouts.column_wise(small, [2, 0])])))
    only = Constraints(layouts={"small": ("column_wise",)})
    kept, whole = make_problem(replace(asked, constraints=only)), make_problem(asked)
    assert not any(whole.kind_of(o).parts > 1 for o in range(int(whole.item_begin[20]), int(whole.item_begin[21])))
    standings = [placement_of_plan(problem, old) for problem in (whole, kept)]
    assert standings[1].problem is kept
    costs = [standing.problem.cost(standing.start) for standing in standings]
    assert costs[0] == pytest.approx(costs[1], rel=1e-12)
    for standing in standings:
        assert standing.problem.plan(standing.start) == old
        assert not standing.recut
        assert standing.moved_bytes(standing.start) == 0


def test_what_no_longer_fits_is_changed():
    tables = [Table(name=f"t{i}", rows=1000, dim=8, optimizer=Sgd()) for i in range(4)]
    topology = Topology(devices=2)
    old = Plan(world=2, tiles=tuple(layouts.table_wise(table, 0)[0] for table in tables))
    found = replan(small_question(tables, topology, [1.0] * 4, 70_000), old)
    assert not found.old_fits
    assert found.moved_bytes == 64_000


def test_tables_come_and_go():
    tables = [Table(name=f"t{i}", rows=100, dim=8, optimizer=Sgd()) for i in range(4)]
    old = Plan(world=2, tiles=tuple(layouts.table_wise(table, i % 2)[0] for i, table in enumerate(tables[:3])))
    found = replan(small_question(tables[1:], Topology(devices=2), [1000.0] * 3), old)
    assert {tile.table for tile in found.planned.plan.tiles} == {"t1", "t2", "t3"}
    assert found.moved_bytes == moved_cells(old, found.planned.plan, tables[1:3])  # a new table comes from nowhere


def test_what_stays_approximate_says_so():
    table = Table(name="a", rows=100, dim=16)
    tiles = layouts.column_wise(table, [0, 1])
    old = Plan(world=2, tiles=tiles, approximate=("a",))
    assert replan(small_question([table], Topology(devices=2), [1.0]), old, steps=1e-9).planned.plan.approximate == (
        "a",
    )


def test_pins_are_kept_whatever_was():
    tables = [Table(name=name, rows=100, dim=8, optimizer=Sgd()) for name in "ab"]
    old = Plan(world=2, tiles=tuple(layouts.table_wise(table, 0)[0] for table in tables))
    asked = small_question(tables, Topology(devices=2), [10.0, 10.0])
    found = replan(replace(asked, constraints=Constraints(pin={"a": (1,)})), old)
    assert found.recut == ("a",)
    assert [tile.rank for tile in found.planned.plan.tiles_of("a")] == [1] * len(found.planned.plan.tiles_of("a"))


def test_mistakes_are_told():
    table = Table(name="a", rows=100, dim=8)
    asked = small_question([table], Topology(devices=2), [1.0])
    with pytest.raises(SpecError, match="4 ranks, the machine"):
        replan(asked, Plan(world=4, tiles=layouts.table_wise(table, 0)))
    with pytest.raises(SpecError, match="50:100 x columns 0:8"):
        replan(asked, Plan(world=2, tiles=layouts.table_wise(structs.replace(table, rows=50), 0)))
    with pytest.raises(SpecError, match="between 0 and 1"):
        replan(asked, Plan(world=2, tiles=layouts.table_wise(table, 0)), most_moved=2)


@pytest.fixture(scope="module")
def pool():
    question = planner_tasks().pool_task(16, 0.7)
    return question, make_plan(question, seconds=0.5).plan


@pytest.mark.slow
def test_an_unchanged_question_changes_nothing(pool):
    question, old = pool
    for _ in range(4):  # a search that a busy machine cut short may have left something to gain
        old = replan(question, old).planned.plan
    found = replan(question, old)
    assert found.planned.plan.tiles == old.tiles
    assert not found.changed
    assert found.moved_bytes == 0
    assert found.new_cost == found.old_cost


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(5))
def test_856_tables_drift_and_few_bytes_move(pool, seed):
    question, old = pool
    factor = np.exp(np.random.default_rng(seed).normal(0, 0.3, 856))
    drifted = [
        structs.replace(w, access=structs.replace(w.access, pooling=w.access.pooling * float(f)))
        for w, f in zip(question.workloads, factor, strict=True)
    ]
    question = replace(question, workloads=tuple(drifted))
    found = replan(question, old)
    assert found.planned.searched.gap <= 0.02
    assert found.moved_share <= 0.15
    assert found.new_cost < found.old_cost
    assert not found.recut
    again = replan(question, old)
    assert again.planned.plan == found.planned.plan
