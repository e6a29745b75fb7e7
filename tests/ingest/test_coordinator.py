"""The coordinator in a world that fails at any time: every client gets every split, once, and in order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.ingest.block import BlockSizes, lay_out
from rowwise.ingest.service.coordinator import (
    ClientAttached,
    ClientDetached,
    ClockTick,
    Coordinator,
    KillWorker,
    RetireWorker,
    ServiceConfig,
    SplitDelivery,
    SplitId,
    SplitLease,
    SplitReady,
    SplitRefused,
    SplitReleased,
    StartWorker,
    WorkerJoined,
    WorkerLost,
    WorkerTimes,
)
from rowwise.ingest.service.scaling import ServiceLoad, wanted_workers

EMPTY = lay_out(BlockSizes(0, 0, 0, (), (), ()))


def made(worker, place, busy_s):
    return SplitReady(worker, place, EMPTY, WorkerTimes(busy_s=busy_s))


def told(command):
    return command.client, command.split_id, command.slot, command.error


class World:
    """Workers that take time, hang or die; clients that take what they are given, stop and come back; one clock."""

    def __init__(self, plan, seed, *, faults=0.0, epochs=1):
        self.plan, self.draw, self.faults, self.epochs = plan, random.Random(seed), faults, epochs
        self.now_s = 0.0
        self.begin()
        self.place = {client: SplitId(0, 0) for client in range(plan.clients)}
        self.taken = {client: [] for client in range(plan.clients)}
        self.held = {client: {} for client in range(plan.clients)}  # place: slot, of what a client looks at
        self.inbox = {client: [] for client in range(plan.clients)}
        self.restarts = 0
        for client in range(plan.clients):
            self.tell(ClientAttached(client, SplitId(0, 0)))

    def begin(self):
        self.coordinator = Coordinator(self.plan)
        self.leases, self.workers, self.slots = {}, set(), {}

    def tell(self, event):
        for command in self.coordinator.handle(event, self.now_s):
            self.obey(command)

    def obey(self, command):
        match command:
            case StartWorker(worker=worker):
                assert worker not in self.workers
                self.workers.add(worker)
                self.tell(WorkerJoined(worker))
            case RetireWorker(worker=worker) | KillWorker(worker=worker):
                if isinstance(command, RetireWorker):
                    assert worker not in self.leases
                self.end(worker)
            case SplitLease(worker=worker, split_id=place, slot=slot):
                assert worker in self.workers
                assert worker not in self.leases
                # Nobody looks at a slot that is written, and nobody else writes to it.
                assert all(slot not in held.values() for held in self.held.values())
                assert all(slot not in dict(inbox).values() for inbox in self.inbox.values())
                assert slot not in [s for _, s, _ in self.leases.values()]
                self.slots[slot] = None
                self.leases[worker] = place, slot, self.now_s + self.draw.choice([0.1, 1, 3])
            case SplitDelivery(client=client, split_id=place, slot=slot, error=error):
                assert error is None
                assert self.slots[slot] == place
                assert place not in dict(self.inbox[client])
                self.inbox[client].append((place, slot))

    def end(self, worker):
        self.workers.discard(worker)
        self.leases.pop(worker, None)
        self.tell(WorkerLost(worker, "it was killed"))

    def work(self):
        for worker, (place, slot, due_s) in list(self.leases.items()):
            if worker not in self.leases:
                continue
            if self.draw.random() < self.faults:
                self.end(worker)
            elif self.now_s >= due_s and self.draw.random() >= self.faults:
                del self.leases[worker]
                self.slots[slot] = place
                self.tell(made(worker, place, 1.0))

    def use(self, client):
        """Take what comes next, let go what was taken long ago."""
        want = self.place[client]
        for place, slot in list(self.inbox[client]):
            if place == want:
                self.inbox[client].remove((place, slot))
                self.taken[client].append(place)
                self.held[client][place] = slot
                self.place[client] = want = SplitId(want.epoch, want.index + 1)
                break
        held = self.held[client]
        while held and (len(held) > 1 or self.draw.random() < 0.5):
            oldest = min(held)
            del held[oldest]
            self.tell(SplitReleased(client, oldest, self.now_s / 10))
        if want.index == self.plan.splits and want.epoch + 1 < self.epochs and not held:
            self.place[client] = SplitId(want.epoch + 1, 0)
            self.inbox[client].clear()
            self.tell(ClientAttached(client, self.place[client]))

    def restart(self):
        """The coordinator is gone; what clients hold stays theirs, as its memory is not used again."""
        self.restarts += 1
        for worker in list(self.workers):
            self.workers.discard(worker)
        for client in self.held:
            self.held[client].clear()
            self.inbox[client].clear()
        self.begin()
        for client, place in self.place.items():
            self.tell(ClientAttached(client, place))

    def reattach(self, client):
        self.tell(ClientDetached(client))
        self.held[client].clear()
        self.inbox[client].clear()
        self.tell(ClientAttached(client, self.place[client]))

    def run(self, steps):
        end = SplitId(self.epochs - 1, self.plan.splits)
        for _ in range(steps):
            self.now_s += 0.1
            self.tell(ClockTick())
            self.work()
            for client in self.place:
                if self.draw.random() < 0.6:
                    self.use(client)
            if self.draw.random() < self.faults / 5:
                self.restart()
            if self.draw.random() < self.faults / 5:
                self.reattach(self.draw.choice(list(self.place)))
            if all(place == end for place in self.place.values()):
                return True
        return False


PLANS = st.builds(
    lambda clients, splits, epochs, least, more, ahead: ServiceConfig(
        clients=clients,
        splits=splits,
        epochs=epochs,
        workers=least,
        min_workers=least,
        max_workers=least + more,
        ahead=ahead,
        lease_s=2.0,
        attempts=99,
    ),
    *(st.integers(1, 3), st.integers(1, 12), st.integers(1, 3)),
    *(st.integers(1, 3), st.integers(0, 3), st.integers(2, 4)),
)


@settings(deadline=None, max_examples=150)
@given(PLANS, st.integers(0, 10_000), st.sampled_from([0.0, 0.05, 0.2]), st.integers(1, 3))
def test_each_client_takes_each_split_once_and_in_order(plan, seed, faults, epochs):
    world = World(plan, seed, faults=faults, epochs=epochs)
    assert world.run(20_000)
    expected = [SplitId(epoch, at) for epoch in range(epochs) for at in range(plan.splits)]
    assert all(taken == expected for taken in world.taken.values())


def begun(**plan):
    coordinator = Coordinator(ServiceConfig(**({"splits": 10} | plan)))
    commands = coordinator.handle(ClientAttached(0, SplitId(0, 0)), 0.0)
    return coordinator, commands


def test_a_split_is_leased_again_when_its_worker_hangs():
    coordinator, commands = begun(lease_s=5.0)
    assert commands == [StartWorker(1)]
    assert coordinator.handle(WorkerJoined(1), 1.0) == [SplitLease(1, SplitId(0, 0), 0)]
    assert coordinator.handle(ClockTick(), 5.9) == []
    assert coordinator.handle(ClockTick(), 6.0) == [KillWorker(1), StartWorker(2)]
    assert coordinator.handle(WorkerJoined(2), 6.1) == [SplitLease(2, SplitId(0, 1), 1)]
    give = coordinator.handle(made(1, SplitId(0, 0), 1.0), 6.2)[0]
    assert told(give) == (0, SplitId(0, 0), 0, None)  # it had been about to
    assert coordinator.handle(WorkerLost(1, "killed"), 6.3) == []


def test_a_slot_that_is_written_is_free_when_its_lease_ends():
    coordinator, _ = begun(workers=2, max_workers=2)
    assert coordinator.handle(WorkerJoined(1), 0.0) == [SplitLease(1, SplitId(0, 0), 0)]
    coordinator.handle(ClientDetached(0), 0.1)
    coordinator.handle(ClientAttached(0, SplitId(0, 5)), 0.2)  # the lease is of a split that nobody wants any more
    assert coordinator.handle(WorkerJoined(2), 0.3) == [SplitLease(2, SplitId(0, 5), 1)]
    assert SplitLease(1, SplitId(0, 6), 0) in coordinator.handle(made(1, SplitId(0, 0), 1.0), 0.4)


def test_what_kills_every_worker_is_refused_with_how_they_ended():
    coordinator, _ = begun(attempts=2)
    assert SplitLease(1, SplitId(0, 0), 0) in coordinator.handle(WorkerJoined(1), 0.0)
    assert StartWorker(2) in coordinator.handle(WorkerLost(1, "killed by SIGKILL"), 0.1)
    assert SplitLease(2, SplitId(0, 0), 0) in coordinator.handle(WorkerJoined(2), 0.2)
    commands = coordinator.handle(WorkerLost(2, "ended with 1"), 0.3)
    (give,) = [c for c in commands if isinstance(c, SplitDelivery)]
    assert told(give) == (
        0,
        SplitId(0, 0),
        None,
        "2 workers ended while preparing this split: killed by SIGKILL; ended with 1: "
        "make smaller splits, or give a worker more memory",
    )


def test_workers_that_never_start_are_not_started_for_ever():
    coordinator, commands = begun(attempts=3)
    for number in (1, 2, 3):
        assert StartWorker(number) in commands
        commands = coordinator.handle(WorkerLost(number, "no module"), 0.1 * number)
    assert told(commands[0]) == (0, SplitId(0, 0), None, "no worker could start: no module")
    assert not [c for c in coordinator.handle(ClockTick(), 9.0) if isinstance(c, StartWorker)]


def test_the_next_epoch_is_prepared_before_it_begins_and_none_after_the_last():
    coordinator, _ = begun(splits=2, epochs=2, ahead=4)
    leased = [c.split_id for c in coordinator.handle(WorkerJoined(1), 0.0)]
    for at in ((0, 0), (0, 1), (1, 0)):
        leased += [c.split_id for c in coordinator.handle(made(1, SplitId(*at), 1.0), 0.1) if isinstance(c, SplitLease)]
    assert leased == [SplitId(0, 0), SplitId(0, 1), SplitId(1, 0), SplitId(1, 1)]
    assert not [c for c in coordinator.handle(made(1, SplitId(1, 1), 1.0), 0.2) if isinstance(c, SplitLease)]


def test_a_refused_split_comes_in_its_place():
    coordinator, _ = begun()
    coordinator.handle(WorkerJoined(1), 0.0)
    give = coordinator.handle(SplitRefused(1, SplitId(0, 0), "bad label"), 0.1)[-1]
    assert told(give) == (0, SplitId(0, 0), None, "bad label")


def test_nothing_begins_before_all_clients_are_here():
    coordinator, _ = begun(clients=2)
    assert coordinator.handle(WorkerJoined(1), 0.0) == []
    assert coordinator.handle(ClientAttached(1, SplitId(0, 3)), 0.1) == [SplitLease(1, SplitId(0, 0), 0)]
    given_to = [c.client for c in coordinator.handle(made(1, SplitId(0, 0), 1.0), 0.2) if isinstance(c, SplitDelivery)]
    assert given_to == [0]  # the other one has had it


@pytest.mark.parametrize("wrong", [{"splits": 0}, {"min_workers": 2}, {"workers": 3}, {"lease_s": 0.0}, {"ahead": 0}])
def test_wrong_plans(wrong):
    with pytest.raises(SpecError, match="expected"):
        ServiceConfig(**wrong)


class Pace:
    """A trainer that uses a split in `takes_s`, and workers that need `makes_s` for one."""

    def __init__(self, *, takes_s, makes_s, most=8, pause=(0, 0)):
        self.coordinator = Coordinator(
            ServiceConfig(splits=1_000_000, workers=1, min_workers=1, max_workers=most, ahead=3)
        )
        self.takes_s, self.makes_s, self.pause = takes_s, makes_s, pause
        self.leases, self.ready, self.history = {}, set(), []
        self.now_s = self.busy_until_s = self.waited_s = self.late_s = 0.0
        self.place = 0
        self.tell(ClientAttached(0, SplitId(0, 0)))

    def tell(self, event):
        for command in self.coordinator.handle(event, self.now_s):
            match command:
                case StartWorker(worker=worker):
                    self.tell(WorkerJoined(worker))
                case RetireWorker(worker=worker):
                    self.tell(WorkerLost(worker, "retired"))
                case SplitLease(worker=worker, split_id=where):
                    self.leases[worker] = where, self.now_s + self.makes_s
                case SplitDelivery(split_id=where):
                    self.ready.add(where.index)

    def use(self, *, late):
        if self.place in self.ready:
            self.tell(SplitReleased(0, SplitId(0, self.place), self.waited_s))
            self.ready.discard(self.place)
            self.place += 1
            self.busy_until_s = self.now_s + self.takes_s
        else:
            self.waited_s += 0.01
            self.late_s += 0.01 * late


def simulate(seconds, **how):
    """How many workers there were over time, and the share of the second half that the trainer waited."""
    pace = Pace(**how)
    while pace.now_s < seconds:
        pace.now_s += 0.01
        for worker, (where, due_s) in list(pace.leases.items()):
            if pace.now_s >= due_s:
                del pace.leases[worker]
                pace.tell(made(worker, where, pace.makes_s))
        if pace.now_s >= pace.busy_until_s and not pace.pause[0] <= pace.now_s < pace.pause[1]:
            pace.use(late=pace.now_s > seconds / 2)
        pace.tell(ClockTick())
        pace.history.append(pace.coordinator.target)
    return pace.history, pace.late_s / (seconds / 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("takes_s", [0.1, 0.5])
def test_a_worker_that_makes_a_third_is_joined_by_two_or_three_more(takes_s):
    history, waited = simulate(120, takes_s=takes_s, makes_s=3 * takes_s)
    assert set(history[len(history) // 2 :]) <= {3, 4}
    assert waited < 0.02


def test_one_worker_stays_alone_where_one_is_enough():
    history, waited = simulate(60, takes_s=0.2, makes_s=0.1)
    assert set(history[len(history) // 2 :]) == {1}
    assert waited < 0.02


def test_trainers_that_only_wait_get_all_there_are():
    history, _ = simulate(60, takes_s=0.0, makes_s=1.0, most=6)
    assert max(history) == 6
    assert set(history[len(history) // 2 :]) == {6}


def test_waiting_before_a_client_came_back_counts_once():
    coordinator, _ = begun(splits=1000, max_workers=8)
    coordinator.handle(ClientAttached(0, SplitId(1, 0), 100.0), 0.0)
    coordinator.handle(WorkerJoined(1), 0.0)
    for at in range(20):
        coordinator.handle(made(1, SplitId(1, at), 0.1), 0.2 * at)
        coordinator.handle(SplitReleased(0, SplitId(1, at), 100.0), 0.2 * at + 0.1)
    assert coordinator.target == 1


def test_a_pause_changes_nothing():
    history, _ = simulate(120, takes_s=0.2, makes_s=0.6, pause=(40, 80))
    assert set(history[3500:]) <= {3, 4}


def test_workers_go_when_training_becomes_slower():
    seen = ServiceLoad(splits=4, waited_s=0.0, busy_s=1.0, demand=1.0, interval_s=4.0, ready=3)
    target, rounds = 6, 0
    while target > 2 and rounds < 100:
        target, seen = wanted_workers(target, seen, 1, 8)
        seen = ServiceLoad(
            **{**{n: getattr(seen, n) for n in seen.__struct_fields__}, "splits": 4, "interval_s": 4.0, "ready": 3}
        )
        rounds += 1
    assert target == 2
    assert rounds <= 40
