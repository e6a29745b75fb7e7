"""Every row exactly once an epoch, in an order that the seed decides, and resumed with the same bits."""

import threading
import time
import weakref

import msgspec
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import DataError, SpecError, StateError, Table
from rowwise.ingest import Batcher, Batching, Columns, Dense, FrameReader, GeneratorReader, Position, Sparse
from rowwise.ingest.ahead import read_ahead
from rowwise.ingest.share import Share

COLUMNS = Columns(
    labels=("label",),
    dense=(Dense(column="x"),),
    sparse=(Sparse(column="id", ids="direct"), Sparse(column="bag")),
    weight="w",
    key="row",
    time="t",
)
TABLES = (Table(name="id", rows=10_000, dim=4), Table(name="bag", rows=97, dim=4))


def make(first, count):
    rows = list(range(first, first + count))
    return pa.table(
        {
            "row": pa.array(rows, pa.int64()),
            "label": pa.array([r % 2 for r in rows], pa.int8()),
            "x": pa.array([None if r % 5 == 0 else r / 2 for r in rows], pa.float32()),
            "id": pa.array([None if r % 7 == 0 else r for r in rows], pa.int32()),
            "bag": pa.array([None if r % 3 == 0 else [r, None, r + 1][: r % 4] for r in rows], pa.list_(pa.int64())),
            "w": pa.array([1 + r % 2 for r in rows], pa.float64()),
            "t": pa.array(rows, pa.timestamp("s")),
        }
    )


def batcher(rows, split_rows, *, position=None, **batching):
    reader = GeneratorReader(make, rows, split_rows=split_rows)
    return Batcher(reader, COLUMNS, TABLES, Batching(**batching), position)


@pytest.mark.parametrize(("width", "reads"), [(1, 4), pytest.param(4_000_000, 12, marks=pytest.mark.slow)])
def test_small_data_is_read_once_for_all_epochs(width, reads):
    drawn = []

    def make_wide(first, count):
        drawn.append(first)
        return make(first, count).append_column("wide", pa.array(["x" * width] * count, pa.string()))

    reader = GeneratorReader(make_wide, 80, split_rows=20)
    columns = msgspec.structs.replace(COLUMNS, sparse=(*COLUMNS.sparse, Sparse(column="wide")))
    settings = reader, columns, (*TABLES, Table(name="wide", rows=97, dim=4)), Batching(size=16, seed=3)
    mine = Batcher(*settings)
    drawn.clear()  # the reader has looked at the types
    epochs = [list(mine) for _ in range(3)]
    assert len(drawn) == reads
    for epoch, batches in enumerate(epochs):
        again = Batcher(*settings, msgspec.structs.replace(mine.state(), epoch=epoch, split=0, row=0))
        assert same(batches, list(again))


def parts(batch):
    sparse = batch.sparse
    tensors = [batch.dense_BF, batch.labels_BK, batch.weights_B, batch.keys_B, batch.times_B]
    return [*(tensor for tensor in tensors if tensor is not None), sparse.values_N, sparse.lengths_FB]


def keys(batches):
    return [key for batch in batches for key in batch.keys_B.tolist()]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y)
        for one, other in zip(a, b, strict=True)
        for x, y in zip(parts(one), parts(other), strict=True)
    )


def check_rows(batch):
    """All parts of a sample are of the row that its key names."""
    rows = batch.keys_B.tolist()
    assert batch.labels_BK.squeeze(1).tolist() == [r % 2 for r in rows]
    assert batch.dense_BF.squeeze(1).tolist() == [0 if r % 5 == 0 else r / 2 for r in rows]
    assert batch.weights_B.tolist() == [1 + r % 2 for r in rows]
    assert batch.times_B.tolist() == [r * 1_000_000 for r in rows]
    bags = [[] if r % 3 == 0 else [i for i in [r, None, r + 1][: r % 4] if i is not None] for r in rows]
    lengths = [0 if r % 7 == 0 else 1 for r in rows] + [len(bag) for bag in bags]
    assert batch.sparse.lengths_FB.tolist() == lengths
    ids = [r for r in rows if r % 7]
    assert batch.sparse.values_N[: len(ids)].tolist() == ids
    assert len(batch.sparse.values_N) == sum(lengths)


SIZES = {
    "rows": st.integers(1, 60),
    "split_rows": st.integers(1, 25),
    "size": st.integers(1, 30),
    "seed": st.integers(0, 5),
    "shuffle": st.booleans(),
    "keep_last": st.booleans(),
}


