"""Every way to travel does what the interface says, and trouble on one rank is a named error on all, never a hang."""

import threading

import pytest
import torch
from comm_ranks import differ, gather
from comm_suite import CHECKS, MISMATCHES
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import AgreedError, GradientError, IdError, PeerError, SpecError
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import (
    RankStatus,
    all_gather_uneven,
    broadcast_object,
    gather_object,
    raise_if_any_failed,
    raise_if_any_rank_failed,
)
from rowwise.parallel.comm.thread import run_threads
from rowwise.tables.spec import Topology

WORLDS = {
    "solo": None,
    "threads 1": Topology(),
    "threads 2": Topology(devices=2),
    "threads 3": Topology(hosts=3),
    "threads 4": Topology(devices=4),
    "threads 2 x 2": Topology(hosts=2, devices=2),
}


@pytest.mark.few(14)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", WORLDS)
def test_every_comm_passes_the_suite(world, check):
    topology = WORLDS[world]
    if topology is None:
        check(solo(), True)
    else:
        run_threads(topology, lambda comm: check(comm, True), timeout_s=60)


def test_results_come_in_rank_order():
    assert run_threads(4, lambda comm: (comm.rank, comm.ranks)) == [(r, (0, 1, 2, 3)) for r in range(4)]


def seen_by_all(function):
    """The error that each rank met."""
    errors = {}

    def run(comm):
        try:
            function(comm)
        except BaseException as error:
            errors[comm.rank] = error
            raise

    with pytest.raises(BaseException) as raised:  # noqa: PT011 - what it is, is the caller's question
        run_threads(3, run, 60.0)
    return raised.value, errors


def test_a_rank_that_fails_is_named_by_those_that_wait_and_its_own_error_is_raised():
    def function(comm):
        if comm.rank == 2:
            raise IdError("id 7 of feature 'a'")
        gather(comm)

    raised, errors = seen_by_all(function)
    assert raised is errors[2]
    assert raised.__notes__ == ["raised by rank 2"]
    for rank in (0, 1):
        want = f"rank {rank} waits for all_gather of 'x', which rank 2 never called: it failed with IdError: id 7 of"
        assert isinstance(errors[rank], PeerError)
        assert str(errors[rank]).startswith(want)


def test_an_error_that_was_made_of_a_peers_is_not_the_one_raised():
    def function(comm):
        if comm.rank == 2:
            raise IdError("the cause")
        try:
            gather(comm)
        except PeerError as error:
            raise OSError("something else") from error

    assert isinstance(seen_by_all(function)[0], IdError)


def test_a_rank_that_ends_early_is_named():
    raised, _ = seen_by_all(lambda comm: comm.rank == 1 or gather(comm))
    assert "rank 0 waits for all_gather of 'x', which rank 1 never called: it has ended" in str(raised)


def test_a_rank_that_never_comes_is_named_after_the_time_limit():
    never = threading.Event()
    with pytest.raises(PeerError, match=r"rank 0 waited 0.2"):
        run_threads(2, lambda comm: never.wait(1) if comm.rank else gather(comm), timeout_s=0.2)


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_calls_that_do_not_match_are_named_on_every_rank(mismatch):
    _, errors = seen_by_all(lambda comm: differ(comm, mismatch))
    assert sorted(errors) == [0, 1, 2]
    for error in errors.values():
        assert isinstance(error, PeerError)
        assert MISMATCHES[mismatch][2] in str(error)


