"""The versions of a server, under random schedules: workers answer by versions that they have open, whatever fails."""

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.serve.traffic import Canary, Traffic
from rowwise.serve.versions import (
    MAX_DEATHS,
    CloseVersion,
    EndWorker,
    FreeRows,
    Lag,
    LoadRows,
    MoveTraffic,
    OpenVersion,
    ReportRefused,
    RowsLoaded,
    ServedVersions,
    TrafficMoved,
    TrafficRead,
    VersionOpened,
    VersionRefused,
    WorkerEnded,
    WorkerStarted,
)


class Server:
    """Executes commands late and in any order between workers, and checks each of them, and that it goes on."""

    def __init__(self, seed, bad):
        self.versions, self.random, self.bad = ServedVersions(), random.Random(seed), bad
        self.loads, self.queues = [], defaultdict(list)  # commands that wait: of loading, and of each worker in order
        self.loaded, self.opened, self.traffic, self.known, self.next = set(), {}, {}, {}, 0
        self.moves, self.loads_begun = 0, 0
        self.useless, self.killed = 0, 0  # loads, and workers that were killed, since something was reached or refused

    def send(self, event):
        before = self.versions.active
        for command in self.versions.handle(event):
            match command:
                case LoadRows(version):
                    assert not self.loads, "one at a time"
                    assert version not in self.loaded
                    self.loads.append(version)
                    held, wanted = {version, *self.loaded}, (self.versions.active, self.versions.target)
                    assert held <= {one for traffic in wanted if traffic for one in traffic.versions}, "memory"
                    self.useless, self.loads_begun = self.useless + 1, self.loads_begun + 1
                case FreeRows(version):
                    assert all(version not in self.will_have(worker) for worker in self.opened)
                    self.loaded.remove(version)
                case OpenVersion(worker, version):
                    assert version in self.loaded
                    waiting = [one for queue in self.queues.values() for one in queue]
                    opening = {one.worker for one in waiting if isinstance(one, OpenVersion)} - {worker}
                    assert worker not in self.traffic or not opening & self.traffic.keys(), "one worker after the other"
                    self.queues[worker].append(command)
                case CloseVersion(worker, _) | MoveTraffic(worker, _):
                    self.queues[worker].append(command)
                case ReportRefused(worker, why):
                    assert why == self.versions.refused
                    self.known[worker] = why
        active, wanted = self.versions.active, self.versions.wanted
        assert active is None or not set(active.versions) & self.versions.refused.keys()
        self.moves += active != before
        if active == wanted or active != before or isinstance(event, VersionRefused):
            self.useless, self.killed = 0, 0
        assert self.useless <= 2 or self.killed >= MAX_DEATHS, "what is loaded is moved to"

    def will_have(self, worker):
        """The versions that a worker has open after the commands that wait."""
        found = set(self.opened[worker])
        for command in self.queues[worker]:
            if isinstance(command, OpenVersion):
                found.add(command.version)
            elif isinstance(command, CloseVersion):
                found.remove(command.version)
        return found

    def start(self):
        self.opened[self.next], self.next = set(), self.next + 1
        self.send(WorkerStarted(self.next - 1))

    def kill(self, worker):
        del self.opened[worker]
        self.traffic.pop(worker, None)
        self.queues.pop(worker, None)
        self.killed += 1
        self.send(WorkerEnded(worker))

    def step(self):
        """Execute one of the commands that wait; false: none does, as all is as it is wanted."""
        ready = [worker for worker, queue in self.queues.items() if queue]
        if self.opened and not ready and not self.loads:
            versions = self.versions
            assert versions.active == versions.wanted or versions.refused.keys() & set(versions.wanted.versions)
        if self.loads and (not ready or self.random.random() < 0.3):
            version = self.loads.pop()
            if version in self.bad:
                self.send(VersionRefused(version, "damaged"))
            else:
                self.loaded.add(version)
                self.send(RowsLoaded(version))
            return True
        if not ready:
            return False
        worker = self.random.choice(ready)
        match self.queues[worker].pop(0):
            case OpenVersion(_, version):
                self.opened[worker].add(version)
                self.send(VersionOpened(worker, version))
            case CloseVersion(_, version):
                assert worker not in self.traffic or version not in self.traffic[worker].versions
                self.opened[worker].remove(version)
            case MoveTraffic(_, traffic):
                assert set(traffic.versions) <= self.opened[worker]
                self.traffic[worker] = traffic
                self.send(TrafficMoved(worker, traffic))
        return True


