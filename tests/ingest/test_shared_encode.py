"""Columns that are shared: batches hold repeated bags once, and are else those without, however they are made."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq
from repeated_rows import adjacent
from test_service import served

from rowwise import Table
from rowwise.ingest import (
    Batcher,
    Batching,
    BatchShard,
    Columns,
    Dense,
    FrameReader,
    GeneratorReader,
    ParquetReader,
    Sparse,
)
from rowwise.ingest.bags import combine_chunks, lists
from rowwise.ingest.block import RaggedColumn
from rowwise.ingest.native import PickedIds, RowMapping
from rowwise.ingest.service.local import Service, Workers
from rowwise.ingest.share import Share
from rowwise.ingest.warehouse.convert import convert
from rowwise.ingest.warehouse.layout import WarehouseLayout
from rowwise.tables.ops.jagged import permute

FEATURES = ("user", "name", "seen", "words", "one", "item")
USERS = FEATURES[:5]  # of which neighbours mostly have the same
TABLES = tuple(Table(name=name, rows=97, dim=4) for name in FEATURES)


def columns(shared=(), first=None):
    return Columns(
        labels=("label",),
        dense=(Dense(column="x"),),
        sparse=(
            Sparse(column="user", ids="direct"),
            Sparse(column="name"),
            Sparse(column="seen", first=first),
            Sparse(column="words", first=first),
            Sparse(column="one", ids="direct"),
            Sparse(column="item"),
        ),
        key="row",
        shared=shared,
    )


def make(first, count, session=4):
    """Missing rows, missing ids, empty lists, text, and bags that some neighbours have though their sessions differ."""
    rows = list(range(first, first + count))
    users = [r // session for r in rows]
    lists = [
        None if u % 5 == 0 else [[u, None, 3], [u, 3], [], [None], [7, 7, u % 2]][u % 4 : u % 4 + 1][0] for u in users
    ]
    return pa.table(
        {
            "row": pa.array(rows, pa.int64()),
            "session": pa.array([None if u % 7 == 3 else u for u in users], pa.int64()),
            "label": pa.array([r % 2 for r in rows], pa.int8()),
            "x": pa.array([r / 2 for r in rows], pa.float32()),
            "user": pa.array([u % 97 for u in users], pa.int32()),
            "name": pa.array([None if u % 3 == 0 else f"name {u // 2}" for u in users], pa.string()),
            "seen": pa.array(lists, pa.list_(pa.int64())),
            "words": pa.array(
                [bag and [None if i is None else str(i) for i in bag] for bag in lists], pa.list_(pa.large_string())
            ),
            "one": pa.array([5 for _ in rows], pa.uint8()),
            "item": pa.array([[r, r + 1][: r % 3] for r in rows], pa.large_list(pa.int16())),
        }
    )


def same(shared, plain):
    """The batches of `shared` are those of `plain`, and hold no bag twice in a row."""
    assert len(shared) == len(plain)
    for one, other in zip(shared, plain, strict=True):
        for name in ("dense_BF", "labels_BK", "keys_B"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert one.sparse.shared is not None
        one.sparse.shared.check()
        expanded = permute(one.sparse, FEATURES)
        assert torch.equal(expanded.values_N, other.sparse.values_N)
        assert torch.equal(expanded.lengths_FB, other.sparse.lengths_FB)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_batches_are_those_without(data):
    rows, split_rows = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 40))
    session = data.draw(st.sampled_from((1, 3, 10)))
    shared = tuple(data.draw(st.lists(st.sampled_from(FEATURES), min_size=1, unique=True)))
    first = data.draw(st.sampled_from((None, 1, 2)))
    world = data.draw(st.integers(1, 3))
    begin = data.draw(st.sampled_from((0.0, 0.3)))
    how = {
        "size": data.draw(st.integers(1, 40)),
        "seed": data.draw(st.integers(0, 3)),
        "shuffle": data.draw(st.booleans()),
        "keep_last": data.draw(st.booleans()),
        "together": data.draw(st.sampled_from((None, "session"))),
        "share": Share(begin=begin, end=data.draw(st.sampled_from((0.8, 1.0)))),
    }
    reader = GeneratorReader(lambda at, count: make(at, count, session), rows, split_rows=split_rows)
    for rank in range(world):
        batching = Batching(**how, shard=BatchShard(rank=rank, world=world, unit=data.draw(st.integers(1, 9))))
        found = list(Batcher(reader, columns(shared, first), TABLES, batching))
        same(found, list(Batcher(reader, columns((), first), TABLES, batching)))


@given(data=st.data())
def test_the_kernel_finds_what_numpy_does(data):
    """Rows that differ from the one before, in any order, of what is used of each."""
    table = make(0, data.draw(st.integers(0, 40)), data.draw(st.integers(1, 5)))
    order = data.draw(st.none() | st.lists(st.integers(0, max(0, len(table) - 1)), max_size=len(table)))
    order_R = None if order is None else np.array(order, np.int64)
    first = data.draw(st.sampled_from((None, 1, 2)))
    names = data.draw(st.lists(st.sampled_from(FEATURES), min_size=1, unique=True))
    picked = [PickedIds(lists(combine_chunks(table[name])), order_R, first) for name in names]
    bags = [RaggedColumn(values_N=ids, offsets_R1=ends) for ids, ends in (p.mapped(RowMapping()) for p in picked)]
    begins_R = np.zeros(picked[0].rows, np.bool_)
    for one in picked:
        one.mark_changes(begins_R)
    assert np.array_equal(np.cumsum(begins_R), adjacent(bags))


def test_bags_of_a_session_are_held_once():
    reader = GeneratorReader(lambda at, count: make(at, count, 10), 400, split_rows=200)
    for shuffle, together in ((False, None), (True, "session")):
        how = Batching(size=100, shuffle=shuffle, together=together)
        for batch in Batcher(reader, columns(USERS), TABLES, how):
            held = batch.sparse.shared.jagged.batch_size
            assert held <= len(batch.keys_B) / 10 + (40 if shuffle else 2)  # rows of no session are by themselves
    alone = Batcher(reader, columns(USERS), TABLES, Batching(size=100))
    assert min(batch.sparse.shared.jagged.batch_size for batch in alone) > 60  # rows are not next to their like


def test_what_a_row_may_not_hold_is_found_in_shared_columns():
    """Of rows that are the same, the first one is named, as it is without."""
    table = make(0, 40, 10).set_column(4, "user", pa.array([1] * 20 + [200] * 20))
    found = []
    for shared in ((), USERS):
        with pytest.raises(Exception, match="0 to 96") as error:
            list(Batcher(FrameReader(table), columns(shared), TABLES, Batching(size=10, shuffle=False)))
        found.append(str(error.value))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("together", [None, "session"])
def test_a_service_gives_the_same(tmp_path, together):
    for index in range(2):
        pq.write_table(make(index * 500, 500), tmp_path / f"{index}.parquet", row_group_size=170)
    how = Batching(size=96, together=together)
    plain = list(Batcher(ParquetReader(tmp_path), columns(), TABLES, how))
    there = Batcher(ParquetReader(tmp_path), columns(USERS), TABLES, how)
    with Service(there.task, Workers(count=2)) as service:
        batches = list(served(there, service.client()))
    same(batches, plain)


def test_sessions_next_to_each_other_take_less_room(tmp_path):
    """Lists of a session are stored once where its rows are neighbours (RecD's first step)."""
    g = np.random.default_rng(0)
    sessions, rows = 1500, 15_000
    order = g.permutation(np.repeat(np.arange(sessions), rows // sessions))
    lists = g.integers(0, 1 << 40, (sessions, 20))
    log = pa.table(
        {
            "session": order,
            "at": np.arange(rows),
            "seen": pa.array(list(lists[order]), pa.list_(pa.int64())),
            "liked": pa.array(list(lists[order][:, ::-1]), pa.list_(pa.int64())),
        }
    )
    sizes = {}
    for name, by in (("as it came", None), ("by session", "session")):
        convert(FrameReader(log), tmp_path / name, WarehouseLayout(cluster_by=by, group_rows=1000))
        sizes[name] = sum(f.stat().st_size for f in (tmp_path / name).rglob("*.parquet"))
    assert sizes["as it came"] / sizes["by session"] > 3
