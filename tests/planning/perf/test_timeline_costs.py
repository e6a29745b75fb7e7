"""Costs of a schedule are found again in its intervals, whatever was recorded of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise.planning.perf.step_program import PROGRAM, ScheduledStage, StageCosts, training_stages
from rowwise.planning.perf.timeline import schedule, step_seconds
from rowwise.planning.perf.timeline_costs import complete_steps, costs_by_step, recorded_costs

MERGED = ("route.send", "reduce.unpack")  # parts that a recording does not tell from others
seconds = st.integers(1, 8).map(lambda eighths: eighths / 8)


@st.composite
def _costs(draw):
    """Costs of all stages; the gather of status ends on all ranks at once."""
    world = draw(st.integers(1, 3))
    by_rank = st.tuples(*[seconds] * world)
    found = {name: draw(by_rank) for name in PROGRAM if name not in MERGED}
    found |= {"status": (draw(seconds),) * world}
    shortest = min(min(found[name]) for name, (resource, _) in PROGRAM.items() if resource == "link")
    return StageCosts(world, found, shortest)


def record(costs, depth, steps=5):
    """The intervals that a run would leave: kinds of stages, each rank's clock from the beginning of its first step."""
    scheduled = schedule(training_stages(costs, depth), steps)
    origin = {one.rank: one.begin_s for one in reversed(scheduled) if one.step == 0 and one.resource == "processor"}
    return [
        ScheduledStage(one.kind, one.resource, one.rank, one.step, one.begin_s - late, one.end_s - late)
        for one in scheduled
        for late in [origin[one.rank]]
        if one.end_s > one.begin_s
    ]


@given(_costs(), st.integers(1, 3))
def test_the_costs_of_a_schedule_are_those_it_was_made_from(costs, depth):
    found = recorded_costs(record(costs, depth))
    for name in PROGRAM:
        assert found.of(name) == pytest.approx(costs.of(name), abs=1e-9), name


@given(st.lists(_costs(), min_size=2, max_size=4), st.integers(1, 3))
def test_steps_that_are_unlike_have_costs_of_their_own(costs_S, depth):
    """Each of them is found again, and they are scheduled as they were."""
    world = min(costs.world for costs in costs_S)
    costs_S = [StageCosts(world, {n: v[:world] for n, v in costs.seconds.items()}) for costs in costs_S]
    stages = training_stages(costs_S[0], depth)
    recorded = [one._replace(name=one.kind) for one in schedule(stages, 6, costs_S) if one.end_s > one.begin_s]
    found_S = costs_by_step(recorded)
    assert len(found_S) == 6
    for step, found in enumerate(found_S):
        for name in PROGRAM:
            assert found.of(name) == pytest.approx(costs_S[step % len(costs_S)].of(name), abs=1e-9), name
    assert schedule(stages, 6, [costs_S[0]]) == schedule(stages, 6)


@given(_costs(), st.integers(1, 3), st.data())
def test_steps_without_all_of_their_ranks_do_not_count(costs, depth, data):
    recorded = record(costs, depth)
    cut = sorted(recorded, key=lambda one: (one.step, one.rank))
    cut = cut[: data.draw(st.integers(0, len(cut) - 1))]
    steps = complete_steps(cut)
    assert steps <= {one.step for one in cut if one.kind == "update"}
    found = recorded_costs(cut)
    assert (found is None) == (not steps)


def test_nothing_recorded_has_no_costs():
    assert recorded_costs([]) is None


def costs_of_one_step(rows):
    return recorded_costs([ScheduledStage(kind, resource, 0, 0, *times) for kind, resource, *times in rows])


def test_transfers_at_once_count_once_and_unknown_stages_are_other():
    rows = [
        ("reduce", "link", 0.0, 3.0),
        ("reduce", "link", 1.0, 4.0),
        ("evaluation", "processor", 4.0, 5.0),
        ("wait", "processor", 5.0, 6.0),
        ("data", "processor", 6.0, 7.0),  # waits for the reader
        ("status", "link", 7.0, 7.5),
        ("update", "processor", 7.0, 8.0),
    ]
    found = costs_of_one_step(rows)
    reductions = {"reduce.early": (3.0,), "reduce.late": (1.5,)}  # a latency as long as status passes beside the first
    assert found.seconds == reductions | {"other": (1.0,), "status": (0.5,), "update": (1.0,)}
    assert found.latency_s == 0.5


def test_buckets_that_are_one_stage_have_one_latency():
    rows = [("reduce", "link", 0.0, 1.0), ("reduce", "link", 0.1, 1.1), ("reduce", "link", 0.2, 1.2)]
    found = costs_of_one_step([*rows, ("update", "processor", 2.0, 3.0)])
    assert found.of("reduce.early") == (pytest.approx(1.1),)
    assert found.of("reduce.late") == (pytest.approx(1.0),)


def test_parts_of_a_stage_that_waits_cut_up():
    rows = [
        ("forward", "processor", 0.0, 1.0),  # beside the vectors
        ("exchange", "processor", 1.0, 2.0),
        ("forward", "processor", 2.0, 4.0),
        ("exchange", "processor", 4.0, 5.0),
        ("wait", "processor", 5.0, 6.0),
        ("exchange", "processor", 6.0, 8.0),
        ("forward", "processor", 8.0, 9.0),
        ("sums of rows", "link", 8.5, 9.0),
        ("update", "processor", 9.0, 10.0),
    ]
    found = costs_of_one_step(rows)
    assert found.of("forward.bottom") == (3.0,)
    assert found.of("forward.rest") == (1.0,)
    assert found.of("exchange.pack") == (1.0,)
    assert found.of("exchange.unpack") == (3.0,)
    assert found.of("status") == (0.5,)


def test_the_period_of_a_recording_is_that_of_its_schedule():
    costs = StageCosts(2, {"lookup": (1.0, 2.0), "exchange.send": (1.0, 1.0), "update": (0.5, 0.5)})
    assert step_seconds(record(costs, 2)) == pytest.approx(3.5)