traffics = st.builds(Traffic, st.integers(1, 5)) | st.builds(
    lambda current, more: Traffic(current, Canary((current + more) % 6 + 1, 0.1)), st.integers(1, 6), st.integers(0, 4)
)


@given(st.integers(0, 10**6), st.sets(st.integers(2, 6)), st.lists(traffics | st.sampled_from("sskx"), max_size=30))
def test_workers_answer_by_versions_that_they_have_open(seed, bad, events):
    server = Server(seed, bad)
    server.send(TrafficRead(Traffic(1)))
    for event in events:
        if isinstance(event, Traffic):
            server.send(TrafficRead(event))
        elif event == "s" or not server.opened:
            server.start()
        elif event == "k":
            server.kill(server.random.choice(list(server.opened)))
        for _ in range(server.random.randrange(6)):
            server.step()
    server.start()
    server.loads_begun = 0
    while server.step():
        pass
    wanted = server.versions.wanted
    assert server.loads_begun <= 4 + len(bad), "two loads of two versions, and those that are refused"
    if not set(wanted.versions) & server.versions.refused.keys():
        assert server.versions.active == wanted
    assert set(server.traffic.values()) == {server.versions.active} - {None}
    if server.traffic:
        assert set(server.traffic) == set(server.opened)
        needed = set(server.versions.active.versions)
        assert all(opened == needed for opened in server.opened.values())
        assert server.loaded == needed
    assert set(server.versions.refused) <= bad
    assert all(server.known.get(worker, {}) == server.versions.refused for worker in server.opened)


@given(st.integers(0, 10**6), st.integers(1, 3), st.sets(st.integers(2, 40), max_size=3))
def test_each_load_moves_a_server_that_is_asked_for_another_version_before_each_step(seed, workers, bad):
    server = Server(seed, bad)
    server.send(TrafficRead(Traffic(1)))
    for _ in range(workers):
        server.start()
    while server.step():
        pass
    server.moves = server.loads_begun = 0
    for number in range(2, 100):
        server.send(TrafficRead(Traffic(number)))
        if number % 10 == 0:
            server.kill(server.random.choice(list(server.opened)))
            server.start()
        assert server.step()
    refused = len(server.versions.refused)
    assert server.moves >= 5
    assert server.moves >= server.loads_begun - refused - 1  # the last load goes on
    server.loads_begun = 0
    while server.step():
        pass
    assert server.versions.active == Traffic(99)
    assert server.loads_begun <= 2


def test_requests_move_while_a_worker_starts():
    server = Server(0, set())
    server.send(TrafficRead(Traffic(1)))
    server.start()
    while server.step():
        pass
    for number in (2, 3, 4):
        server.start()
        server.send(TrafficRead(Traffic(number)))
        while server.versions.active != Traffic(number):
            server.queues.pop(server.next - 1, None)  # it opens nothing
            server.step()
        server.kill(server.next - 1)


def opened(traffic):
    """A worker that answers."""
    versions = ServedVersions()
    versions.handle(TrafficRead(traffic))
    for version in traffic.versions:
        versions.handle(RowsLoaded(version))
    versions.handle(WorkerStarted(0))
    for version in traffic.versions:
        versions.handle(VersionOpened(0, version))
    versions.handle(TrafficMoved(0, traffic))
    assert versions.active == traffic
    return versions


def test_wishes_in_between_are_skipped():
    versions = opened(Traffic(1))
    assert versions.handle(TrafficRead(Traffic(2))) == [LoadRows(2)]
    for number in (3, 4):
        assert versions.handle(TrafficRead(Traffic(number))) == []
    assert versions.handle(RowsLoaded(2)) == [OpenVersion(0, 2)]
    assert versions.handle(VersionOpened(0, 2)) == [MoveTraffic(0, Traffic(2))]
    assert versions.target == Traffic(4)
    # Before the old version is free, there is no room for another.
    assert versions.handle(TrafficMoved(0, Traffic(2))) == [CloseVersion(0, 1), FreeRows(1), LoadRows(4)]


