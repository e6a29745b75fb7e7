"""A run with steps in flight is the run of one step after another: same bits, same errors, the same step to end at."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from counting import Counting
from msgspec import structs
from ranked import ELASTIC, ELASTIC_ROWS, STATEFUL, TIMEOUT_S, Ranked, tensor_bits, train
from torch import nn
from trainings import bits, fast, left

from rowwise import IdError, Jagged, Plan, Pooling, Table, make_embeddings
from rowwise.base.errors import AgreedError, BatchError
from rowwise.ingest import Batcher
from rowwise.parallel.comm.group import TransportComm
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.planning.planner import row_wise, table_wise
from rowwise.tables.embedding import Embeddings
from rowwise.tables.idmaps import HashIds
from rowwise.train.settings import DenseAdam, Log, Saving

DEPTHS = (2, 3, 5)


class Mapped(nn.Module):
    """A model whose ids pass a map."""

    def __init__(self, tables) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = make_embeddings(tables, seed=0)
        self.top = nn.Linear(2 + sum(table.dim for table in tables), 2)

    def forward(self, batch):
        vectors = self.embeddings(batch.sparse)
        return self.top(torch.cat((batch.dense_BF, vectors.values()), 1))


class Rewrites(Mapped):
    """A model that looks up a batch that it makes of the one it gets."""

    def forward(self, batch):
        return super().forward(replace(batch, sparse=replace(batch.sparse)))


def what_is_left(folder, world, depth, **settings):
    run = make_run(folder / str(depth), depth=depth, **settings)
    ranks = train(run, world)
    found = left(run.folder)
    if world > 1:
        del found["rng/torch"]  # ranks that are threads share one generator
    return found, [trainer._context.model.embeddings.unknown_ids for trainer in ranks]


def make_run(folder, *, depth, accumulate=1, elastic=False, staleness=0, kind=Ranked, **settings):
    how = {
        "epochs": 2,
        "accumulate": accumulate,
        "pipeline_depth": depth,
        "staleness": staleness,
        "optimizer": DenseAdam(lr=0.01),
    }
    if elastic:
        how |= ELASTIC
        settings |= ELASTIC_ROWS
    run = fast(train=how, evaluate={"every": 3}, save=Saving(every=2, keep=2), log=Log(every=2, window=3))
    return kind(run, folder, **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("where", ["on disk", 0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_any_depth_leaves_what_one_step_after_another_leaves(tmp_path, world, depth, where, accumulate):
    how = {"accumulate": accumulate, "dropout": 0.2 if world == 1 else 0.0}
    how |= {"on_disk": ("user", "words"), "cache_rows": 3} if where == "on disk" else {"plan": where}
    assert what_is_left(tmp_path, world, depth, **how) == what_is_left(tmp_path, world, 1, **how)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "depth"), [(2, 2), (2, 3), (4, 2)])
def test_virtual_shards_are_routed_ahead_to_the_bit(tmp_path, world, depth):
    how = {"elastic": True, "tables": STATEFUL, "dropout": 0.0}
    assert what_is_left(tmp_path, world, depth, **how) == what_is_left(tmp_path, world, 1, **how)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::rowwise.UnknownIdWarning")
@pytest.mark.parametrize("kind", [Mapped, Rewrites])
@pytest.mark.parametrize("depth", [2, 3])
def test_ids_that_are_mapped_and_batches_that_a_model_makes(tmp_path, kind, depth):
    class WithModel(Ranked):
        def net(self):
            return kind(self.tables)

        def tiles(self, world):
            stored = structs.replace(self.tables[0], rows=5, id_map=None)
            tiles = (*row_wise(stored, list(range(world))), *table_wise(self.tables[1], 0))
            return Plan(world=world, tiles=tiles)

    user = Table(name="user", rows=10, dim=4, id_map=HashIds(rows=5), unknown="last_row")
    tables = (user, Table(name="words", rows=17, dim=3, pooling=Pooling.MEAN))
    how = {"kind": WithModel, "tables": tables}
    assert what_is_left(tmp_path, 2, depth, **how) == what_is_left(tmp_path, 2, 1, **how)


@pytest.mark.slow
def test_ids_of_the_next_step_travel_beside_vectors_and_gradients():
    def rank(comm, depth):
        calls = []
        run = make_run(None, depth=depth, valid=False, dropout=0.0, count=64, plan=1)
        trainer = run.on(TransportComm(Counting(comm.transport, calls), comm.topology, comm.rank), run.net())
        steps = []
        trainer._on_step = lambda _: (steps.append(list(calls)), calls.clear())
        trainer.run()
        return steps[4]

    alone, ahead = (run_threads(2, partial(rank, depth=depth), TIMEOUT_S)[0] for depth in (1, 2))
    step, counts, ids = "all_gather of step", "all_to_all of counts", "all_to_all of ids"
    pooled, own = (
        "all_to_all of pooled",
        ["all_reduce of dense", "all_to_all of gradients", step, "all_reduce of dense"],
    )
    assert alone == [step, counts, ids, pooled, *own]
    assert ahead == [step, counts, pooled, ids, *own]


class Broken(Ranked):
    """A run whose rank 1 gets a broken third batch."""

    how = ""

    def batches_of(self, comm, position=None):
        batches = super().batches_of(comm, position)
        return Breaks(batches, self.how) if comm.rank == 1 else batches


class Breaks:
    def __init__(self, inner: Batcher, how: str) -> None:
        self.inner, self.how, self.splits, self.state = inner, how, inner.splits, inner.state

    def __iter__(self):
        for number, batch in enumerate(self.inner, 1):
            yield self.broken(batch) if number == 3 else batch

    def broken(self, batch):
        match self.how:
            case "read":
                raise OSError("the disk is gone")
            case "id":
                return replace(batch, sparse=replace(batch.sparse, values_N=batch.sparse.values_N + 1000))
            case "dense":
                return replace(batch, dense_BF=batch.dense_BF[:, :1])
            case "labels":
                return replace(batch, labels_BK=batch.labels_BK.fill_(float("nan")))
        raise AssertionError(self.how)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["read", "id", "dense", "labels"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_error_of_a_batch_ends_the_run_after_the_same_step_for_any_depth(tmp_path, how, on_disk):
    class Kind(Broken):
        pass

    Kind.how = how
    found = {}
    for depth in (1, *DEPTHS):
        run = make_run(
            tmp_path / str(depth),
            depth=depth,
            kind=Kind,
            dropout=0.0,
            on_disk=("user",) if on_disk else (),
            cache_rows=4,
        )
        net, ranks = run.net(), {}

        def rank(comm, run=run, net=net, ranks=ranks):
            trainer = run.on(comm, net)
            try:
                trainer.run()
            except Exception as error:
                ranks[comm.rank] = trainer.progress.step, type(error), str(error).partition(str(run.folder))[0]
            assert not trainer._context.tables[0].staged
            return [bits(tile.rows) for tile in trainer._context.tables[0].local_tiles() if tile.tile.tier != "disk"]

        rows = run_threads(2, rank, TIMEOUT_S)
        found[depth] = rows, ranks
    assert len(found[1][1]) == 2
    # A group is read one step before its header is sent, so an unreadable third batch ends the run before the second.
    assert {step for step, *_ in found[1][1].values()} == {1 if how == "read" else 2}
    for depth in DEPTHS:
        assert found[depth] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 4])
def test_a_run_that_is_resumed_in_the_middle_of_a_look_ahead_leaves_the_same(tmp_path, depth):
    how = {"plan": 0, "dropout": 0.0, "on_disk": ("user", "words"), "cache_rows": 3, "depth": depth}
    whole = make_run(tmp_path / "whole", **how)
    train(whole, 2)
    stopped = make_run(tmp_path / "stopped", **how)

    def stop(comm, trainer):
        trainer._on_step = lambda shown: trainer.stop() if shown.progress.step == 4 else None

    first = train(stopped, 2, prepare=stop)
    assert 4 <= first[0].progress.step <= 4 + depth
    train(stopped, 2, which="last")
    assert tensor_bits(whole.folder) == tensor_bits(stopped.folder)


def test_vectors_that_nothing_uses_are_received_before_the_next_lookup():
    """Else messages of a rank whose model leaves them out would pile up."""
    tables = (Table(name="a", rows=9, dim=4),)

    def rank(comm):
        plan = Plan(world=2, tiles=row_wise(tables[0], [0, 1]))
        sharded, whole = ShardedEmbeddings(tables, plan, comm), Embeddings(tables, seed=3)
        sharded.fill(3)
        batch = one_batch()
        for _ in range(200):
            sharded(batch)
        assert torch.equal(sharded(batch).values(), whole(batch).values())
        sharded.discard()

    run_threads(2, rank, TIMEOUT_S)


def one_batch():
    return Jagged(features=("a",), values_N=torch.tensor([1, 8, 3]), lengths_FB=torch.tensor([2, 1], dtype=torch.int32))


def test_an_error_of_a_batch_that_is_dropped_is_not_raised():
    tables = (Table(name="a", rows=9, dim=4),)

    def rank(comm):
        sharded = ShardedEmbeddings(tables, Plan(world=2, tiles=row_wise(tables[0], [0, 1])), comm)
        good = one_batch()
        bad = replace(good, values_N=good.values_N + 100 * comm.rank)
        sharded.prefetch(bad)
        sharded.prefetch(good)
        sharded.drop_ahead()
        sharded(good).wait()
        sharded.prefetch(bad)
        sharded.prefetch(good)
        sharded.advance()
        error = IdError if comm.rank else AgreedError
        with pytest.raises(error, match=r"id 1.."):
            sharded(bad)
        sharded(good).wait()
        sharded.prefetch(good)
        failed = BatchError("no batch")
        if comm.rank:
            sharded.prefetch_failed(failed)
        else:
            sharded.prefetch(bad)
        sharded(good).wait()
        with pytest.raises(BatchError if comm.rank else AgreedError, match="no batch"):
            sharded.abort_forward(failed) if comm.rank else sharded(bad)

    run_threads(2, rank, TIMEOUT_S)


def test_a_batch_that_is_skipped_leaves_no_collective():
    tables = (Table(name="a", rows=9, dim=4),)

    def rank(comm):
        sharded = ShardedEmbeddings(tables, Plan(world=2, tiles=row_wise(tables[0], [0, 1])), comm)
        skipped, taken = one_batch(), one_batch()
        for batch in (skipped, taken):
            sharded.prefetch(batch)
        vectors = sharded(taken).matrix_BS
        assert not sharded.is_ahead(skipped)
        assert torch.equal(sharded(skipped).matrix_BS, vectors)

    run_threads(2, rank, TIMEOUT_S)
