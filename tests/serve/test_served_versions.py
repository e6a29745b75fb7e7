"""The versions of a server, under random schedules: workers answer by versions that they have open, whatever fails."""

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.serve.traffic import Canary, Traffic
from rowwise.serve.versions import (
    CloseVersion,
    EndWorker,
    FreeRows,
    LoadRows,
    MoveTraffic,
    OpenVersion,
    RowsLoaded,
    ServedVersions,
    TellRefused,
    TrafficMoved,
    TrafficRead,
    VersionOpened,
    VersionRefused,
    WorkerEnded,
    WorkerStarted,
)


class Server:
    """Executes commands late and in any order between workers, and checks each of them."""

    def __init__(self, seed, bad):
        self.versions, self.random, self.bad = ServedVersions(), random.Random(seed), bad
        self.loads, self.queues = [], defaultdict(list)  # commands that wait: of loading, and of each worker in order
        self.loaded, self.opened, self.traffic, self.known, self.next = set(), {}, {}, {}, 0

    def send(self, event):
        for command in self.versions.handle(event):
            match command:
                case LoadRows(version):
                    assert not self.loads, "one at a time"
                    assert version not in self.loaded
                    self.loads.append(version)
                case FreeRows(version):
                    waiting = [
                        one.version for queue in self.queues.values() for one in queue if hasattr(one, "version")
                    ]
                    assert version not in waiting or all(
                        isinstance(one, CloseVersion)
                        for q in self.queues.values()
                        for one in q
                        if one[1:] == (version,)
                    )
                    self.loaded.remove(version)
                case OpenVersion(worker, version):
                    assert version in self.loaded
                    self.queues[worker].append(command)
                case CloseVersion(worker, _) | MoveTraffic(worker, _):
                    self.queues[worker].append(command)
                case TellRefused(worker, why):
                    assert why == self.versions.refused
                    self.known[worker] = why
        active = self.versions.active
        assert active is None or not set(active.versions) & self.versions.refused.keys()

    def start(self):
        self.opened[self.next], self.next = set(), self.next + 1
        self.send(WorkerStarted(self.next - 1))

    def kill(self, worker):
        del self.opened[worker]
        self.traffic.pop(worker, None)
        self.queues.pop(worker, None)
        self.send(WorkerEnded(worker))

    def step(self):
        """Execute one of the commands that wait; false: none does."""
        ready = [worker for worker, queue in self.queues.items() if queue]
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
    while server.step():
        pass
    wanted = server.versions.wanted
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
        TellRefused(0, {2: "other columns"}),
        FreeRows(2),
    ]
    assert versions.refused == {2: "other columns"}
    assert versions.handle(TrafficRead(Traffic(2))) == []
    assert versions.handle(WorkerStarted(1)) == [TellRefused(1, {2: "other columns"}), OpenVersion(1, 1)]
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
    with pytest.raises(SpecError, match="want more than 0 and less than 1"):
        Canary(1, share)
    with pytest.raises(SpecError, match="version 1 is the current one"):
        Traffic(1, Canary(1, 0.5))
