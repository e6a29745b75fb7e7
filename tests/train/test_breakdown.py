"""Every moment is charged once: the parts add up to the whole."""

import statistics
import threading
import time
from dataclasses import replace
from functools import partial
from time import perf_counter

import pytest
import torch
from clicks import make_clicks, make_tables
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from train import breakdown_ranks
from trainings import work_of

from rowwise import DLRM, Embeddings, IdError, Plan
from rowwise.parallel.comm.interface import WaitTime
from rowwise.parallel.comm.shared import HAS_SHARED_MEMORY
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.parallel.shard.exchange import BagSetExchange, no_timing
from rowwise.planning.planner import row_wise
from rowwise.train.breakdown import PAUSED, PHASES, Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseSgd, Training
from rowwise.train.step import StepContext, step

moves = st.recursive(
    st.integers(0, 5),  # time goes by
    lambda inside: st.tuples(st.sampled_from((*PHASES[:-1], PAUSED)), st.lists(inside, max_size=4)),
    max_leaves=20,
)


@given(st.lists(moves, max_size=6))
def test_parts_add_up_to_the_whole(script):
    now = [100.0]
    expected = dict.fromkeys((*PHASES, PAUSED), 0.0)

    def play(steps, phase):
        for move in steps:
            if isinstance(move, int):
                now[0] += move
                expected[phase] += move
            else:
                with clock.phase(move[0]):
                    play(move[1], PAUSED if phase == PAUSED else move[0])

    clock = Breakdown(lambda: now[0])
    play(script, "other")
    assert clock.seconds() == expected
    assert sum(clock.seconds().values()) == now[0] - 100
    assert clock.training_s() == now[0] - 100 - expected[PAUSED]


def test_a_timeline_has_no_gap_where_the_run_evaluates():
    now = [5.0]
    clock = Breakdown(lambda: now[0])
    for number in range(1, 5):
        clock.begin_step(number)
        with clock.phase("forward"):
            now[0] += 3
        begin_s = now[0]
        if number in (2, 3):
            with clock.phase(PAUSED):
                now[0] += 100
                with clock.phase("lookup"):
                    now[0] += 200
        with clock.phase("update"):
            now[0] += 1
        clock.add_busy("data", "reader", begin_s, now[0], number + 1)  # also while the run evaluates
    clock.seconds()
    taken = clock.timeline.take_changes()
    found = [one for one in taken if one.resource != "reader"]
    assert [(one.step, one.stage, one.begin_s, one.end_s) for one in found] == [
        (step, stage, 4 * (step - 1) + begin, 4 * (step - 1) + end)
        for step in range(1, 5)
        for stage, begin, end in (("forward", 0, 3), ("update", 3, 4))
    ]
    assert [one.end_s - one.begin_s for one in taken if one.resource == "reader"] == [1, 1, 1]


def test_of_a_real_clock():
    before = perf_counter()
    clock = Breakdown()
    begin = perf_counter()
    with clock.phase("forward"):
        time.sleep(0.01)
        with clock.phase("lookup"):
            time.sleep(0.02)
    with clock.phase(PAUSED), clock.phase("lookup"):
        time.sleep(0.03)
    end = perf_counter()
    seconds = clock.seconds()
    assert end - begin <= sum(seconds.values()) + 1e-9
    assert sum(seconds.values()) <= perf_counter() - before + 1e-9
    assert seconds["forward"] >= 0.01
    assert seconds["lookup"] >= 0.02
    assert seconds[PAUSED] >= 0.03


def test_what_raises_ends_its_phases():
    clock = Breakdown()
    with pytest.raises(KeyError), clock.phase("forward"), clock.phase("lookup"):
        raise KeyError
    before = clock.seconds()
    time.sleep(0.01)
    after = clock.seconds()
    assert after["other"] - before["other"] >= 0.01
    assert (after["forward"], after["lookup"]) == (before["forward"], before["lookup"])


