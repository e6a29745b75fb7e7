"""Busy time of resources beside the exposed time of the main thread, and ten steps of both in timeline.csv."""

import io
import itertools
import json
import time
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranked import Ranked
from rich.console import Console
from trainings import Killed, World, fast, read_csv

from rowwise import Adam, Jagged, Plan, Table
from rowwise.base.quantity import SPACE
from rowwise.cli.console import show_result
from rowwise.parallel.comm.group import PendingCollective, ReceivedTensor, TransportComm
from rowwise.parallel.comm.interface import TransferObserver, WaitTime
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.plan import Tile
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.recipes.run_result import RunResult
from rowwise.train.breakdown import BESIDE, PAUSED, PHASES, Breakdown
from rowwise.train.settings import Log, Saving
from rowwise.train.stages import PhaseTime
from rowwise.train.timeline import LAST, STEPS

DELAY_S = 0.004
COLUMNS = ["step", "rank", "resource", "stage", "begin_s", "end_s"]


class Delayed:
    """A transport whose data arrive a fixed time after this rank's call, unless those of others arrive later."""

    def __init__(self, transport):
        self._transport, self.waited = transport, transport.waited

    def start(self, call, send_N):
        arrives_s = time.perf_counter() + DELAY_S
        return PendingCollective(partial(self._finish, self._transport.start(call, send_N), arrives_s))

    def _finish(self, pending, arrives_s):
        received, arrived_s = pending.finish()
        time.sleep(max(0.0, arrives_s - time.perf_counter()))
        return ReceivedTensor(received, max(arrived_s, arrives_s))

    def split(self, groups, group):
        return Delayed(self._transport.split(groups, group))

    def close(self):
        self._transport.close()


def delayed(comm):
    return TransportComm(Delayed(comm.transport), comm.topology, comm.rank)


def intervals(folder):
    """Lines of timeline.csv with numbers as numbers."""
    found = read_csv(folder / "timeline.csv")
    assert list(found[0]) == COLUMNS
    numbers = {"step": int, "rank": int, "begin_s": float, "end_s": float}
    return [{key: numbers.get(key, str)(value) for key, value in row.items()} for row in found]


def trained(world, ranks=2, wrap=delayed):
    net = world.net()
    run_threads(ranks, lambda comm: world.on(wrap(comm), net).run(), 60)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("time"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("enter"), st.sampled_from((*PHASES[:-1], PAUSED)), st.none()),
        st.tuples(st.just("leave"), st.none(), st.none()),
        st.tuples(st.just("step"), st.none(), st.none()),
        st.tuples(st.just("ahead"), st.sampled_from(("route", "data")), st.integers(1, 3)),
    ),
    max_size=30,
)


@given(moves)
def test_intervals_of_the_processor_add_up_to_its_phases(script):  # noqa: C901
    """By step and phase, without gaps or overlaps; what is done for a later step carries that step."""
    now, waited = [100.0], WaitTime()
    clock, step = Breakdown(lambda: now[0], waited), 1
    clock.begin_step(step)
    expected, depth = {}, 0

    def spend(passed, wait, phase, of_step):
        now[0] += passed
        waited.add(now[0] - min(wait, passed), now[0])
        if phase != PAUSED:
            for name, seconds in ((phase, passed - min(wait, passed)), ("wait", min(wait, passed))):
                expected[of_step, name] = expected.get((of_step, name), 0.0) + seconds

    for kind, what, amount in script:
        if kind == "time":
            spend(what, amount, clock._stack[-1], step)
        elif kind == "enter":
            clock.enter(what)
            depth += 1
        elif kind == "leave" and depth:
            clock.leave()
            depth -= 1
        elif kind == "step" and step < STEPS:
            step += 1
            clock.begin_step(step)
        elif kind == "ahead":
            with clock.working_for(step + amount), clock.phase(what):
                spend(3, 1, clock._stack[-1], step + amount)
    seconds = clock.seconds()
    found, got = clock.timeline.take_changes(), {}
    for one in found:
        assert one.end_s > one.begin_s
        got[one.step, one.stage] = got.get((one.step, one.stage), 0.0) + one.end_s - one.begin_s
    assert got == {key: s for key, s in expected.items() if s and key[0] <= step}
    in_time = sorted((one.begin_s, one.end_s) for one in found)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(in_time))
    assert clock.timeline.take_changes() == []
    assert seconds | {PAUSED: 0.0} == dict.fromkeys((*PHASES, PAUSED), 0.0) | {
        name: sum(s for (_, phase), s in expected.items() if phase == name) for name in PHASES
    }


