"""Batches and tables at the edge of what there can be: nothing at all, ids of any size, features in any order."""

from dataclasses import replace

import pytest
import torch
from parallel.shard.equal import SEED, Job, Step, assert_alike, given, look_up, make_sharded, make_steps, place
from parallel.shard.layout_cases import CASES
from problems import Keyed

from rowwise import (
    Adam,
    Embeddings,
    IdError,
    Jagged,
    Lamb,
    Pooling,
    RowType,
    RowWiseAdagrad,
    RowWiseAdam,
    Table,
    Tile,
    Topology,
)
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.plan import Plan
from rowwise.parallel.shard.ids import Router
from rowwise.parallel.shard.routes import make_routes
from rowwise.planning.planner.layouts import column_wise, row_wise, table_wise
from rowwise.tables.ops.jagged import permute

WORLD = Topology(hosts=2, devices=2)
TABLES = (
    Table(name="a", rows=40, dim=8, features=("a.0", "a.1"), optimizer=RowWiseAdagrad(lr=0.1, weight_decay=0.1)),
    Table(name="b", rows=500, dim=16, pooling=Pooling.WEIGHTED, optimizer=Lamb(lr=0.1)),
    Table(name="c", rows=30, dim=12, pooling=Pooling.SEQUENCE, optimizer=Adam(lr=0.1, weight_decay=0.1)),
    Table(name="d", rows=30, dim=20, pooling=Pooling.MEAN, optimizer=RowWiseAdam(lr=0.1), row_type=RowType.BF16),
)


def equal(layout, steps, elastic=False, change=lambda rank, batch: batch, tables=TABLES):
    """Trains with batches that each rank may change in ways that are not to matter."""

    def train(module, rank=None):
        for step in steps if rank is None else [step.of(rank) for step in steps]:
            batch = step.batch if rank is None else change(rank, step.batch)
            given(look_up(module, replace(step, batch=batch)), step).backward()
            module.update()

    whole = Embeddings(tables, seed=SEED)
    train(whole)
    assert_alike(whole, layout, WORLD, train, elastic=elastic)


@pytest.mark.few(5)
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("layout", CASES)
def test_nothing_is_a_batch(layout, elastic):
    """No samples on some ranks, none on all, samples without ids, and a batch as usual."""
    steps = make_steps(TABLES, [(7, 0, 0, 5), (0, 0, 0, 0), (3, 1, 0, 2), (4, 4, 4, 4)])
    no_ids = replace(steps[2].batch, values_N=torch.empty(0, dtype=torch.int64), weights_N=torch.empty(0))
    no_ids = replace(no_ids, lengths_FB=torch.zeros_like(no_ids.lengths_FB))
    steps[2] = Step(batch=no_ids, ups={"": steps[2].ups[""], "c": torch.empty(0, 12)}, sizes_W=steps[2].sizes_W)
    equal(layout, steps, elastic)


@pytest.mark.parametrize("layout", ["replicated", "interleaved rows", "columns beside rows", "table-row-wise"])
def test_ranks_may_have_features_in_other_orders_and_of_other_types(layout):
    """And others that no table knows, with ids of any kind."""

    def change(rank, batch):
        batch = permute(batch, batch.features[rank:] + batch.features[:rank])
        ids, lengths = (torch.int32 if rank % divisor else torch.int64 for divisor in (2, 3))
        strange = torch.tensor([-1, -(1 << 63), (1 << 63) - 1, 7][: batch.batch_size])
        strange_B = (torch.arange(batch.batch_size) < 4).long()
        if rank == 2:
            return batch
        return Jagged(
            features=("strange", *batch.features),
            values_N=torch.cat([strange.clamp(-9, 9) if ids is torch.int32 else strange, batch.values_N]).to(ids),
            lengths_FB=torch.cat([strange_B, batch.lengths_FB]).to(lengths),
            weights_N=torch.cat([torch.ones(len(strange)), batch.weights_N]),
        )

    equal(layout, make_steps(TABLES, [(9, 3, 5, 8), (2, 9, 1, 1)]), change=change)


def test_a_batch_of_another_class_and_weights_of_another_type():
    def change(rank, batch):
        weights_N = batch.weights_N.double() if rank else batch.weights_N
        return Keyed(batch.keys(), batch.values(), weights_N, batch.lengths())

    equal("row-wise", make_steps(TABLES, [(9, 3, 5, 8)] * 2), change=change)