def test_no_request_is_answered_by_a_wish_that_was_withdrawn():
    versions = opened(Traffic(1))
    versions.handle(TrafficRead(Traffic(2)))
    assert versions.handle(TrafficRead(Traffic(1))) == []
    assert versions.handle(RowsLoaded(2)) == [OpenVersion(0, 2)]
    assert versions.handle(VersionOpened(0, 2)) == [CloseVersion(0, 2), FreeRows(2)]
    assert versions.target is None


def test_a_canary_is_withdrawn_while_another_version_loads():
    versions = opened(Traffic(1, Canary(2, 0.5)))
    assert versions.handle(TrafficRead(Traffic(3))) == [LoadRows(3)]
    assert versions.handle(TrafficRead(Traffic(1))) == [MoveTraffic(0, Traffic(1))]


def test_a_version_that_ends_workers_which_open_it_is_given_up_for_another():
    versions = opened(Traffic(1))
    versions.handle(TrafficRead(Traffic(2)))
    versions.handle(RowsLoaded(2))
    for worker in range(MAX_DEATHS):
        assert versions.target == Traffic(2)
        versions.handle(WorkerEnded(worker))
        versions.handle(WorkerStarted(worker + 1))
        versions.handle(VersionOpened(worker + 1, 1))
        found = versions.handle(TrafficMoved(worker + 1, Traffic(1)))
        assert found == [OpenVersion(worker + 1, 2)]  # nothing else is wanted
    assert versions.handle(TrafficRead(Traffic(1))) == []
    assert versions.target is None
    assert versions.handle(WorkerEnded(MAX_DEATHS)) == [FreeRows(2)]


def test_a_server_is_behind_from_the_first_wish_that_it_has_not_followed():
    lag, one, two, three = Lag(), Traffic(1), Traffic(2), Traffic(3)
    assert lag.seconds(one, one, None, 5.0) == 0
    assert lag.seconds(two, one, two, 6.0) == 0
    assert lag.seconds(three, one, two, 8.0) == 2
    assert lag.seconds(Traffic(4), one, two, 9.0) == 3
    assert lag.seconds(Traffic(4), two, Traffic(4), 10.0) == 2  # the next one was wanted at 8
    assert lag.seconds(two, two, Traffic(4), 11.0) == 0
    assert lag.seconds(three, two, Traffic(4), 13.0) == 0
    assert lag.seconds(three, three, None, 14.0) == 0


def test_a_version_that_a_worker_cannot_open_is_refused_and_its_rows_are_freed():
    versions = ServedVersions()
    versions.handle(TrafficRead(Traffic(1)))
    versions.handle(RowsLoaded(1))
    assert versions.handle(WorkerStarted(0)) == [OpenVersion(0, 1)]
    assert versions.handle(VersionOpened(0, 1)) == [MoveTraffic(0, Traffic(1))]
    assert versions.handle(TrafficMoved(0, Traffic(1))) == []
    assert versions.handle(TrafficRead(Traffic(2))) == [LoadRows(2)]
    assert versions.handle(RowsLoaded(2)) == [OpenVersion(0, 2)]
    assert versions.handle(VersionRefused(2, "other columns", 0)) == [
        ReportRefused(0, {2: "other columns"}),
        FreeRows(2),
    ]
    assert versions.refused == {2: "other columns"}
    assert versions.handle(TrafficRead(Traffic(2))) == []
    assert versions.handle(WorkerStarted(1)) == [ReportRefused(1, {2: "other columns"}), OpenVersion(1, 1)]
    assert versions.handle(VersionRefused(1, "memory", 1)) == [EndWorker(1)]  # the other answers by it
    assert versions.refused.keys() == {2}


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_any_run_of_requests_has_the_share_of_the_canary(share):
    traffic = Traffic(1, Canary(2, share))
    for begin in (0, 1000, 10**9):
        found = [traffic.version_of(number) == 2 for number in range(begin, begin + 200)]
        assert abs(sum(found) - 200 * share) <= 2
    assert Traffic(3).version_of(7) == 3


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_shares_that_are_none(share):
    with pytest.raises(SpecError, match="more than 0"):
        Canary(1, share)
    with pytest.raises(SpecError, match="1 is the current"):
        Traffic(1, Canary(1, 0.5))