def test_lookups_are_seen_also_those_that_raise():
    tables = Embeddings(make_tables())
    clock = Breakdown()
    handles = clock.watch([tables])
    batch = make_clicks(64)
    with clock.phase("forward"):
        tables(batch.sparse)
    assert clock.seconds()["lookup"] > 0
    wrong = replace(batch.sparse, values_N=batch.sparse.values_N + 999)
    with pytest.raises(IdError):
        tables(wrong)
    assert clock._stack == ["other"]
    for handle in handles:
        handle.remove()
    before = clock.seconds()["lookup"]
    tables(batch.sparse)
    assert clock.seconds()["lookup"] == before


@given(st.lists(st.tuples(st.sampled_from((*PHASES, PAUSED)), st.integers(0, 5), st.integers(0, 9)), max_size=8))
def test_time_spent_waiting_is_charged_to_wait_and_to_nothing_else(script):
    """Whatever phase it is in, and never more than went by; a pause stays a pause."""
    now, waited = [100.0], WaitTime()
    waited.seconds = 7.0
    clock, expected = Breakdown(lambda: now[0], waited), dict.fromkeys((*PHASES, PAUSED), 0.0)
    for phase, passed, wait in script:
        with clock.phase(phase):
            now[0] += passed
            waited.seconds += wait
        told = 0 if phase == PAUSED else min(wait, passed)
        expected[phase] += passed - told
        expected["wait"] += told
    assert clock.seconds() == expected
    assert sum(expected.values()) == now[0] - 100.0


def test_waiting_of_another_thread_is_no_time_of_this_one():
    """A backward on a GPU has a thread of its own, and enters and leaves phases in it; waiting is counted by thread."""
    now, waited = [0.0], WaitTime()
    clock = Breakdown(lambda: now[0], waited)
    waited.add(0.0, 5.0)  # in this thread, before the first phase ends

    def in_backward():
        with clock.phase("return"):
            now[0] += 2.0

    with clock.phase("backward"):
        now[0] += 6.0
        worker = threading.Thread(target=in_backward)
        worker.start()
        worker.join()
        now[0] += 1.0
    found = clock.seconds()
    assert min(found.values()) >= 0
    assert found["return"] == pytest.approx(2.0)
    assert sum(found.values()) == pytest.approx(9.0)


def test_stages_of_sharded_tables(threads):
    """Each is seen on each rank, in one call or several, and nothing is counted twice."""
    threads(1)
    tables, world = make_tables(), 2
    plan = Plan(world=world, tiles=tuple(tile for t in tables for tile in row_wise(t, [0, 1])))

    def on_a_rank(comm, calls):
        sharded = ShardedEmbeddings(tables, plan, comm)
        model = nn.ModuleDict({"tables": sharded})
        clock = Breakdown()
        watches = clock.watch([sharded])
        outside = perf_counter()
        before = clock.seconds()
        begin = perf_counter()
        sharded.forwards_per_batch = calls
        with clock.phase("forward"):
            made = [model["tables"](make_clicks(64, seed=n).sparse).matrix_BS.sum() for n in range(calls)]
        with clock.phase("backward"):
            sum(made).backward()
        with clock.phase("update"):
            sharded.update()
        end = perf_counter()
        seconds = {phase: s - before[phase] for phase, s in clock.seconds().items()}
        assert end - begin <= sum(seconds.values()) + 1e-9
        assert sum(seconds.values()) <= perf_counter() - outside + 1e-9
        seen = ("route", "lookup", "exchange", "forward", "backward", "return", "update")
        assert all(seconds[phase] > 0 for phase in seen), seconds
        assert clock._stack == ["other"]
        for watch in watches:
            watch.remove()
        assert sharded.phase is no_timing
        after = clock.seconds()["route"]
        sharded(make_clicks(64).sparse)
        assert clock.seconds()["route"] == after

    for calls in (1, 3):
        run_threads(world, partial(on_a_rank, calls=calls), timeout_s=60)


