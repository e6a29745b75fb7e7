"""A schedule is what an event simulation gives; a pipelined step is between its busiest resource and the sum of all."""

import heapq
import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import SpecError
from rowwise.planning.perf.step_program import PROGRAM, RESOURCES, StageCosts, StageRef, TimelineStage, training_stages
from rowwise.planning.perf.timeline import (
    WARM_UP,
    exposed_seconds,
    schedule,
    sequential_s,
    steady_step,
    step_seconds,
    training_step_s,
)

seconds = st.integers(0, 8).map(lambda eighths: eighths / 8)  # sums of these are exact
worlds = st.integers(1, 3)
depths = st.integers(1, 4)


@st.composite
def _costs(draw):
    world = draw(worlds)
    by_rank = st.tuples(*[seconds] * world)
    return StageCosts(world, {name: draw(by_rank) for name in PROGRAM})


@st.composite
def _programs(draw):
    """Up to five stages on any resources, each after some of the others, with one look-ahead or none."""
    world, ahead = draw(worlds), draw(st.integers(0, 2))
    stages: list[TimelineStage] = []
    for number in range(draw(st.integers(1, 5))):
        early = number == 0
        back = [StageRef(s.name, draw(st.integers(0, 2))) for s in stages if draw(st.booleans())]
        resource = draw(st.sampled_from(RESOURCES))
        stages.append(
            TimelineStage(
                name=f"s{number}",
                resource=resource,
                seconds_W=draw(st.tuples(*[seconds] * world)),
                after=tuple(back),
                joins=resource == "link",
                ahead=ahead if early else 0,
            )
        )
    return stages


costs = _costs()
programs = _programs()


def simulate(stages, steps):
    """Ends by (stage, step, rank): clocks of ranks that only see events, each resource with a queue of its own."""
    ranks = range(len(stages[0].seconds_W))
    order = [
        (stage, turn + stage.ahead)
        for turn in range(-max(stage.ahead for stage in stages), steps)
        for stage in stages
        if turn + stage.ahead >= 0
    ]
    queues = {(rank, name): [one for one in order if one[0].resource == name] for rank in ranks for name in RESOURCES}
    waiting, busy, done, came = defaultdict(dict), set(), {}, itertools.count()
    events = [(0.0, next(came), None)]
    while events:
        now, _, ended = heapq.heappop(events)
        if ended is not None:
            done[ended] = now
            stage = next(one for one in stages if one.name == ended[0])
            busy.remove((ended[2], stage.resource))
        if events and events[0][0] == now:
            continue  # all that ends now has ended before anything begins
        for (rank, resource), queue in queues.items():
            if (rank, resource) in busy or not queue:
                continue
            stage, step = queue[0]
            needed = [(ref.name, step - ref.steps_back, rank) for ref in stage.after if step >= ref.steps_back]
            if not all(one in done for one in needed):
                continue
            queue.pop(0)
            busy.add((rank, resource))
            if not stage.joins:
                heapq.heappush(events, (now + stage.seconds_W[rank], next(came), (stage.name, step, rank)))
                continue
            met = waiting[stage.name, step]
            met[rank] = now
            if len(met) == len(ranks):
                for one in ranks:
                    end = max(met.values()) + stage.seconds_W[one]
                    heapq.heappush(events, (end, next(came), (stage.name, step, one)))
    assert not any(queues.values())
    return done


def ends(scheduled):
    return {(one.name, one.step, one.rank): one.end_s for one in scheduled}


@given(programs)
def test_any_program_is_scheduled_as_events_happen(stages):
    assert ends(schedule(stages, 4)) == simulate(stages, 4)


@given(costs, depths)
def test_a_training_step_is_scheduled_as_events_happen(given_costs, depth):
    stages = training_stages(given_costs, depth)
    assert ends(schedule(stages, 3)) == simulate(stages, 3)


@given(costs, depths)
def test_resources_are_in_order_and_a_collective_ends_after_its_last_rank_began(given_costs, depth):
    scheduled = schedule(training_stages(given_costs, depth), 3)
    last, begins = {}, defaultdict(list)
    for one in scheduled:
        assert one.begin_s >= last.get((one.rank, one.resource), 0.0)
        last[one.rank, one.resource] = one.end_s
        begins[one.name, one.step].append(one.begin_s)
    assert all(one.end_s >= max(begins[one.name, one.step]) for one in scheduled if one.resource == "link")


@given(costs, depths)
def test_a_step_takes_the_busiest_resource_at_least_and_the_sum_at_most(given_costs, depth):
    took_s = training_step_s(given_costs, depth)
    assert max(map(given_costs.busy_s, RESOURCES)) <= took_s <= sequential_s(given_costs) + 1e-9


@given(costs)
def test_more_depth_is_never_slower(given_costs):
    """From depth 2 on; depth 2 has uneven ranks meet where depth 1 has not: in the middle of a step."""
    took_s = [training_step_s(given_costs, depth) for depth in (2, 3, 4)]
    assert took_s == sorted(took_s, reverse=True)
    alike = StageCosts(given_costs.world, {n: v[:1] * given_costs.world for n, v in given_costs.seconds.items()})
    assert training_step_s(alike, 2) <= training_step_s(alike, 1)


