"""Every moment is charged once: the parts add up to the whole."""

import statistics
import time
from time import perf_counter

import pytest
import torch
from clicks import make_clicks, make_tables
from hypothesis import given
from hypothesis import strategies as st

from rowwise import DLRM, Embeddings, IdError, Jagged
from rowwise.train import breakdown
from rowwise.train.breakdown import PAUSED, PHASES, Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.settings import Training
from rowwise.train.step import Machinery, step

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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breakdown, "perf_counter", lambda: now[0])
        clock = Breakdown()
        play(script, "other")
        assert clock.seconds() == expected
        assert sum(clock.seconds().values()) == now[0] - 100
        assert clock.training_s() == now[0] - 100 - expected[PAUSED]


def test_of_a_real_clock():
    begin = perf_counter()
    clock = Breakdown()
    with clock.phase("forward"):
        time.sleep(0.01)
        with clock.phase("lookup"):
            time.sleep(0.02)
    with clock.phase(PAUSED), clock.phase("lookup"):
        time.sleep(0.03)
    seconds = clock.seconds()
    assert sum(seconds.values()) == pytest.approx(perf_counter() - begin, abs=2e-3)
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
    wrong = Jagged(
        features=batch.sparse.features, values_N=batch.sparse.values_N + 999, lengths_FB=batch.sparse.lengths_FB
    )
    with pytest.raises(IdError):
        tables(wrong)
    assert clock._inside == ["other"]
    for handle in handles:
        handle.remove()
    before = clock.seconds()["lookup"]
    tables(batch.sparse)
    assert clock.seconds()["lookup"] == before


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
        kind: Machinery.of(model, Clicks(model), Training(), found)
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
