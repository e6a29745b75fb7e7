"""What every Comm must do, as checks that all ranks of a world run together; the oracle knows what each rank sends."""

import functools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Case:
    collective: str
    dtype: torch.dtype
    sizes_WW: list[list[int]]  # what each place of the group sends to each
    salt: int

    def given(self, place):
        generator = torch.Generator().manual_seed(self.salt * 64 + place)
        sizes_W = self.sizes_WW[place]
        n = sum(sizes_W) if self.collective in ("all_to_all", "reduce_scatter") else sizes_W[0]
        return (torch.randn(n, generator=generator) * 50 + 100).to(self.dtype)

    def start(self, comm):
        w, me = len(self.sizes_WW), comm.rank
        given, sizes_W = self.given(me), self.sizes_WW[me]
        match self.collective:
            case "all_to_all":
                return given, comm.all_to_all(given, sizes_W, [self.sizes_WW[r][me] for r in range(w)], "a2a")
            case "all_gather":
                return given, comm.all_gather(given, [self.sizes_WW[r][0] for r in range(w)], "gather")
            case "reduce_scatter":
                return given, comm.reduce_scatter(given, sizes_W, "scatter")
        return given, comm.all_reduce(given, "reduce")

    def expected(self, me):
        w = len(self.sizes_WW)
        given_W = [self.given(r) for r in range(w)]
        if self.collective in ("all_to_all", "reduce_scatter"):
            given_W = [given.split(self.sizes_WW[r])[me] for r, given in enumerate(given_W)]
        if self.collective in ("reduce_scatter", "all_reduce"):
            return functools.reduce(torch.add, given_W)
        return torch.cat(given_W)

    def rounding(self):
        """How far apart sums may be that are taken in other orders: each of W - 1 additions rounds once, both ways."""
        given_W = [self.given(r).double().abs() for r in range(len(self.sizes_WW))]
        eps = torch.finfo(self.dtype).eps if self.dtype.is_floating_point else 0.0
        return functools.reduce(torch.add, given_W) * eps * len(given_W)


def make(collective, world, dtype=torch.float32, seed=0, most=40):
    """A case with sizes drawn at random, a third of them 0."""
    draw = random.Random(f"{collective}{world}{seed}")
    sizes_WW = [
        [draw.choice((0, draw.randint(1, most), draw.randint(1, most))) for _ in range(world)] for _ in range(world)
    ]
    if collective == "reduce_scatter":
        sizes_WW = [sizes_WW[0]] * world
    if collective == "all_reduce":
        sizes_WW = [[sizes_WW[0][0]]] * world
    return Case(collective, dtype, sizes_WW, draw.randint(0, 1 << 30))


def verify(comm, case, came, exact):
    want = case.expected(comm.rank)
    if case.collective == "all_reduce" and not exact:
        far, most = (came.double() - want.double()).abs(), case.rounding()
        assert (far <= most).all(), f"{case}: got {came}, expected {want}, at most {most} off"
        if came.numel():
            bytes_n = came.view(torch.uint8)
            all_wn = comm.all_gather(bytes_n, [bytes_n.numel()] * len(comm.ranks), "same").wait()
            assert (all_wn.reshape(len(comm.ranks), -1) == bytes_n).all(), "ranks have other bits"
        return
    assert came.dtype == want.dtype, f"{case}: {came.dtype}"
    assert torch.equal(came, want), f"{case}: got {came}, expected {want}"


def uneven_sizes_of_every_dtype(comm, exact):
    for collective in COLLECTIVES:
        for seed, dtype in enumerate(DTYPES):
            case = make(collective, len(comm.ranks), dtype, seed)
            verify(comm, case, case.start(comm)[1].wait(), exact)


def empty_tensors(comm, exact):
    w = len(comm.ranks)
    for collective in COLLECTIVES:
        case = Case(collective, torch.float32, [[0] * w] * w, 1)
        verify(comm, case, case.start(comm)[1].wait(), exact)


def only_one_rank_sends(comm, exact):
    w = len(comm.ranks)
    for sender in range(w):
        case = Case("all_to_all", torch.int64, [[7 * (r == sender)] * w for r in range(w)], sender)
        verify(comm, case, case.start(comm)[1].wait(), exact)


def several_under_way_and_waited_for_in_any_order(comm, exact):
    cases = [make(collective, len(comm.ranks), seed=50) for collective in COLLECTIVES]
    started = [case.start(comm)[1] for case in cases]
    order = list(range(len(cases)))
    for i in order if comm.rank % 2 else reversed(order):
        if exact or cases[i].collective != "all_reduce":
            verify(comm, cases[i], started[i].wait(), exact)
        else:  # to compare bits is a collective of its own, for which all must be here
            assert torch.allclose(started[i].wait(), cases[i].expected(comm.rank))


