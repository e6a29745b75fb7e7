"""Two towers on several ranks learn from, and are ranked among, the items of all ranks: as one process does."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowwise import (
    Batch,
    BatchError,
    Embeddings,
    ItemFrequency,
    Jagged,
    Plan,
    Sgd,
    Table,
    in_batch_bpr,
    in_batch_softmax,
)
from rowwise.base.errors import AgreedError
from rowwise.models.two_tower import Tower, TwoTower
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import shard
from rowwise.planning.planner import row_wise, table_wise
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import InBatch
from rowwise.train.retrieve import RetrievalEvaluator
from rowwise.train.settings import DenseSgd, Training
from rowwise.train.step import StepContext, step
from rowwise.train.virtual import split

TIMEOUT_S = 60
USERS, ITEMS = 30, 12
TABLES = (
    Table(name="user", rows=USERS, dim=4, optimizer=Sgd(lr=0.5)),
    Table(name="item", rows=ITEMS, dim=4, optimizer=Sgd(lr=0.5)),
)


def make_towers():
    torch.manual_seed(0)
    user = Tower(Embeddings([TABLES[0]], seed=1), 1, (6, 5))
    return TwoTower(user, Tower(Embeddings([TABLES[1]], seed=2), 1, (5,)), temperature=0.5)


def make_batch(count, seed):
    generator = torch.Generator().manual_seed(seed)
    user_B, item_B = (torch.randint(0, most, (count,), generator=generator) for most in (USERS, ITEMS))
    return Batch(
        dense_BF=torch.randn(count, 2, generator=generator),
        sparse=Jagged.from_lists({"user": [[u] for u in user_B.tolist()], "item": [[i] for i in item_B.tolist()]}),
        labels_BK=(torch.rand(count, 1, generator=generator) < 0.7).float(),
    )


def sharded(comm, towers):
    world = len(comm.ranks)
    tiles = (*row_wise(TABLES[0], list(range(world))), *table_wise(TABLES[1], world - 1))
    return shard(copy.deepcopy(towers), Plan(world=world, tiles=tiles), comm)


def sizes_of(total, world, seed):
    """Sizes of the ranks' parts; some have none."""
    generator = torch.Generator().manual_seed(seed)
    ends = sorted(torch.randint(0, total + 1, (world - 1,), generator=generator).tolist())
    return [end - begin for begin, end in zip([0, *ends], [*ends, total], strict=True)]


def trained(comm, towers, loss, *, hardest, correct):
    """Losses of steps, and all parameters, rows and buffers after them."""
    model = sharded(comm, towers)
    frequency = ItemFrequency(bits=8) if correct else None
    objective = InBatch(model, "item", frequency, loss, hardest=hardest, comm=comm)
    context = StepContext.create(model, objective, Training(optimizer=DenseSgd(lr=0.2)), Breakdown(), comm)
    losses = []
    for number in range(1, 6):
        sizes = sizes_of(20, len(comm.ranks), number)
        losses.append(step(context, [split(make_batch(20, number), sizes)[comm.rank]], number).loss)
    buffers = [b.clone() for b in (frequency.buffers() if correct else ())]
    asked, known = ([make_batch(20, n) for n in numbers] for numbers in ((11, 12), (1, 2)))

    def parts(batches):
        return [split(batch, sizes_of(20, len(comm.ranks), k + 3))[comm.rank] for k, batch in enumerate(batches)]

    evaluator = RetrievalEvaluator(
        model,
        "item",
        train_batches=partial(parts, known),
        query_batches=partial(parts, asked),
        task="met",
        ks=(1, 3),
        comm=comm,
    )
    vectors = model.vectors(make_batch(9, 50) if comm.rank == 0 else make_batch(0, 50))
    return losses, buffers, evaluator().tasks["met"], [x.detach() for x in vectors]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    world=st.sampled_from((2, 3)),
    loss=st.sampled_from((in_batch_softmax, in_batch_bpr)),
    hardest=st.sampled_from((None, 2)),
    correct=st.booleans(),
)
def test_ranks_train_and_rank_as_one(world, loss, hardest, correct):
    towers = make_towers()
    work = partial(trained, towers=towers, loss=loss, hardest=hardest, correct=correct)
    (one,) = run_threads(1, work, TIMEOUT_S)
    ranks = run_threads(world, work, TIMEOUT_S)
    for losses, buffers, scores, _ in ranks:
        assert losses == pytest.approx(one[0], rel=1e-5)
        for mine, wanted in zip(buffers, one[1], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
        assert scores == pytest.approx(one[2], rel=1e-5)
    for mine, wanted in zip(ranks[0][3], one[3], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_a_sample_of_two_items_ends_all_ranks():
    towers = make_towers()
    good, bad = make_batch(6, 0), make_batch(6, 0)
    bad = Batch(
        dense_BF=bad.dense_BF,
        sparse=Jagged.from_lists({"user": [[1]] * 6, "item": [[2]] * 5 + [[2, 3]]}),
        labels_BK=bad.labels_BK,
    )

    def rank(comm):
        batches = [bad if comm.rank == 1 else good]
        evaluator = RetrievalEvaluator(
            sharded(comm, towers),
            "item",
            train_batches=lambda: batches,
            query_batches=lambda: batches,
            task="met",
            comm=comm,
        )
        model = sharded(comm, towers)
        context = StepContext.create(model, InBatch(model, "item", None, comm=comm), Training(), Breakdown(), comm)
        for work in (evaluator, partial(step, context, batches, 1)):
            with pytest.raises((BatchError, AgreedError), match="feature 'item' has 2"):
                work()

    run_threads(3, rank, TIMEOUT_S)