@given(**SIZES)
def test_every_row_once(rows, split_rows, size, **how):
    batches = list(batcher(rows, split_rows, size=size, **how))
    found = keys(batches)
    for batch in batches:
        check_rows(batch)
    assert [len(batch.labels_BK) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    if how["keep_last"]:
        assert sorted(found) == list(range(rows))
    else:
        assert len(found) == len(set(found)) == rows // size * size
    if not how["shuffle"]:
        assert found == list(range(len(found)))


@given(**SIZES, stop=st.integers(0, 80), depth=st.integers(0, 2), share=st.sampled_from((Share(), Share(begin=0.3))))
def test_resumed_is_uninterrupted(rows, split_rows, stop, depth, **how):
    whole = batcher(rows, split_rows, **how)
    expected = [*whole, *whole]
    first = batcher(rows, split_rows, ahead=depth, **how)
    given_so_far = []
    for _ in range(2):
        for batch in first:
            given_so_far.append(batch)
            if len(given_so_far) == stop:
                break
        if len(given_so_far) == stop:
            break
    saved = msgspec.json.decode(msgspec.json.encode(first.state()), type=Position)
    second = batcher(rows, split_rows, position=saved, **how)
    while second.state().epoch < 2:
        given_so_far += list(second)
    assert same(given_so_far, expected)


def test_the_order_depends_on_seed_and_epoch():
    def order(seed):
        made = batcher(500, 100, size=50, seed=seed)
        return [keys(made) for _ in range(2)]

    zero, one = order(0), order(1)
    assert zero == order(0)
    assert zero[0] != zero[1]
    assert zero[0] != one[0]
    # Not only the splits have moved.
    assert zero[0][:100] != sorted(zero[0][:100])


def test_the_order_is_this_one_for_ever():
    """Saved positions mean rows only as long as the order stays."""
    batch = next(iter(batcher(12, 6, size=12, seed=3)))
    assert batch.keys_B.tolist() == FIRST_ORDER


FIRST_ORDER = [7, 8, 11, 10, 6, 9, 4, 1, 2, 3, 0, 5]


def test_a_thread_gives_the_same_batches_and_ends():
    before = threading.active_count()
    assert same(list(batcher(300, 40, size=32, ahead=3)), list(batcher(300, 40, size=32)))
    for batch in batcher(300, 40, size=32, ahead=2):
        check_rows(batch)
        break
    assert threading.active_count() == before


def test_what_fails_in_the_thread_is_raised_here():
    def broken(first, count):
        table = make(first, count)
        return table.set_column(1, "label", pa.array([2] * count)) if first == 80 else table

    reader = GeneratorReader(broken, 200, split_rows=40, name="mine")
    batches = iter(Batcher(reader, COLUMNS, TABLES, Batching(size=40, shuffle=False, ahead=1)))
    for _ in range(2):
        check_rows(next(batches))
    with pytest.raises(DataError, match="80, column 'label': 2"):
        next(batches)


def test_no_more_is_made_than_there_is_room_for():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    taken = read_ahead(items(), 2)
    assert next(taken) == 0
    time.sleep(0.3)
    # One is taken, two wait, one is made and has no room yet.
    assert len(made) <= 4
    taken.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "has seed=1, but this run has seed=0"),
        ({"shuffle": False}, "has shuffle=False"),
        ({"data": "x"}, "has other files, splits, filters or transforms"),
        ({"split": 9}, "expected a split of 0 to 3"),
    ],
)
def test_a_position_of_something_else(other, message):
    position = msgspec.structs.replace(batcher(12, 4, size=2).state(), **other)
    with pytest.raises(StateError, match=message):
        batcher(12, 4, size=2, position=position)


def test_batching_that_cannot_be():
    with pytest.raises(SpecError, match="size=0, ahead=0, seed=0"):
        Batching(size=0)
    with pytest.raises(DataError, match="FrameReader: no rows"):
        Batcher(FrameReader(make(0, 0)), COLUMNS, TABLES, Batching(size=1))


def test_memory_does_not_grow_with_the_rows():
    """Splits are dropped as soon as their rows are given out."""
    alive = []

    def watched(first, count):
        table = make(first, count)
        alive.append(weakref.ref(table))
        return table

    reader = GeneratorReader(watched, 2000, split_rows=100)
    most = 0
    for _ in Batcher(reader, COLUMNS, TABLES, Batching(size=30)):
        most = max(most, sum(ref() is not None for ref in alive))
    assert len(alive) == 21  # one of no rows, for the columns
    assert most <= 2