def one_rank_waits_at_once_and_others_late(comm, exact):
    cases = [make(collective, len(comm.ranks), seed=60) for collective in COLLECTIVES[:3] * 2]
    late = []
    for case in cases:
        given, handle = case.start(comm)
        if comm.rank:
            late.append((case, handle))
            continue
        verify(comm, case, handle.wait().clone(), exact)
        given.zero_()  # may change after the wait, though others have not waited yet
    for case, handle in reversed(late):
        verify(comm, case, handle.wait(), exact)


def growing_and_shrinking_messages(comm, exact):
    for n in (1, 1000, 40_000, 20_000, 150_000, 3):
        for collective in COLLECTIVES:
            w = len(comm.ranks)
            case = Case(
                collective, torch.float32, [[n + (r if collective == "all_gather" else 0)] * w for r in range(w)], n
            )
            verify(comm, case, case.start(comm)[1].wait(), exact)


def groups_count_together(comm, exact):
    pairs = [comm.ranks[i : i + 2] for i in range(0, len(comm.ranks), 2)]
    every = [comm.ranks]
    pair, again, alone = comm.split(pairs), comm.split(every), comm.split([[r] for r in comm.ranks])
    assert pair.ranks in pairs
    assert pair.ranks[pair.rank] == again.ranks[again.rank] == alone.ranks[0] == comm.ranks[comm.rank]
    assert pair.sent is comm.sent
    assert pair.topology == comm.topology
    for seed, group in enumerate((pair, again, comm, pair, alone)):
        for collective in COLLECTIVES:
            case = make(collective, len(group.ranks), seed=seed)
            verify(group, case, case.start(group)[1].wait(), exact)
    inner = pair.split([pair.ranks])
    case = make("all_to_all", len(pair.ranks), seed=9)
    verify(inner, case, case.start(inner)[1].wait(), exact)
    for group in (inner, alone, again, pair):
        group.close()


