"""An explanation has the numbers of the problem, and what an alternative would cost is what it does cost."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from planning.planner.asked import question, stored
from planning.planner.small_questions import units_of

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import TIERS
from rowwise.planning.perf.access import Access
from rowwise.planning.planner.alternatives import compute_alternatives
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.explain import explain
from rowwise.planning.planner.explanation import Explanation
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import PlanResult, forecast, make_plan
from rowwise.planning.planner.problem import NO_UNIT, Placement, PlanRequest
from rowwise.planning.planner.search import search
from rowwise.tables.row_optimizers import Adam, RowWiseAdagrad, Sgd
from rowwise.tables.spec import Table, Topology


@st.composite
def questions(draw) -> PlanRequest:
    topology = Topology(hosts=draw(st.integers(1, 3)), devices=draw(st.integers(1, 3)))
    count = draw(st.integers(1, 6))
    tables = [
        Table(
            name=f"t{i}",
            rows=draw(st.integers(1, 50) | st.integers(10**3, 10**6)),
            dim=draw(st.sampled_from((4, 12, 16, 64, 128))),
            optimizer=draw(st.sampled_from((Sgd(), RowWiseAdagrad(), Adam()))),
        )
        for i in range(count)
    ]
    access = [Access(pooling=draw(st.floats(0.1, 50)), zipf_a=draw(st.sampled_from((0.0, 1.1)))) for _ in tables]
    names, ranks = [t.name for t in tables], st.sets(st.integers(0, topology.world - 1), min_size=1)
    pin = {name: tuple(draw(ranks)) for name in names if draw(st.integers(0, 4)) == 0}
    rules = Constraints(pin=pin)
    if count > 1 and not pin and draw(st.booleans()):
        rules = Constraints(together=(tuple(names[:2]),))
    each = sum(map(stored, tables)) / topology.world / draw(st.sampled_from((0.2, 0.6, 0.95)))
    host = draw(st.sampled_from((0, 3))) * sum(map(stored, tables))
    return question(tables, topology, each, access=access, constraints=rules, host_bytes=host)


def planned_or_skipped(asked: PlanRequest) -> PlanResult:
    problem = make_problem(asked)
    searched = search(problem, seconds=0.01)
    assume(not searched.over)
    plan = structs.replace(problem.plan(searched.placement), forecast=forecast(problem, searched))
    return PlanResult(plan, problem, searched)


def moved(planned: PlanResult, option: int, units: np.ndarray) -> Placement:
    """The placement with an item's option changed, and the units of its pieces."""
    problem, placement = planned.problem, planned.searched.placement
    item = int(problem.item_of_O[option])
    choice_I, unit_N = placement.choice_I.copy(), placement.unit_N.copy()
    unit_N[list(problem.pieces_of(int(choice_I[item])))] = NO_UNIT
    choice_I[item] = option
    unit_N[list(problem.pieces_of(option))] = units
    return Placement(choice_I, unit_N)


@pytest.mark.slow
@given(questions())
@settings(max_examples=40, deadline=None)
def test_what_another_option_would_cost_is_what_it_costs(asked):
    planned = planned_or_skipped(asked)
    problem, placement = planned.problem, planned.searched.placement
    cost = problem.cost(placement)
    found = compute_alternatives(problem, placement)
    for option in range(len(problem.option_kind)):
        pieces, units = problem.pieces_of(option), units_of(problem, option)
        if option in placement.choice_I:
            assert found.change_O[option] == 0
            assert (found.unit_N[list(pieces)] == placement.unit_N[list(pieces)]).all()
            continue
        if not units:
            assert np.isinf(found.change_O[option])
            continue
        chosen = found.unit_N[list(pieces)]
        assert set(chosen.tolist()) <= set(units)
        changed = moved(planned, option, chosen)
        assert found.change_O[option] == pytest.approx(problem.cost(changed) - cost, abs=1e-9 * cost)
        over_WM = problem.over_bytes(changed)
        assert found.over_O[option] == over_WM.max()
        if over_WM.any():
            assert over_WM[found.rank_O[option], found.tier_O[option]] == over_WM.max()
        if len(pieces) == 1:
            every = [moved(planned, option, np.array([unit])) for unit in units]
            fits = [one for one in every if problem.fits(one)]
            assert bool(fits) == (found.over_O[option] == 0)
            if fits:
                best = min(problem.cost(one) for one in fits)
                assert found.change_O[option] == pytest.approx(best - cost, abs=1e-9 * cost)


@given(questions())
@settings(max_examples=40, deadline=None)
def test_the_numbers_are_those_of_the_problem(asked):
    planned = planned_or_skipped(asked)
    problem, placement = planned.problem, planned.searched.placement
    facts, sums = explain(planned), problem.sums(placement)
    assert facts.step.seconds == pytest.approx(problem.cost(placement), rel=1e-12)
    assert facts.step.seconds == pytest.approx(planned.plan.forecast.step_s, rel=1e-9)
    assert facts.step.gap == pytest.approx(planned.plan.forecast.gap, abs=1e-9)
    parts = facts.step.forward_s + facts.step.backward_s + problem.phi.constant
    assert facts.step.operators_s == pytest.approx(parts, rel=1e-12)
    assert facts.limits_bytes == asked.limits_bytes
    assert [r.operators_s for r in facts.ranks] == pytest.approx(problem.phi(sums.load_NK).tolist())
    assert [r.links_s for r in facts.ranks] == pytest.approx(sums.link_N.tolist())
    assert [r.memory_bytes for r in facts.ranks] == [tuple(row) for row in sums.bytes_NM.astype(int).tolist()]
    assert {t.name: t.bytes for t in facts.tables} == {w.table.name: stored(w.table) for w in asked.workloads}
    assert sum(t.share for t in facts.tables) == pytest.approx(1)
    for table in facts.tables:
        assert table.ranks == tuple(sorted({tile.rank for tile in planned.plan.tiles_of(table.name)}))
        assert table.reason
    assert Explanation.from_json(facts.to_json()) == facts


