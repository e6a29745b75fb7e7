"""`update_in_backward` on several ranks: the bits of `update()`, errors on all ranks, and means inside of DDP."""

from functools import partial

import pytest
import torch
from parallel.shard.equal import make_sharded, make_steps, place, rows_apart, train
from parallel.shard.layout_cases import CASES
from problems import OPTIMIZERS
from torch import nn

from rowwise import Embeddings, GradientError, Jagged, Plan, Pooling, Sgd, SpecError, Table, Topology
from rowwise.base.errors import AgreedError
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.apply import shard
from rowwise.planning.planner.layouts import row_wise
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.settings import DenseSgd, Training
from rowwise.train.step import StepContext

WORLD = Topology(hosts=2, devices=2)


def make_tables(optimizer=OPTIMIZERS[3]):
    return [
        Table(name="sum", rows=30, dim=8, features=("a", "b"), optimizer=optimizer),
        Table(name="mean", rows=30, dim=8, pooling=Pooling.MEAN, optimizer=optimizer),
        Table(name="sequence", rows=30, dim=8, pooling=Pooling.SEQUENCE, optimizer=optimizer),
    ]


@pytest.mark.parametrize("layout", CASES)
def test_bits_are_those_of_one_device(layout):
    tables = make_tables()
    steps = make_steps(tables, [[3, 4, 0, 5], [2, 2, 2, 2], [1, 6, 2, 0]])
    limit = 1e-5  # replicated tables may be summed in another order
    whole = Embeddings(tables, seed=3)
    for _ in train(whole, steps):
        pass

    def rank(comm):
        module = make_sharded(tables, place(tables, layout, WORLD), comm, update_in_backward=True)
        for step in steps:
            part = step.of(comm.rank)
            vectors = module(part.batch)
            outs = {"": vectors.matrix_BS} | dict(vectors.sequences)
            sum((outs[name] * part.ups[name]).sum() for name in outs).backward()
            assert not module.has_gradients
        return list(rows_apart(module, whole, limit))

    assert not [text for texts in run_threads(WORLD, rank, timeout_s=60) for text in texts]


def row_wise_plan(tables, world=2):
    return Plan(world=world, tiles=tuple(tile for table in tables for tile in row_wise(table, range(world))))


def test_a_gradient_of_one_rank_that_is_not_finite_stops_all():
    tables = [Table(name="t", rows=8, dim=4)]

    def rank(comm):
        module = make_sharded(tables, row_wise_plan(tables), comm, update_in_backward=True)
        before = module.local_tiles()[0].rows.clone()
        batch = Jagged.from_lists({"t": [[1], [6]]})
        factor = torch.tensor(torch.nan if comm.rank else 1.0)
        with pytest.raises(
            GradientError if comm.rank else AgreedError, match="rank 1" if comm.rank == 0 else "table 't'"
        ):
            (module(batch).matrix_BS.sum() * factor).backward()
        assert torch.equal(module.local_tiles()[0].rows, before)
        module(batch).matrix_BS.sum().backward()
        return module.local_tiles()[0].rows - before

    wanted = Embeddings(tables, seed=3)
    start = wanted.weights("t").clone()
    whole = Jagged.from_lists({"t": [[1], [6], [1], [6]]})
    wanted(whole).matrix_BS.sum().backward()
    wanted.update()
    torch.testing.assert_close(torch.cat(run_threads(2, rank)), wanted.weights("t") - start)


def test_a_backward_that_raises_on_all_ranks_changes_nothing():
    tables = make_tables()
    steps = make_steps(tables, [[3, 4], [5, 2]])
    whole = Embeddings(tables, seed=3)
    for _ in train(whole, steps[1:]):
        pass

    def fail(_gradient):
        raise ArithmeticError("a backward")

    def rank(comm):
        module = make_sharded(tables, row_wise_plan(tables), comm, update_in_backward=True)
        leaf = torch.ones((), requires_grad=True)
        leaf.register_hook(fail)
        vectors = module(steps[0].of(comm.rank).batch)
        with pytest.raises(ArithmeticError):
            (vectors.matrix_BS.sum() + vectors["sequence"].sum() + leaf).backward()
        for _ in train(module, [steps[1].of(comm.rank)]):
            pass
        return list(rows_apart(module, whole, 1e-6))

    assert run_threads(2, rank) == [[], []]


def test_shard_keeps_the_setting_and_tells_ddp_what_to_leave_alone():
    tables = [Table(name="t", rows=8, dim=4, optimizer=Sgd(lr=0.1))]
    models = [nn.Sequential(nn.Sequential(Embeddings(tables, update_in_backward=True))) for _ in range(2)]

    def rank(comm):
        model = shard(models[comm.rank], row_wise_plan(tables), comm)
        assert model[0][0].update_in_backward
        return model._ddp_params_and_buffers_to_ignore

    assert run_threads(2, rank) == [["0.0.t[0:4, 0:4]"], ["0.0.t[4:8, 0:4]"]]


def test_means_over_ranks():
    """A row moves by the mean of the ranks' gradients; trained per-id weights, which are no rows, get all of theirs."""
    tables = [Table(name="t", rows=8, dim=4, pooling=Pooling.WEIGHTED, optimizer=Sgd(lr=0.1))]

    def rank(comm, mean):
        module = make_sharded(tables, row_wise_plan(tables), comm)
        module.mean_over_ranks = mean
        before = module.local_tiles()[0].rows.clone()
        weights = torch.tensor([1.0, 2.0], requires_grad=True)
        lengths = torch.tensor([1, 1])
        batch = Jagged(features=("t",), values_N=torch.tensor([1, 6]), lengths_FB=lengths, weights_N=weights)
        (module(batch).matrix_BS.sum() * (1 + comm.rank)).backward()
        module.update()
        return module.local_tiles()[0].rows - before, weights.grad

    sums, means = (run_threads(2, partial(rank, mean=mean)) for mean in (False, True))
    for (moved, grad), (moved_by_mean, grad_of_mean) in zip(sums, means, strict=True):
        torch.testing.assert_close(moved_by_mean, moved / 2)
        assert torch.equal(grad_of_mean, grad)


def test_vectors_take_the_type_of_the_model():
    tables = make_tables()
    steps = make_steps(tables, [[3, 4]])

    def rank(comm):
        model = nn.Sequential(Embeddings(tables)).double()
        module = shard(model, row_wise_plan(tables), comm)[0]
        vectors = module(steps[0].of(comm.rank).batch)
        return vectors.matrix_BS.dtype, vectors["sequence"].dtype, module.local_tiles()[0].rows.dtype

    assert set(run_threads(2, rank)) == {(torch.float64, torch.float64, torch.float32)}


def test_a_trainer_of_rowwise_takes_sums():
    tables = [Table(name="t", rows=8, dim=4)]

    def rank(comm):
        model = nn.Sequential(make_sharded(tables, row_wise_plan(tables), comm))
        model[0].mean_over_ranks = True
        with pytest.raises(SpecError, match=r"table 't': mean_over_ranks=True.*expected mean_over_ranks=False"):
            StepContext.create(model, Clicks(model), Training(optimizer=DenseSgd(lr=0.1)), Breakdown(), comm=comm)

    run_threads(2, rank)