# What is computed while others travel, at any depth, and what is read.
BESIDE = ("data", "forward.bottom", "backward.top", "backward.bottom", "return.unpack", "reduce.unpack")


@given(st.integers(1, 3).flatmap(lambda w: st.tuples(st.just(w), seconds, seconds, seconds)))
def test_without_look_ahead_and_with_nothing_beside_transfers_a_step_is_the_sum(case):
    world, *values = case
    names = [name for name in PROGRAM if name not in BESIDE]
    given_costs = StageCosts(world, {name: (s,) * world for name, s in zip(names, itertools.cycle(values))})
    assert training_step_s(given_costs, 1) == sequential_s(given_costs)


@given(costs, depths, st.sampled_from((0.5, 2.0, 4.0)))
def test_times_scale_with_costs(given_costs, depth, factor):
    scaled = StageCosts(given_costs.world, {n: tuple(factor * s for s in v) for n, v in given_costs.seconds.items()})
    before, after = (ends(schedule(training_stages(one, depth), 3)) for one in (given_costs, scaled))
    assert after == {key: factor * end for key, end in before.items()}


@given(costs, depths)
def test_exposed_seconds_add_up_to_the_step(given_costs, depth):
    scheduled = schedule(training_stages(given_costs, depth), 2 * WARM_UP)
    exposed = exposed_seconds(scheduled, range(WARM_UP, 2 * WARM_UP))
    assert sum(exposed.values()) == pytest.approx(step_seconds(scheduled, WARM_UP - 1), abs=1e-9)


def test_two_ranks_on_one_core_compute_twice_as_long():
    given_costs = StageCosts(2, {"forward.rest": (1.0, 1.0), "exchange.send": (0.5, 0.5)})
    assert training_step_s(given_costs, 2) == 1.5
    assert training_step_s(given_costs, 2, processor_factor=2.0) == 2.5


def test_ids_and_reads_of_the_next_step_are_hidden_behind_this_one():
    one = StageCosts(1, {"route.ids": (2.0,), "prefetch": (3.0,), "forward.rest": (4.0,), "backward.top": (4.0,)})
    assert [training_step_s(one, depth) for depth in (1, 2, 3)] == [13.0, 11.0, 8.0]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (("a", "a"), "'a' appears 2 times"),
        (("a",), "after 'b': no such stage, there are a"),
        (("a", "b"), "after 'b', which the program does later"),
    ],
)
def test_stages_that_cannot_be_scheduled(stages, message):
    program = [
        TimelineStage(name=name, resource="link", seconds_W=(1.0,), after=(StageRef("b"),) if name == "a" else ())
        for name in stages
    ]
    with pytest.raises(SpecError, match=message):
        schedule(program, 1)


def test_costs_of_unknown_stages_and_other_ranks_are_refused():
    with pytest.raises(SpecError, match="'lokup': no such stage"):
        StageCosts(1, {"lokup": (1.0,)})
    with pytest.raises(SpecError, match="'lookup' has 1 ranks"):
        StageCosts(2, {"lookup": (1.0,)})
    with pytest.raises(SpecError, match="least 1"):
        training_stages(StageCosts(1, {}), 0)


@given(programs, st.data())
def test_collectives_of_groups_are_those_of_smaller_worlds(stages, data):
    """Two halves that meet only among themselves are two runs."""
    world = len(stages[0].seconds_W)
    doubled = [replace(s, seconds_W=(*s.seconds_W, *(2 * x for x in s.seconds_W))) for s in stages]
    halves = [replace(s, group_W=(0,) * world + (1,) * world) if s.joins else s for s in doubled]
    slow = [replace(s, seconds_W=tuple(2 * x for x in s.seconds_W)) for s in stages]
    found = ends(schedule(halves, 3))
    alone = ends(schedule(stages, 3)) | {(n, k, r + world): end for (n, k, r), end in ends(schedule(slow, 3)).items()}
    assert found == alone


@given(programs)
def test_one_entry_stands_for_ranks_that_are_alike(stages):
    alike = [replace(s, seconds_W=s.seconds_W[:1]) for s in stages]
    whole = [replace(s, seconds_W=s.seconds_W[:1] * 3) for s in stages]
    assert {key[:2]: end for key, end in ends(schedule(alike, 3)).items()} == {
        key[:2]: end for key, end in ends(schedule(whole, 3)).items()
    }


@given(costs, depths)
def test_a_steady_step_is_the_last_of_a_run_and_its_exposed_times_add_up_to_it(given_costs, depth):
    found = steady_step(training_stages(given_costs, depth), 2 * WARM_UP)
    assert found.step_s <= sequential_s(given_costs) + 1e-9
    if given_costs.world == 1:
        assert sum(found.exposed_s.values()) == pytest.approx(found.step_s)
    for resource in RESOURCES:
        assert found.busy_s[resource] <= given_costs.busy_s(resource) + 1e-9


def test_groups_are_checked():
    one = TimelineStage(name="a", resource="link", seconds_W=(1.0, 1.0), joins=True, group_W=(0,))
    with pytest.raises(SpecError, match=r"'a' has groups \(0,\)"):
        schedule([one], 1)
