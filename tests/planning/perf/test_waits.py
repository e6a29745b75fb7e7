"""A forecast tells what travels apart from the wait for whoever comes last; narrow wires add what was measured."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from planning.perf.asked import request_of

from rowwise import Plan, Table, Topology
from rowwise.planning.calibrate.wire_costs import KINDS, SHAPES, WireShares, fit_wire_costs
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.exchange import Amounts, NarrowWires, WireCost, waits_s
from rowwise.planning.perf.hardware import Machine, hardware_named, read_hardware
from rowwise.planning.perf.learned import model_of
from rowwise.planning.planner.layouts import table_wise
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.rank_exchange import exchanges_s
from rowwise.tables.spec import Codecs, Wire, WireType

seconds, TWO, XEON = st.floats(0, 1e-2), Topology(devices=2), hardware_named("xeon")
ADDED = WireCost(start_s=1e-4, vector_s=1e-8, float_s=1e-10)
NARROW = structs.replace(
    XEON, exchanges=structs.replace(XEON.exchanges, narrow=NarrowWires(**dict.fromkeys(KINDS, ADDED)))
)
tables = st.tuples(st.integers(10, 10**5), st.sampled_from((4, 16, 64)), st.floats(0.5, 20))


@st.composite
def _questions(draw):
    """Up to six tables on two ranks that have room for them."""
    workloads = tuple(
        Workload(table=Table(name=f"t{k}", rows=rows, dim=dim), access=Access(pooling=pooling))
        for k, (rows, dim, pooling) in enumerate(draw(st.lists(tables, min_size=1, max_size=6)))
    )
    return request_of(workloads, XEON, TWO, batch=draw(st.sampled_from((512, 8192))))


questions = _questions()


def forecast(question, hardware):
    asked = replace(question, machine=Machine(TWO, hardware), model=model_of(hardware, TWO))
    return make_plan(asked, seconds=0.01, prove=False).plan.forecast.stages_s


@given(st.lists(seconds, min_size=1, max_size=5))
def test_nobody_waits_for_longer_than_until_the_last_comes(taken):
    taken_W = np.array(taken)
    waits_W = waits_s(taken_W)
    assert (waits_W >= 0).all()
    assert waits_W[taken_W.argmax()] == 0
    assert taken_W + waits_W == pytest.approx(np.full(len(taken), taken_W.max()))


@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(0, 1e6), seconds), min_size=2, max_size=4), st.integers(1, 10**5)
)
def test_an_exchange_is_its_own_time_and_the_wait(ranks, batch):
    dim_W, ids_W, skew_W = np.array(ranks).T
    amounts = Amounts(dim_W, ids_W, batch, skew_W - skew_W.min())
    network = XEON.exchanges.forward
    assert network.transfer_s(amounts) + waits_s(amounts.skew_W) == pytest.approx(network(amounts))
    assert (network.transfer_s(amounts) > 0).all()


@given(questions, st.sampled_from(("cpu", "xeon")))
def test_after_a_lookup_and_an_update_ranks_are_where_the_last_one_is(question, name):
    stages = {stage: np.array(taken) for stage, taken in forecast(question, hardware_named(name)).items()}
    together_W = stages["lookup"] + stages["update"] + stages["wait"]
    assert together_W == pytest.approx(np.full(2, stages["lookup"].max() + stages["update"].max()))
    assert (stages["exchange"] >= 0).all()


@given(questions)
def test_what_narrow_wires_add_is_nothing_for_floats(question):
    assert forecast(question, NARROW) == forecast(question, XEON)


@given(st.sampled_from(KINDS), st.floats(0, 1e-3), st.integers(1, 10**5), st.integers(1, 256))
def test_prices_of_narrow_wires_add_up(kind, start_s, vectors, dim):
    added = WireCost(start_s=start_s, vector_s=1e-8, float_s=1e-9)
    told = getattr(NarrowWires(**dict.fromkeys(KINDS, added)), kind).seconds(
        3, np.array([vectors]), np.array([vectors * dim])
    )
    assert told == pytest.approx(3 * start_s + vectors * 1e-8 + vectors * dim * 1e-9)


@given(questions, st.sampled_from(WireType), st.sampled_from(WireType))
def test_each_direction_of_a_narrow_wire_adds_its_own(question, forward, backward):
    """By hand, for the same plan: a message each way, and the half that leaves of what ranks make."""
    plan = Plan(world=2, tiles=tuple(t for k, w in enumerate(question.workloads) for t in table_wise(w.table, k % 2)))
    found_s = {}
    for wire in (Wire(), Wire(host=Codecs(forward, backward))):
        model = model_of(NARROW, TWO, wire)
        found_s[wire] = exchanges_s(NARROW.exchanges, plan, replace(question, model=model), np.zeros(2)).total_W
    dim_W = np.array([sum(tile.cols[1] for tile in plan.tiles_on(rank)) for rank in (0, 1)], dtype=float)
    bags_W = np.array([len(plan.tiles_on(rank)) for rank in (0, 1)], dtype=float)
    halves = [(of_W + of_W.mean()) / 4 * question.batch for of_W in (bags_W, dim_W)]
    directions = sum(kind is not WireType.FP32 for kind in (forward, backward))
    added_W = directions * ADDED.seconds(1, *halves)
    assert found_s[Wire(host=Codecs(forward, backward))] == pytest.approx(found_s[Wire()] + added_W)


@pytest.mark.parametrize("world", [2, 4])
def test_prices_are_found_in_what_they_made(world):
    """Whatever prices shares of the exchange in floats were made from."""
    exchanges, even_W = hardware_named("xeon").exchanges, np.ones(world)
    made = dict(
        zip(KINDS, (ADDED, structs.replace(ADDED, float_s=2e-10), structs.replace(ADDED, start_s=0.0)), strict=True)
    )
    shares = []
    for batch, tables, dim in SHAPES:
        amounts = Amounts(even_W * tables * dim, even_W * tables * batch, batch, even_W * 0)
        floats_s = (exchanges.forward.transfer_s(amounts) + exchanges.backward.transfer_s(amounts)).mean()
        vectors = tables * batch * (world - 1) / world
        added = {k: 2 * a.seconds(world - 1, vectors, vectors * dim) / floats_s for k, a in made.items()}
        shares.append(WireShares(batch, tables, dim, added))
    found = fit_wire_costs(exchanges, shares, world)
    for kind, added in made.items():
        for name in WireCost.__struct_fields__:
            assert getattr(getattr(found.narrow, kind), name) == pytest.approx(
                getattr(added, name), rel=0.01, abs=1e-13
            )
    profile = structs.replace(hardware_named("xeon"), exchanges=found)
    assert read_hardware(profile.to_json()) == profile