def test_gradients_that_travel_back_are_return(threads, monkeypatch):
    """However long the way back takes: none of it is backward."""
    threads(1)
    tables = make_tables()
    plan = Plan(world=2, tiles=tuple(tile for t in tables for tile in row_wise(t, [0, 1])))
    inner = BagSetExchange.start_backward

    def slow(self, *given_):
        time.sleep(0.05)
        return inner(self, *given_)

    monkeypatch.setattr(BagSetExchange, "start_backward", slow)

    def on_a_rank(comm):
        sharded, clock = ShardedEmbeddings(tables, plan, comm), Breakdown()
        clock.watch([sharded])
        vectors = sharded(make_clicks(64).sparse)
        before = clock.seconds()["return"]
        with clock.phase("backward"):
            vectors.matrix_BS.sum().backward()
        return clock.seconds()["return"] - before

    assert all(seconds >= 0.05 for seconds in run_threads(2, on_a_rank, timeout_s=60))


def test_what_is_done_to_dense_parameters_is_backward():
    torch.manual_seed(0)
    model = DLRM(Embeddings(make_tables(64)), 3, bottom=(8, 64), top=(8, 1))
    clock, charged = Breakdown(), []

    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            charged.append(clock._stack[-1])

    work = StepContext.create(model, Clicks(model), Training(), clock)
    work.optimizer.__class__ = Watched
    step(work, [make_clicks(64)], 1)
    assert charged == ["backward"]
    assert clock.seconds()["update"] > 0


@pytest.mark.parametrize("settings", [DenseSgd(), DenseAdagrad(), DenseAdam()])
def test_hooks_and_overrides_of_a_dense_optimizer_run(settings):
    torch.manual_seed(0)
    model = DLRM(Embeddings(make_tables(64)), 3, bottom=(8, 64), top=(8, 1))
    work, seen = work_of(model, optimizer=settings), []
    taken = work.optimizer.step
    work.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    work.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    work.optimizer.step = lambda: (seen.append("own"), taken())
    step(work, [make_clicks(64)], 1)
    assert seen == ["own", "before", "after"]


class Unwatched:
    """A clock that does not look."""

    def phase(self, _name):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.slow
def test_watching_costs_next_to_nothing(threads):
    """A step of some milliseconds, with a clock and without, in turn."""
    threads(1)
    torch.manual_seed(0)
    model = DLRM(Embeddings(make_tables(64)), 3, bottom=(256, 64), top=(256, 128, 1))
    batch = make_clicks(2048)
    clock = Breakdown()
    works = {
        kind: StepContext.create(model, Clicks(model), Training(), found)
        for kind, found in (("without", Unwatched()), ("with", clock))
    }
    for _ in range(4):  # a busy machine may spoil some; what watching costs would be there in each
        with_, without = (statistics.quantiles(taken, n=10)[0] for taken in _taken(works, clock, batch))
        assert without > 1e-3, "the step is too short to say"
        if with_ < 1.01 * without + 2e-5:  # what two runs of the same differ by
            return
    pytest.fail(f"a step takes {with_ * 1e3:.3f} ms with a clock and {without * 1e3:.3f} ms without")


def _taken(works, clock, batch):
    """Seconds of each step, watched and not."""
    taken = {"with": [], "without": []}
    for number in range(1, 301):
        for kind, work in works.items():
            handles = clock.watch(work.tables) if kind == "with" else []
            begin = perf_counter()
            step(work, [batch], number)
            taken[kind].append(perf_counter() - begin)
            for handle in handles:
                handle.remove()
    return taken["with"], taken["without"]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="wants Linux")
def test_stages_of_processes_add_up_to_their_steps():
    """Exchange, wait and all else; who is never late waits, and for no phase is anything counted twice."""
    ranks = run_processes(2, breakdown_ranks.steps, 12, 0.02, timeout_s=60, shared_memory=True)
    for of_rank in ranks:
        for inside, spent, outside in of_rank:
            assert inside <= sum(spent.values()) + 1e-9
            assert sum(spent.values()) <= outside + 1e-9
            assert all(seconds >= -1e-12 for seconds in spent.values())
            assert all(spent[phase] > 0 for phase in ("route", "lookup", "exchange", "wait", "forward", "backward"))
    waits = [statistics.median(spent["wait"] for _, spent, _ in of_rank) for of_rank in ranks]
    assert waits[0] > waits[1]