@given(st.dictionaries(st.sampled_from(BESIDE), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=6)))
def test_busy_time_is_the_union_of_intervals(found):
    """Intervals of one phase that overlap count once, as those of other phases do beside them."""
    clock, expected = Breakdown(lambda: 0.0), dict.fromkeys(PHASES, 0.0)
    for phase, drawn in found.items():
        begins, ends = sorted(begin for begin, _ in drawn), sorted(begin + length for begin, length in drawn)
        for begin, end in zip(begins, ends, strict=True):
            clock.add_busy(phase, "link", float(begin), float(end))
        expected[phase] = float(len({moment for b, e in zip(begins, ends, strict=True) for moment in range(b, e)}))
    assert clock.phase_seconds().busy == expected


def test_a_transfer_is_busy_while_the_main_thread_computes():
    """Its delay is exposed only where it is waited for at once."""

    def on_a_rank(undelayed):
        comm = delayed(undelayed)
        clock = Breakdown(waited=comm.waited, observer=comm.observer)
        watches, asked = clock.watch([]), []
        clock.begin_step(1)
        for late in (True, False):
            before = clock.phase_seconds()
            with clock.working_for(2), clock.phase("exchange"):
                work = comm.all_reduce(torch.ones(3), "vectors")
            with clock.phase("forward"):
                if late:
                    undelayed.all_reduce(torch.ones(1), "meeting").wait()  # all ranks have sent
                    time.sleep(DELAY_S)
            asked.append(time.perf_counter())
            with clock.phase("exchange"):
                work.wait()
            exposed, busy = clock.phase_seconds().since(before)
            assert busy["exchange"] >= DELAY_S
            assert busy["forward"] == exposed["forward"] >= (DELAY_S if late else 0)
            assert late or sum(exposed.values()) >= DELAY_S
        for watch in watches:
            watch.remove()
        comm.all_reduce(torch.ones(3), "vectors").wait()
        assert clock.phase_seconds().busy["exchange"] == before.busy["exchange"] + busy["exchange"], "no longer watched"
        return clock, asked

    for clock, asked in run_threads(2, on_a_rank, 60):
        clock.begin_step(2)
        changes = sorted(clock.timeline.take_changes(), key=lambda x: x.begin_s)
        found = [one for one in changes if one.resource == "link"]
        assert [(one.step, one.stage) for one in found] == [(2, "exchange")] * 2
        origin_s = min(clock.timeline._begins.values())
        assert found[0].end_s + origin_s <= asked[0], "all had arrived before the main thread asked for it"
        assert all(one.end_s - one.begin_s >= DELAY_S - 1e-8 for one in found)
        waits = [one for one in changes if one.stage == "wait" and one.begin_s + origin_s >= asked[1]]
        assert found[1].end_s in [one.end_s for one in waits], "the main thread waited until the data had arrived"
        assert all(one.resource == "processor" for one in waits)