@given(questions(), st.sampled_from((80, 100, 160)))
@settings(max_examples=25, deadline=None)
def test_the_text_names_all_and_is_not_too_wide(asked, width):
    facts = explain(planned_or_skipped(asked))
    lines = facts.text(width).splitlines()
    assert all(len(line) <= width for line in lines)
    for table in facts.tables:
        assert any(line.startswith(f"{table.name} ") for line in lines)
    assert f"({facts.step.bound} bound)" in " ".join(facts.text(10**4).split())


def test_an_alternative_says_what_it_is():
    tables = [
        Table(name="a", rows=10**6, dim=64, optimizer=Sgd()),
        Table(name="b", rows=10**6, dim=64, optimizer=Sgd()),
    ]
    facts = explain(make_plan(question(tables, Topology(devices=2), 400e6), seconds=0.05))
    alone = next(t for t in facts.tables if t.name == "a")
    assert alone.layout == "table-wise"
    assert re.fullmatch(r"column-wise, columns in 2: \+[\d.]+ ms", alone.next)
    rules = Constraints(layouts={"*": ("table_wise", "replicated")})
    facts = explain(make_plan(question(tables, Topology(devices=2), 400e6, constraints=rules), seconds=0.05))
    assert re.fullmatch(r"replicated: does not fit, 112\.0 MB over on rank [01]", facts.tables[0].next)


def reason(facts: Explanation, name: str) -> str:
    return next(table.reason for table in facts.tables if table.name == name)


def test_reasons():
    rows = [
        Table(name=name, rows=rows, dim=64, optimizer=Sgd())
        for name, rows in (("big", 10**7), ("a", 10**6), ("b", 10**6))
    ]
    tiny = Table(name="tiny", rows=40, dim=64, optimizer=Sgd())
    access = [Access(pooling=2.0), Access(pooling=30.0), Access(pooling=0.001), Access(pooling=5.0)]
    rules = Constraints(pin={"b": (1,)}, layouts={"a": ("row_wise",)})
    asked = question([*rows, tiny], Topology(devices=4), 1.5e9, access=access, constraints=rules, batch=65536)
    facts = explain(make_plan(asked, seconds=0.2))
    assert reason(facts, "big") == "larger than a device (2.6 GB of 1.5 GB)"
    assert reason(facts, "a") == "the only layout allowed"
    assert reason(facts, "b") == "constraints allow only rank 1"
    assert "a replica moves" in reason(facts, "tiny")


def test_rows_that_went_to_the_host_say_so():
    tables = [Table(name=f"t{i}", rows=10**6, dim=64, optimizer=Sgd()) for i in range(4)]
    facts = explain(make_plan(question(tables, Topology(devices=2), 300e6, host_bytes=10e9), seconds=0.2))
    lower = [table for table in facts.tables if "rows on the host" in table.layout]
    assert lower
    assert all("host" in table.reason or "take less" in table.reason for table in lower)
    assert any(rank.memory_bytes[TIERS.index("host")] for rank in facts.ranks)
    assert "300.0 MB of device and 5.0 GB of host memory of each rank" in " ".join(facts.text().split())


def test_tables_that_stay_together_are_told_apart():
    tables = [Table(name=name, rows=10**5, dim=64, optimizer=Sgd()) for name in "abc"]
    access = [Access(pooling=1.0), Access(pooling=40.0), Access(pooling=5.0)]
    asked = question(tables, Topology(devices=2), 1e9, access=access, constraints=Constraints(together=(("a", "b"),)))
    facts = {table.name: table for table in explain(make_plan(asked, seconds=0.05)).tables}
    assert facts["a"].together == ("b",)
    assert facts["c"].together == ()
    assert facts["b"].operators_s > 10 * facts["a"].operators_s
    assert facts["a"].next == facts["b"].next


def test_one_device():
    facts = explain(make_plan(question([Table(name="a", rows=9, dim=8)], Topology(), 1e9), seconds=0.01))
    assert facts.tables[0].reason == "the machine has one device"
    assert facts.step.links_s == 0
    assert "on 1 device:" in facts.text()


def test_many_ranks_and_tables_are_cut_short():
    tables = [Table(name=f"t{i}", rows=1000 + i, dim=16, optimizer=Sgd()) for i in range(60)]
    facts = explain(make_plan(question(tables, Topology(hosts=5, devices=8), 1e9), seconds=0.05))
    text = facts.text()
    assert "of 40 ranks: the busiest 8, the one in the middle, the least busy 2" in text
    assert "and 40 more tables of" in text
    assert "more tables of" not in facts.text(all_tables=True)


def test_other_files_are_refused():
    with pytest.raises(SpecError, match="explanation of a plan"):
        Explanation.from_json("{}")


def test_a_search_that_was_cut_short_is_told():
    tables = [Table(name=name, rows=10**6, dim=64, optimizer=Sgd()) for name in "abcd"]
    planned = make_plan(question(tables, Topology(devices=4), 2e9, access=[Access(pooling=20.0)] * 4), seconds=0.05)
    problem = planned.problem
    whole_I = problem.item_begin[:-1].copy()
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, np.int32)
    unit_N[problem.option_begin[whole_I]] = 0  # all on one rank
    bad = Placement(whole_I, unit_N)
    searched = dataclasses.replace(planned.searched, placement=bad, cost=problem.cost(bad))
    facts = explain(PlanResult(planned.plan, problem, searched))
    assert all("search longer" in table.reason for table in facts.tables)