def test_tensors_with_gaps():
    def change(rank, batch):
        return batch.map_tensors(lambda x: torch.stack([x, x], 1)[:, 0])

    equal("pinwheel", make_steps(TABLES, [(9, 3, 5, 8)]), change=change)


def test_a_rank_without_tiles_takes_part():
    plan = place(TABLES, "all on the last rank", WORLD)
    job = Job(tables=TABLES, plan=plan, steps=make_steps(TABLES, [(9, 3, 5, 8)]))
    whole = job.whole()

    def rank(comm):
        assert [held.tile.rank for held in make_sharded(TABLES, plan, comm).local_tiles()] == [3] * 4 * (comm.rank == 3)
        return whole.differences(comm)

    assert not any(run_threads(WORLD, rank, timeout_s=60))


# Tables of more rows than 32 bits can count: what they would hold is not needed to send ids there.

FAR = 1 << 33
WIDE = Table(name="wide", rows=FAR, dim=8, pooling=Pooling.WEIGHTED)
NARROW = Table(name="narrow", rows=100, dim=8)
IDS = [0, 5, (1 << 31) - 1, 1 << 31, (1 << 32) + 3, FAR - 1]


def routed(tables, tiles, batch):
    """What arrives on each rank, and the bytes that the first one sent for it."""
    plan = Plan(world=2, tiles=tiles)

    def rank(comm):
        router = Router(make_routes(tables, plan, comm.topology), comm)
        found = router.start(batch).finish()
        return found.received, comm.sent.total("ids"), {feature: count for _, feature, count in found.unknown}

    return run_threads(2, rank, timeout_s=30)


def wide_batch(ids=IDS, dtype=torch.int64):
    batch = Jagged.from_lists({"narrow": [[1], [2, 3]], "wide": [ids[:2], ids[2:]]})
    return replace(batch, values_N=batch.values_N.to(dtype), weights_N=torch.arange(3.0 + len(ids)))


@pytest.mark.parametrize("cut", [FAR // 2, (1 << 31) - 1, 1 << 31])
def test_ids_of_64_bits_arrive_in_the_range_that_holds_their_row(cut):
    ranges = [(0, cut), (cut, FAR)]
    tiles = [Tile(table="wide", rank=rank, rows=rows, cols=(0, 8)) for rank, rows in enumerate(ranges)]
    tiles = (*tiles, *table_wise(NARROW, 1))
    found = routed((NARROW, WIDE), tiles, wide_batch())
    for (received, _, _), (begin, end) in zip(found, ranges, strict=True):
        batch = permute(received, [name for name in received.features if name.startswith("wide")])
        assert len(batch.values_N) == 2 * sum(begin <= i < end for i in IDS)  # of both ranks
        by_id = dict(zip(batch.values_N.tolist(), batch.weights_N.tolist(), strict=True))
        assert by_id == {i - begin: 3.0 + IDS.index(i) for i in IDS if begin <= i < end}


def test_only_ranks_with_such_a_table_are_sent_64_bits():
    tables, batch = (NARROW, WIDE), wide_batch()
    one = routed(tables, table_wise(NARROW, 1) + table_wise(WIDE, 0), batch)
    other = routed(tables, table_wise(NARROW, 0) + table_wise(WIDE, 1), batch)
    assert one[0][1] == 4 * (2 + 3)  # lengths and ids of "narrow"
    assert other[0][1] == 4 * (2 + 2 * 6 + 6)  # lengths, ids and weights of "wide"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_32_bits_are_known_to_a_table_of_more_rows(dtype):
    batch = wide_batch([0, 5, (1 << 31) - 1], dtype)
    found = routed((NARROW, WIDE), table_wise(NARROW, 0) + row_wise(WIDE, [1, 0]), batch)
    assert [len(received.values_N) for received, _, _ in found] == [6, 6]


def test_an_id_past_a_wide_table_is_named_or_is_its_last_row():
    for ids, dtype in (([3, FAR], torch.int64), ([3, -1], torch.int32)):
        batch = wide_batch(ids, dtype)
        with pytest.raises(IdError, match=f"table 'wide': feature 'wide', sample 0, position 1: id {ids[1]} is not in"):
            routed((NARROW, WIDE), column_wise(WIDE, [0, 1]) + table_wise(NARROW, 0), batch)
        kind = Table(name="wide", rows=FAR, dim=8, unknown="last_row")
        found = routed((NARROW, kind), table_wise(NARROW, 0) + table_wise(kind, 1), batch)
        assert found[1][0].values_N.tolist() == [3, FAR - 1] * 2
        assert found[0][2] == {"wide": 1}