def test_what_a_pause_sends_is_not_counted():
    def on_a_rank(comm):
        clock = Breakdown(waited=comm.waited, observer=comm.observer)
        clock.watch([])
        with clock.phase(PAUSED), clock.phase("exchange"):
            comm.all_reduce(torch.ones(3), "vectors").wait()
        assert clock.phase_seconds().busy["exchange"] == 0

    run_threads(2, on_a_rank, 60)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("steps", "expected"), [(12, range(3, 13)), (LAST + 6, range(LAST - 9, LAST + 1)), (4, range(1, 5))]
)
def test_ten_steps_of_all_ranks_are_recorded(tmp_path, steps, expected):
    how = fast(train={"epochs": 99, "steps": steps, "ahead": 2}, log=Log(every=5), save=Saving(every=99))
    trained(Ranked(how, tmp_path, dropout=0.0, valid=False))
    found = intervals(tmp_path)
    assert {(row["step"], row["rank"]) for row in found} == {(step, rank) for step in expected for rank in (0, 1)}
    assert [row["step"] for row in found] == sorted(row["step"] for row in found)
    for rank in (0, 1):
        mine = [row for row in found if row["rank"] == rank]
        assert all(row["end_s"] > row["begin_s"] for row in mine)
        on_processor = sorted((row["begin_s"], row["end_s"]) for row in mine if row["resource"] == "processor")
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(on_processor))
        transfers = [row for row in mine if row["resource"] == "link"]
        assert all(row["end_s"] - row["begin_s"] >= DELAY_S - 1e-8 for row in transfers)
        for step in expected:
            stages = {row["stage"] for row in transfers if row["step"] == step}
            assert {"route", "exchange", "return", "reduce", "status"} <= stages
        assert {row["stage"] for row in mine if row["resource"] == "reader"} == {"data"}
        assert {row["stage"] for row in mine} <= set(PHASES)
    lines = read_csv(tmp_path / "stages.csv")
    assert list(lines[0]) == ["step", "rank", "phase", "measured_s", "busy_s", "predicted_s"]
    for line in lines:
        busy_s, exposed_s = float(line["busy_s"]), float(line["measured_s"])
        if line["phase"] not in BESIDE:
            assert busy_s == exposed_s
        elif line["phase"] in ("exchange", "return", "reduce", "status"):
            assert busy_s >= DELAY_S - 1e-8
    # The last line of an epoch may have none: its ids were sent in the step before.
    for phase in ("route", "data"):
        assert any(float(line["busy_s"]) for line in lines if line["phase"] == phase)


def test_a_kill_leaves_the_steps_up_to_the_last_line(tmp_path):
    how = fast(train={"epochs": 9, "steps": 99}, log=Log(every=3), save=Saving(every=6))

    def kill(shown):
        if shown.progress.step == 14:
            raise Killed

    with pytest.raises(Killed):
        World(how, tmp_path).start(tell=kill).run()
    assert {row["step"] for row in intervals(tmp_path)} == set(range(3, 13))
    longer = fast(train={"epochs": 9, "steps": 17}, log=Log(every=3), save=Saving(every=99))
    World(longer, tmp_path).resume(which="step-12").run()
    assert {row["step"] for row in intervals(tmp_path)} == set(range(3, 13)), "five steps do not replace ten"
    longer = fast(train={"epochs": 9, "steps": 27}, log=Log(every=3), save=Saving(every=99))
    World(longer, tmp_path).resume(which="step-17").run()
    assert {row["step"] for row in intervals(tmp_path)} == set(range(18, 28))