def groups_are_used_by_threads_at_once(comm, exact):
    failures = []

    def use(group, seed):
        try:
            for i in range(20):
                case = make(COLLECTIVES[i % 3], len(group.ranks), seed=seed + i)
                verify(group, case, case.start(group)[1].wait(), exact)
        except BaseException as error:
            failures.append(error)

    groups = [comm.split([comm.ranks]) for _ in range(2)]
    threads = [threading.Thread(target=use, args=(group, 100 * i)) for i, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def counted_by_the_rule(case, ranks, me, topology):
    """Bytes by link; written apart from the code that is tested."""
    link, item = functools.partial(topology.link, ranks[me]), case.given(me).element_size()
    w, counts = len(ranks), Counter()
    if case.collective == "all_reduce":
        counts[link(ranks[(me + 1) % w])] += int(2 * (w - 1) / w * case.sizes_WW[me][0] * item)
    for other in range(w):
        if case.collective != "all_reduce" and other != me:
            size = case.sizes_WW[me][0] if case.collective == "all_gather" else case.sizes_WW[me][other]
            counts[link(ranks[other])] += size * item
    return counts


def bytes_are_counted(comm, exact):
    names = {"all_to_all": "a2a", "all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}
    for collective in COLLECTIVES:
        for seed, dtype in enumerate(DTYPES):
            case = make(collective, len(comm.ranks), dtype, seed)
            before = {link: comm.sent.total(names[collective], collective, link) for link in ("host", "network")}
            case.start(comm)[1].wait()
            want = counted_by_the_rule(case, comm.ranks, comm.rank, comm.topology)
            for link in ("host", "network"):
                assert comm.sent.total(names[collective], collective, link) - before[link] == want[link], (case, link)
    assert comm.sent.total() == sum(comm.sent.counts.values())


def transfers_are_reported(comm, exact):
    """Once each, when waited for, from split groups as well; none before its own rank and all others have sent."""
    group, found, asked = comm.split([comm.ranks]), [], []
    assert group.observer is comm.observer
    comm.observer.report = found.append
    for step, collective in enumerate(COLLECTIVES, 1):
        comm.observer.step, comm.observer.stage = step, collective
        case = make(collective, len(comm.ranks), seed=70)
        began_s = time.perf_counter()
        pending = case.start(group)[1]
        comm.observer.step, comm.observer.stage = 99, ""
        started_s = time.perf_counter()
        assert len(found) == step - 1, "not before it is waited for"
        pending.wait()
        asked.append((collective, step, began_s, started_s, time.perf_counter()))
    comm.observer.report = None
    make("all_gather", len(comm.ranks)).start(comm)[1].wait()
    for transfer, (*want, began_s, started_s, ended_s) in zip(found, asked, strict=True):
        purpose, collective, stage, step, begin_s, end_s, wait_s = transfer
        assert [collective, step] == [stage, step] == want
        assert purpose == {"all_to_all": "a2a", "all_gather": "gather", "reduce_scatter": "scatter"}.get(
            collective, "reduce"
        )
        assert began_s <= begin_s <= started_s
        assert begin_s <= end_s <= ended_s
        assert started_s <= wait_s <= ended_s
        assert transfer.waited[0] == wait_s
        assert transfer.waited[1] == max(wait_s, end_s)
    late = torch.tensor([time.perf_counter()], dtype=torch.float64)  # of one host, whose processes share this clock
    comm.observer.report = found.append
    if comm.rank == len(comm.ranks) - 1:
        time.sleep(0.02)
        late[0] = time.perf_counter()
    latest_s = float(comm.all_gather(late, [1] * len(comm.ranks), "late").wait().max())
    comm.observer.report = None
    assert found[-1].end_s >= latest_s
    group.close()


def random_calls(comm, exact, calls=1000):
    """In order of a seed: each starts or waits; up to eight are under way, waited for in each rank's own order."""
    draw, under_way = random.Random(7), []
    own = random.Random(comm.rank) if exact else draw  # else bits are compared, for which all must be at the same place
    for i in range(calls):
        collectives = COLLECTIVES if exact or not under_way else COLLECTIVES[:3]
        case = make(draw.choice(collectives), len(comm.ranks), draw.choice(DTYPES), i)
        under_way.append((case, case.start(comm)[1]))
        while under_way and (len(under_way) >= 8 or own.random() < 0.5):
            case, handle = under_way.pop(own.randrange(len(under_way)))
            verify(comm, case, handle.wait(), exact)
    for case, handle in under_way:
        verify(comm, case, handle.wait(), exact)


CHECKS = (
    uneven_sizes_of_every_dtype,
    empty_tensors,
    only_one_rank_sends,
    several_under_way_and_waited_for_in_any_order,
    one_rank_waits_at_once_and_others_late,
    growing_and_shrinking_messages,
    groups_count_together,
    groups_are_used_by_threads_at_once,
    bytes_are_counted,
    transfers_are_reported,
    random_calls,
)


TWOS = torch.ones(2)
MISMATCHES = {  # of three ranks: what all call but rank 1, what it calls, and what is said
    "other collectives": (
        lambda comm: comm.all_gather(TWOS, [2] * 3, "x").wait(),
        lambda comm: comm.all_reduce(TWOS, "x").wait(),
        "rank 0 calls all_gather of 'x' where rank 1 calls all_reduce of 'x'",
    ),
    "other purposes": (
        lambda comm: comm.all_reduce(TWOS, "ids").wait(),
        lambda comm: comm.all_reduce(TWOS, "pooled").wait(),
        "rank 0 calls all_reduce of 'ids' where rank 1 calls all_reduce of 'pooled'",
    ),
    "other dtypes": (
        lambda comm: comm.all_reduce(TWOS, "x").wait(),
        lambda comm: comm.all_reduce(TWOS.int(), "x").wait(),
        "all_reduce of 'x': rank 0 sends 2 elements of torch.float32 to rank 1, which expects 2 of torch.int32",
    ),
    "other lengths": (
        lambda comm: comm.all_reduce(TWOS, "x").wait(),
        lambda comm: comm.all_reduce(torch.ones(3), "x").wait(),
        "all_reduce of 'x': rank 0 sends 2 elements of torch.float32 to rank 1, which expects 3",
    ),
    "more sent than expected": (
        lambda comm: comm.all_to_all(torch.ones(6), [2] * 3, [2] * 3, "ids").wait(),
        lambda comm: comm.all_to_all(torch.ones(7), [2, 2, 3], [2] * 3, "ids").wait(),
        "all_to_all of 'ids': rank 1 sends 3 elements of torch.float32 to rank 2, which expects 2",
    ),
    "more expected than sent": (
        lambda comm: comm.all_gather(TWOS, [2] * 3, "x").wait(),
        lambda comm: comm.all_gather(TWOS, [2, 2, 5], "x").wait(),
        "all_gather of 'x': rank 2 sends 2 elements of torch.float32 to rank 1, which expects 5",
    ),
    "other groups": (
        lambda comm: comm.split([[0, 1, 2]]),
        lambda comm: comm.split([[0], [1], [2]]),
        "rank 0 calls split of '(0, 1, 2)' where rank 1 calls split of '(0,), (1,), (2,)'",
    ),
}


def every_check(comm, exact, calls):
    """All of them in one world, for those that take long to start."""
    for check in CHECKS[:-1]:
        check(comm, exact)
    random_calls(comm, exact, calls)
    return comm.rank, dict(comm.sent.counts)