WRONG = {
    "runs that are not the tensor": (
        lambda c: c.all_to_all(torch.ones(3), [1, 1], [1, 1], "ids"),
        "rank 0: all_to_all of",
    ),
    "too few sizes": (lambda c: c.all_gather(torch.ones(3), [3], "x"), "expected one for each of the 2 ranks"),
    "a matrix": (lambda c: c.all_reduce(torch.ones(3, 3), "x"), "expected a flat tensor"),
    "a negative size": (lambda c: c.reduce_scatter(torch.ones(3), [4, -1], "x"), "expected a flat tensor"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_call_that_cannot_be_is_refused_before_anything_is_sent(wrong):
    call, want = WRONG[wrong]

    def function(comm):
        if comm.rank == 0:
            with pytest.raises(PeerError, match=want):
                call(comm)
        gather(comm)
        assert set(comm.sent.counts) == {("x", "all_gather", "host")}

    run_threads(2, function)


@pytest.mark.parametrize("groups", [[[0]], [[0], [0, 1]], [[1, 0]], [[0, 1], [2]]])
def test_groups_must_hold_every_rank_once(groups):
    with pytest.raises(SpecError, match=r"\(0, 1\) in one"):
        run_threads(2, lambda comm: comm.split(groups))


def test_backward_passes_that_exchange_do_not_wait_for_each_other():
    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return comm.all_reduce(x, "forward").wait()

        @staticmethod
        def backward(ctx, grad):
            return ctx.comm.all_reduce(grad, "backward").wait(), None

    def function(comm):
        x = torch.full((3,), float(comm.rank), requires_grad=True)
        Exchange.apply(x, comm).sum().backward()
        return x.grad.tolist()

    assert run_threads(4, function, timeout_s=20) == [[4.0] * 3] * 4


def test_ranks_that_are_all_well_say_so_in_one_small_gather():
    def function(comm):
        raise_if_any_rank_failed(comm, None, during="route")
        return dict(comm.sent.counts)

    assert run_threads(3, function) == [{("status", "all_gather", "host"): 16}] * 3


def test_one_rank_that_failed_is_an_error_on_all():
    def function(comm):
        raise_if_any_rank_failed(comm, IdError("id 7 of feature 'ü'") if comm.rank == 2 else None, during="route")

    raised, errors = seen_by_all(function)
    assert raised is errors[2]
    assert [type(errors[r]) for r in range(3)] == [AgreedError, AgreedError, IdError]
    assert str(errors[0]) == str(errors[1]) == "rank 2 (route): IdError: id 7 of feature 'ü'"


def test_all_ranks_that_failed_are_named_and_long_reasons_cut():
    def function(comm):
        raise_if_any_rank_failed(comm, IdError(f"{comm.rank}" * 5000) if comm.rank else None, during="route")

    raised, errors = seen_by_all(function)
    assert raised is errors[1]
    assert "rank 1 (route): IdError: 111" in str(errors[0])
    assert "; rank 2 (route): IdError: 222" in str(errors[0])
    assert len(str(errors[0])) < 2200


def test_an_error_of_one_rank_alone_is_raised():
    raise_if_any_rank_failed(solo(), None, during="route")
    with pytest.raises(IdError):
        raise_if_any_rank_failed(solo(), IdError("x"), during="route")


@given(st.integers(0, 1 << 40), st.integers(0, 7), st.booleans())
def test_a_rank_status_is_one_number(count, failed, stop):
    status = RankStatus(count, failed, stop)
    assert RankStatus.unpack(float(status.pack())) == status


def test_of_several_reasons_the_first_kind_is_raised():
    def function(comm):
        error = (None, GradientError("dense"), GradientError("the loss"))[comm.rank]
        statuses_W = [RankStatus(), RankStatus(failed=2), RankStatus(failed=1)]
        raise_if_any_failed(comm, statuses_W, error, during="step 3")

    raised, errors = seen_by_all(function)
    assert raised is errors[2]
    assert str(errors[0]) == str(errors[1]) == "rank 2 (step 3): GradientError: the loss"


def test_objects_and_uneven_tensors_travel():
    def function(comm):
        mine = {"rank": comm.rank, "more": [None] * comm.rank}
        told = gather_object(comm, mine, "a")
        tensors = all_gather_uneven(comm, torch.arange(comm.rank), "b")
        return told, broadcast_object(comm, mine, 1, "c"), [x.tolist() for x in tensors]

    wanted = [{"rank": rank, "more": [None] * rank} for rank in range(3)]
    for rank, (told, broadcast, tensors) in enumerate(run_threads(3, function)):
        assert told == (None if rank else wanted)
        assert broadcast == wanted[1]
        assert tensors == [[], [0], [0, 1]]