def test_a_trace_has_the_phases(tmp_path):
    World(fast(log=Log(profile="2:3")), tmp_path).start().run()
    events = json.loads((tmp_path / "trace/steps-2-3.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"data", "lookup", "forward", "backward", "reduce", "status", "update"} <= names
    assert names <= set(PHASES) | {PAUSED} | {name for name in names if name.startswith(("Optimizer", "ProfilerStep"))}


def on_disk(folder):
    """A table on disk, of which only a few rows and the newest segments of 8 MB are in memory; batches of all rows."""
    rows, batch = 24_000, 1_000
    table = Table(name="t", rows=rows, dim=128, optimizer=Adam(lr=0.1))
    tile = Tile(table="t", rank=0, rows=(0, rows), cols=(0, 128), tier="disk", cache_rows=8)
    sharded = ShardedEmbeddings([table], Plan(world=1, tiles=(tile,)), solo(), disk=folder)
    lengths_FB = torch.ones(batch, dtype=torch.int64)
    ids = torch.arange(rows).split(batch)
    return sharded, [Jagged(features=("t",), values_N=ids_N, lengths_FB=lengths_FB) for ids_N in ids]


def test_reads_of_rows_are_busy_time_of_the_disk(tmp_path):
    """Of the step for which they were read ahead; what lookups wait for is exposed, and not part of the lookup."""
    sharded, batches = on_disk(tmp_path)
    batches *= 2  # the second half was written by the first, and most is on the disk
    clock, exposed_s = Breakdown(), []
    clock.watch([sharded])
    for step, now in enumerate(batches, 1):
        clock.begin_step(step)
        for later in batches[step : step + 1]:
            with clock.working_for(step + 1):
                sharded.prefetch(later)
                sharded.advance()
        sharded(now).matrix_BS.sum().backward()
        sharded.update()
        seconds = clock.phase_seconds()
        exposed_s.append(seconds.exposed["prefetch"])
    (disk,) = (arena.store for arena in sharded.arenas)
    counters = disk.use()
    assert counters.reads > 0
    assert seconds.busy["prefetch"] == pytest.approx(counters.busy_s)
    assert seconds.exposed["prefetch"] > 0
    assert seconds.exposed["lookup"] == seconds.busy["lookup"] >= 0
    clock.begin_step(len(batches) + 1)
    changes = clock.timeline.take_changes()
    waited_s = sum(one.end_s - one.begin_s for one in changes if one.stage == "wait")
    # Of a quick disk no lookup waits; what else is exposed is the work of asking for rows.
    assert waited_s <= exposed_s[LAST - 1] - exposed_s[LAST - STEPS - 1] + 1e-8, "of the steps that are kept"
    found = [one for one in changes if one.resource == "disk"]
    assert {one.stage for one in found} == {"prefetch"}
    assert all(before.end_s <= after.begin_s for before, after in itertools.pairwise(found))


def test_a_lookup_that_reads_its_rows_itself_waits_for_the_disk(tmp_path):
    """No row is read ahead; the rest of what is exposed is the work of asking for rows."""
    sharded, batches = on_disk(tmp_path)
    for now in batches:  # what is written here is on the disk, but for the newest segments
        sharded(now).matrix_BS.sum().backward()
        sharded.update()
    clock = Breakdown()
    clock.watch([sharded])
    exposed_s = [0.0]
    for step, now in enumerate((batches * 2)[:LAST], 1):
        clock.begin_step(step)
        with torch.no_grad():
            sharded(now)
        exposed_s.append(clock.phase_seconds().exposed["prefetch"])
    clock.begin_step(LAST + 1)
    waits_s = [one.end_s - one.begin_s for one in clock.timeline.take_changes() if one.stage == "wait"]
    assert 0 < sum(waits_s) <= exposed_s[LAST] - exposed_s[LAST - STEPS] + 1e-8


def test_the_console_has_busy_times_that_the_main_thread_hides():
    times = {"data": (0.0, 0.002), "route": (0.001, 0.0002), "exchange": (0.001, 0.004), "forward": (0.008, 0.008)}
    step = {phase: PhaseTime(exposed_s=exposed, busy_s=busy) for phase, (exposed, busy) in times.items()}
    out = io.StringIO()
    result = RunResult(
        status="finished", recipe="r", run="runs/r/1", step=step | {"wait": PhaseTime(exposed_s=0.0, busy_s=0.0)}
    )
    show_result(result, Console(file=out, width=200))
    (line,) = [line for line in out.getvalue().replace(SPACE, " ").splitlines() if line.startswith("step ")]
    parts = "data 0 ms (busy 2 ms), route 1 ms, exchange 1 ms (busy 4 ms), forward 8 ms"
    assert line == f"step    10 ms: {parts}"


def test_an_observer_may_be_watched_again():
    """By the next clock of a communicator, after the first has ended."""
    observer = TransferObserver()
    for watch in Breakdown(observer=observer).watch([]):
        watch.remove()
    assert observer.report is None
