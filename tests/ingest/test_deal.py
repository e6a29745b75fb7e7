"""Ranks have parts of the one sequence of batches: together they have every row of it, at any number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ingest.test_batcher import COLUMNS, TABLES, check_rows, keys, make

from rowwise import SpecError
from rowwise.ingest import Batcher, Batching, GeneratorReader
from rowwise.ingest.batch_shard import BatchShard
from rowwise.ingest.share import Share
from rowwise.train.virtual import cut

SIZES = {
    "rows": st.integers(1, 60),
    "split_rows": st.integers(1, 25),
    "size": st.integers(1, 30),
    "seed": st.integers(0, 3),
    "shuffle": st.booleans(),
    "keep_last": st.booleans(),
    "ahead": st.sampled_from((0, 0, 2)),
    "share": st.sampled_from((Share(), Share(begin=0.3))),
}


def batcher(rows, split_rows, deal, position=None, **batching):
    reader = GeneratorReader(make, rows, split_rows=split_rows)
    return Batcher(reader, COLUMNS, TABLES, Batching(shard=deal, **batching), position)


@given(st.integers(0, 3000), st.integers(1, 9), st.sampled_from((1, 3, 256)))
def test_parts_are_consecutive_and_of_whole_units(rows, world, unit):
    parts = [BatchShard(rank=r, world=world, unit=unit).part(rows) for r in range(world)]
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == rows
    assert all(begin % unit == 0 or begin == rows for begin, _ in parts)
    units = [-(-(end - begin) // unit) for begin, end in parts]
    assert max(units) - min(units) <= 1


@given(st.integers(0, 20000), st.integers(1, 12), st.integers(1, 6))
def test_parts_are_runs_of_virtual_shards(rows, world, each):
    sizes_V = cut(rows, world * each)
    for rank in range(world):
        begin, end = BatchShard(rank=rank, world=world).part(rows)
        assert end - begin == sum(sizes_V[rank * each : (rank + 1) * each])


@given(**SIZES, world=st.integers(1, 5), unit=st.integers(1, 7))
def test_all_ranks_together_have_the_batches_of_one(rows, split_rows, world, unit, **how):
    whole = batcher(rows, split_rows, BatchShard(), **how)
    deals = [BatchShard(rank=rank, world=world, unit=unit) for rank in range(world)]
    ranks = [batcher(rows, split_rows, deal, **how) for deal in deals]
    for _ in range(2):
        for one, *parts in zip(whole, *ranks, strict=True):
            assert keys(parts) == keys([one])
            for deal, part in zip(deals, parts, strict=True):
                check_rows(part)
                begin, end = deal.part(len(keys([one])))
                assert len(keys([part])) == end - begin
                assert part.sparse.features == one.sparse.features
                assert part.dense_BF.dtype == torch.float32
            assert {str(rank.state()) for rank in ranks} == {str(whole.state())}
        assert {str(rank.state()) for rank in ranks} == {str(whole.state())}


@pytest.mark.slow
@given(**SIZES, worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4), stops=st.lists(st.integers(0, 9)))
def test_going_on_at_another_world_size_repeats_and_loses_nothing(rows, split_rows, worlds, stops, **how):
    whole = batcher(rows, split_rows, BatchShard(), **how)
    expected = [keys([batch]) for _ in range(3) for batch in whole]
    found, position = [], None
    for world, stop in zip([*worlds, 1], [*stops[: len(worlds)], *[99] * (len(worlds) + 1)], strict=False):
        deals = [BatchShard(rank=rank, world=world, unit=2) for rank in range(world)]
        ranks = [batcher(rows, split_rows, deal, position, **how) for deal in deals]
        left = stop
        while left and ranks[0].state().epoch < 3:
            parts_of = [iter(rank) for rank in ranks]
            while left:
                parts = [next(parts, None) for parts in parts_of]
                if parts[0] is None:
                    assert parts == [None] * world
                    break
                found.append(keys(parts))
                left -= 1
            for parts in parts_of:
                parts.close()
        position = ranks[0].state()
    while position.epoch < 3:
        rest = batcher(rows, split_rows, BatchShard(), position, **how)
        found += [keys([batch]) for batch in rest]
        position = rest.state()
    assert found == expected


def test_only_own_rows_are_kept():
    """What a rank puts in order and holds is its part, but for a batch that no split has filled yet."""
    deal = BatchShard(rank=1, world=4, unit=1)
    spans = list(deal.spans(range(3, 50), 5, 8, last=False))
    assert [(s.begin, s.end) for s in spans] == [(3, 3), *((b + 2, b + 4) for b in range(6, 46, 8)), (46, 50)]
    assert [s.after for s in spans] == [*range(6, 50, 8), 50]
    assert [s.full for s in spans] == [True] * 6 + [False]
    assert [(s.begin, s.end) for s in deal.spans(range(46, 50), 0, 8, last=True)] == [(47, 48)]


@pytest.mark.parametrize("wrong", [{"rank": 1}, {"rank": -1, "world": 2}, {"unit": 0}, {"world": 0}])
def test_a_deal_that_cannot_be(wrong):
    with pytest.raises(SpecError, match="0 to world -"):
        BatchShard(**wrong)


def test_few_blocks_leave_ranks_without_rows():
    assert [BatchShard(rank=r, world=4).part(300) for r in range(4)] == [(0, 0), (0, 256), (256, 256), (256, 300)]
