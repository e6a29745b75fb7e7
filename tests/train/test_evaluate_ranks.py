"""Ranks that each score a part of every batch find what one finds; what one cannot do ends it on all."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import TIMEOUT_S, Ranked
from trainings import COLUMNS, fast, make_rows, with_cell

from rowwise import BatchError, DataError
from rowwise.base.errors import AgreedError, RowwiseError
from rowwise.ingest import Batcher, Batching, FrameReader
from rowwise.parallel.comm.thread import run_threads
from rowwise.tables.ops.jagged import permute
from rowwise.train.evaluate import ClickEvaluator, Slicing

CLOSE = {"rel": 1e-6, "abs": 1e-9, "nan_ok": True}


def scores_on(world, ranks, net):
    """Of all ranks, which have to be the same."""
    first, *others = run_threads(ranks, lambda comm: world.evaluator_of(comm, world.sharded(comm, net))(), TIMEOUT_S)
    assert all(str(other) == str(first) for other in others)
    return first


@settings(max_examples=8)
@given(rows=st.integers(1, 120), world=st.integers(2, 4), unit=st.sampled_from((1, 5, 256)), seed=st.integers(0, 9))
def test_scores_and_slices_are_those_of_one(rows, world, unit, seed):
    """Also where ranks have no samples of a batch, and where slices are chosen by what others hold."""
    run = Ranked(fast(), None, seed=seed, valid_rows=rows, unit=unit)
    net = run.net()
    one, all_ = scores_on(run, 1, net), scores_on(run, world, net)
    for task, values in one.tasks.items():
        assert all_.tasks[task] == pytest.approx(values, **CLOSE)
    assert len(one.slices) == len(all_.slices)
    for row, other in zip(one.slices, all_.slices, strict=True):
        assert (row.feature, row.value, row.task) == (other.feature, other.value, other.task)
        assert other.values == pytest.approx(row.values, **CLOSE)


def own_rows(comm, sizes, break_at=None):
    """Batches of each rank's own rows."""

    def batches():
        rows = make_rows(sizes[comm.rank], comm.rank)
        if comm.rank == 1 and break_at is not None:
            rows = with_cell(rows, "click", break_at, 7)
        reader = FrameReader(rows, split_rows=16, name="mine")
        return Batcher(reader, COLUMNS, Ranked(fast(), None).tables, Batching(size=8, shuffle=False))

    return batches


def test_ranks_with_rows_of_their_own():
    """However many each has."""
    world, sizes = Ranked(fast(), None), (30, 9, 41)
    net = world.net()

    def rank(comm):
        model = world.sharded(comm, net)
        return ClickEvaluator(
            model, own_rows(comm, sizes), COLUMNS.labels, world.settings.train, Slicing(("user",)), comm
        )()

    found = run_threads(3, rank, TIMEOUT_S)
    assert len({str(scores) for scores in found}) == 1
    assert found[0].tasks["click"]["count"] == sum(sizes)
    assert sum(row.values["count"] for row in found[0].slices if row.task == "buy") == sum(sizes)


@pytest.mark.parametrize("how", ["a bad row", "a bad row at once", "a bad logit", "a bad id"])
def test_what_one_rank_meets_ends_all_at_once(how):
    world = Ranked(fast(), None)
    net = world.net()
    bad = {"a bad row": 30, "a bad row at once": 3}.get(how)

    def rank(comm):
        model, batches = world.sharded(comm, net), own_rows(comm, (40, 40, 40), bad)
        if comm.rank == 1 and how == "a bad logit":
            with torch.no_grad():
                model.top.bias[1] = math.nan
        if comm.rank == 1 and how == "a bad id":
            good = batches

            def batches():
                for batch in good():
                    batch.sparse.values_N[0] = 999
                    yield batch

        with pytest.raises(RowwiseError) as raised:
            ClickEvaluator(model, batches, COLUMNS.labels, world.settings.train, None, comm)()
        return raised.value

    errors = run_threads(3, rank, TIMEOUT_S)
    assert "waited" not in str(errors)
    kind, want = {
        "a bad row": (DataError, "mine: row 30, column 'click': 7: expected a label of 0 or 1"),
        "a bad row at once": (DataError, "mine: row 3, column 'click': 7: expected a label of 0 or 1"),
        "a bad logit": (BatchError, "logit of sample 0, task 1 is nan"),
        "a bad id": (ValueError, "table 'user'"),
    }[how]
    assert isinstance(errors[1], kind)
    assert want in str(errors[1])
    for error in (errors[0], errors[2]):
        assert isinstance(error, AgreedError)
        assert "rank 1 (" in str(error)
        assert want in str(error)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("fault", ["dense", "labels", "a feature", "lengths"])
def test_a_malformed_batch_of_one_rank_ends_all(fault, number):
    """The first, by which slices are chosen, and a later one."""
    world = Ranked(fast(), None)
    net = world.net()

    def spoiled(batch):
        sparse = batch.sparse
        match fault:
            case "dense":
                return replace(batch, dense_BF=batch.dense_BF[:, 1:])
            case "labels":
                return replace(batch, labels_BK=batch.labels_BK[:, 1:])
            case "a feature":
                return replace(batch, sparse=permute(sparse, [f for f in sparse.features if f != "user"]))
        return replace(batch, sparse=replace(sparse, lengths_FB=sparse.lengths_FB + 1))

    def rank(comm):
        def batches():
            for k, batch in enumerate(own_rows(comm, (40, 40, 40))()):
                yield spoiled(batch) if (comm.rank, k) == (1, number) else batch

        evaluator = ClickEvaluator(
            world.sharded(comm, net), batches, COLUMNS.labels, world.settings.train, Slicing(("user",)), comm
        )
        with pytest.raises(RowwiseError) as raised:
            evaluator()
        return str(raised.value)

    assert all("rank 1" in said for said in run_threads(3, rank, TIMEOUT_S)[::2])
