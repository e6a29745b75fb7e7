"""Shares cut the rows of a file in parts that have no row in common, always the same ones."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest.test_batcher import keys, same
from msgspec import structs
from pyarrow import csv
from pyarrow import parquet as pq

from rowwise import DataError, SpecError, Table
from rowwise.ingest import Batcher, Batching, Columns, CsvReader, Dense, FrameReader, ParquetReader, Sparse
from rowwise.ingest.delimited import Dialect
from rowwise.ingest.share import Share

COLUMNS = Columns(
    labels=("label",),
    dense=(Dense(column="x"),),
    sparse=(Sparse(column="id", ids="direct"), Sparse(column="bag", ids="direct")),
    weight="w",
    key="row",
    time="t",
)
TABLES = (Table(name="id", rows=100, dim=4), Table(name="bag", rows=100, dim=4))


def make(count: int) -> pa.Table:
    rows = range(count)
    return pa.table(
        {
            "row": pa.array(rows, pa.int64()),
            "label": pa.array([r % 2 for r in rows], pa.int8()),
            "x": pa.array([r / 2 for r in rows], pa.float32()),
            "id": pa.array([None if r % 7 == 0 else r % 100 for r in rows], pa.int32()),
            "bag": pa.array([[r % 100] * (r % 4) for r in rows], pa.list_(pa.int64())),
            "w": pa.array([1.0 + r for r in rows]),
            "t": pa.array(rows, pa.int64()),
        }
    )


def batches(frame, share=None, *, split_rows=10, **how):
    batching = Batching(**({"size": 8, "shuffle": False} | how), **({"share": share} if share else {}))
    return Batcher(FrameReader(frame, split_rows=split_rows), COLUMNS, TABLES, batching)


cuts = st.lists(st.floats(0.01, 0.99), max_size=3, unique=True).map(lambda inner: [0.0, *sorted(inner), 1.0])


@settings(max_examples=20)
@given(count=st.integers(1, 120), split_rows=st.integers(1, 50), edges=cuts, seed=st.integers(0, 9))
def test_every_row_is_in_one_share(count, split_rows, edges, seed):
    frame = make(count)
    parts = []
    for begin, end in itertools.pairwise(edges):
        share = Share(begin=begin, end=end)
        in_order = keys(batches(frame, share, split_rows=split_rows))
        shuffled = batches(frame, share, split_rows=split_rows, shuffle=True, seed=seed)
        first, second = keys(shuffled), keys(shuffled)
        assert sorted(first) == sorted(second) == in_order  # in any order, in every epoch
        parts.append(in_order)
    assert sorted(key for part in parts for key in part) == list(range(count))


@settings(max_examples=25)
@given(
    count=st.integers(1, 80),
    split_rows=st.integers(1, 40),
    size=st.integers(1, 20),
    end=st.floats(0.1, 0.9),
    keep_last=st.booleans(),
)
def test_it_is_as_if_the_others_were_not_there(count, split_rows, size, end, keep_last):
    frame, share = make(count), Share(end=end)
    chosen = keys(batches(frame, share, split_rows=split_rows))
    found = list(batches(frame, share, split_rows=split_rows, size=size, keep_last=keep_last))
    if not chosen:
        assert not found
        return
    wanted = list(batches(frame.take(chosen), split_rows=1000, size=size, keep_last=keep_last))
    assert same(found, wanted)


def test_its_size_is_what_was_asked_for():
    chosen = np.array(Share(begin=0.2, end=0.3).select(None, 100_000, 0))
    assert len(chosen) == pytest.approx(10_000, rel=0.05)
    assert not np.array_equal(chosen, Share(begin=0.2, end=0.3).select(None, 100_000, 1))  # other rows in each split
    assert np.array_equal(np.diff(chosen) > 0, np.ones(len(chosen) - 1, bool))


def test_the_rows_are_these_for_ever():
    """Who was in the test set stays there."""
    assert Share(end=0.2).select(None, 40, 3).tolist() == FIRST


FIRST = [2, 3, 4, 6, 12, 14, 20, 38]


def test_all_is_no_work():
    order = np.arange(5)
    assert Share().select(order, 5, 0) is order
    assert Share().select(None, 5, 0) is None


@pytest.mark.parametrize(("begin", "end"), [(0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 1.0)])
def test_shares_that_cannot_be(begin, end):
    with pytest.raises(SpecError, match="0 <= begin <"):
        Share(begin=begin, end=end)


@pytest.mark.parametrize("shuffle", [False, True])
def test_errors_name_the_rows_of_the_file(shuffle):
    """Whatever was left out before them, and in whatever order they were asked for."""
    share = Share(begin=0.5)
    chosen = keys(batches(make(40), share))
    row = next(r for r in chosen if r >= 20)
    assert row != chosen.index(row)
    for column, value, want in (
        ("label", 3, r"'label': 3: expected a label of 0 or 1"),
        ("id", 1000, r"'id': id 1000: expected 0 to 99, the rows of table 'id'; ids='hash' takes any"),
        ("bag", [1, 1000], r"'bag': id 1000: expected 0 to 99, the rows of table 'bag'"),
    ):
        frame = make(40)
        at = frame.schema.get_field_index(column)
        values = frame[column].to_pylist()
        values[row] = value
        broken = frame.set_column(at, column, pa.array(values, frame.schema.field(at).type))
        with pytest.raises(DataError, match=f"frame: row {row}, column {want}"):
            keys(batches(broken, share, shuffle=shuffle))


@pytest.mark.few(2)
@pytest.mark.parametrize("file", ["parquet", "csv"])
@pytest.mark.parametrize("kind", ["int64", "string", "dictionary", "double"])
def test_no_group_is_in_two_shares(tmp_path, file, kind):
    group = [None if row % 50 == 7 else row * 7919 % 40 for row in range(300)]
    array = pa.array(group, pa.float64() if kind == "double" else pa.int64())
    array = array.cast(pa.string()) if kind in ("string", "dictionary") else array
    array = array.dictionary_encode() if kind == "dictionary" else array
    frame = make(300).drop_columns(["bag"]).append_column("who", array)
    if file == "parquet":
        pq.write_table(frame, tmp_path / "a.parquet", row_group_size=37)
        reader = ParquetReader(tmp_path)
    else:
        csv.write_csv(frame, tmp_path / "a.csv")
        reader = CsvReader(tmp_path, Dialect(split_bytes=700))
    columns = structs.replace(COLUMNS, sparse=COLUMNS.sparse[:1])
    parts = []
    for begin, end in ((0.0, 0.3), (0.3, 0.6), (0.6, 1.0)):
        batching = Batching(size=8, share=Share(begin=begin, end=end, group="who"))
        parts.append(keys(Batcher(reader, columns, TABLES[:1], batching)))
    assert sorted(key for part in parts for key in part) == list(range(300))
    known = [{group[row] for row in part} - {None} for part in parts]
    assert all(known)
    assert not known[0] & known[1] | known[0] & known[2] | known[1] & known[2]
    assert sum(None in {group[row] for row in part} for part in parts) > 1  # rows without a value are no group


def test_a_group_that_is_no_column_is_refused():
    with pytest.raises(DataError, match="no column 'nobody'"):
        keys(batches(make(10), Share(end=0.5, group="nobody")))
    with pytest.raises(DataError, match="group: column 'bag' holds"):
        keys(batches(make(10), Share(end=0.5, group="bag")))
