"""Rows of requests are prepared as those of a split: the same numbers and ids, and the same errors."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import types
from test_encode import LISTS, ROWS, SINGLE, laid_out

from rowwise import DataError
from rowwise.ingest import Columns, Dense, Sparse
from rowwise.ingest.bound import REQUEST, BoundPreparation
from rowwise.ingest.collate import SplitRows, collate
from rowwise.ingest.encode import encode
from rowwise.ingest.raw_columns import NumberBlock, RawColumns
from rowwise.ingest.transform import (
    Bucketize,
    Cartesian,
    Fill,
    FirstX,
    Log1p,
    MapId,
    Sampling,
    SigridHash,
    apply,
    load,
    serving,
)

NUMBERS = [
    (pa.float32(), st.floats(-9, 9, width=32)),
    (pa.float64(), st.floats(-9, 9)),
    (pa.int16(), st.integers(-9, 9)),
    (pa.int64(), st.integers(-9, 9)),
    (pa.bool_(), st.booleans()),
]
COLUMNS = Columns(
    labels=("click",),
    sparse=(Sparse(column="a"), Sparse(column="b", first=2), Sparse(column="c", table="b", first=1)),
    dense=(
        Dense(column="x", fill=2.0, mean=0.3, std=3.1),
        Dense(column="y", log1p=True),
        Dense(column="z", log1p=True, std=0.7),
    ),
    weight="weight",
)


def one_array(column):
    return column.chunk(0) if column.num_chunks == 1 else pa.array(column.to_pylist(), column.type)


def batch_of(table, columns, table_rows, order):
    """What training makes of these rows."""
    encoded = encode(table, columns, table_rows, REQUEST, order)
    return collate([SplitRows(encoded, 0, len(order))], columns)


def in_blocks(table):
    """The same columns, with numbers without nulls in blocks, as of a JSON request."""
    plain = {}
    for name, array in table.items():
        if (types.is_integer(array.type) or types.is_floating(array.type)) and not array.null_count:
            plain.setdefault(array.type, {})[name] = array.to_numpy(zero_copy_only=False)
    blocks = [NumberBlock(kind, tuple(named), np.stack(list(named.values()))) for kind, named in plain.items()]
    others = {name: array for name, array in table.items() if name not in plain.get(array.type, ())}
    return RawColumns(tuple(table), len(next(iter(table.values()))), blocks, others)


def check(table, bound, loaded, table_rows, order):
    prepared = bound(table, order)
    for one, other in zip(bound(in_blocks(table), order), prepared, strict=True):
        assert one.tobytes() == other.tobytes()
    made, _ = apply(pa.table(table), serving(loaded), bound.columns.names)
    batch = batch_of(made, bound.columns, table_rows, order)
    np.testing.assert_array_equal(prepared.dense_BF.view(np.int32), batch.dense_BF.numpy().view(np.int32))
    np.testing.assert_array_equal(prepared.values_N, batch.sparse.values_N.numpy())
    np.testing.assert_array_equal(prepared.lengths_FB, batch.sparse.lengths_FB.numpy())


@given(data=st.data(), rows=st.integers(1, 9))
def test_every_layout_is_prepared_as_a_split_is(data, rows):
    kinds = {}
    for name in "abc":
        kinds[name] = data.draw(st.sampled_from(SINGLE + LISTS))
    for name in "xyz":
        kinds[name] = data.draw(st.sampled_from(NUMBERS))
    schema, bound = None, None
    for _ in range(2):  # the second table is prepared by the structures of the first
        table = {}
        for name, (kind, values) in kinds.items():
            missing = st.none() | values if data.draw(st.booleans()) else values
            cells = data.draw(st.lists(missing, min_size=rows, max_size=rows))
            table[name] = one_array(laid_out(data.draw, cells, kind))
        order = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20)))
        if bound is None:
            schema = pa.schema({name: array.type for name, array in table.items()})
            bound = BoundPreparation(schema, load([]), COLUMNS, ROWS)
        check(table, bound, load([]), ROWS, order)


def test_transforms_are_applied():
    steps = [
        Log1p(column="x"),
        Bucketize(column="x", to="bucket", borders=(0.5, 1.5)),
        FirstX(column="words", count=2),
        SigridHash(column="words", to="b", rows=64, salt=3),
        MapId(column="name", to="c", mapping={"u": 3, "v": 5}),
        Cartesian(columns=("bucket", "c"), to="a"),
        Fill(column="y", value=7.0),
        Sampling(rate=0.5),
    ]
    table = {
        "x": pa.array([0.0, 1.0, None], pa.float32()),
        "y": pa.array([None, 2.5, -1.0]),
        "z": pa.array([1, 2, None]),
        "words": pa.array([["p", "q", "r"], [], None], pa.list_(pa.string())),
        "name": pa.array(["u", "w", None]),
    }
    schema, loaded = pa.schema({name: array.type for name, array in table.items()}), load(steps)
    bound = BoundPreparation(schema, loaded, COLUMNS, ROWS)
    assert set(bound.names) == set(table)
    check(table, bound, loaded, ROWS, np.array([2, 0, 0, 1]))


def test_the_schema_is_checked_once():
    with pytest.raises(DataError, match="request: no column 'b'"):
        BoundPreparation(pa.schema(dict.fromkeys(("a", "bb", "c", "x", "y", "z"), pa.int64())), load([]), COLUMNS, ROWS)
    schema = pa.schema({name: pa.float32() if name in "xyz" else pa.int64() for name in "abcxyz"})
    with pytest.raises(DataError, match="column 'a' holds float"):
        BoundPreparation(schema.set(0, pa.field("a", pa.float32())), load([]), COLUMNS, ROWS)


def test_the_first_bad_row_is_named():
    columns = Columns(labels=(), sparse=(Sparse(column="a", ids="direct"),), dense=(Dense(column="x"),))
    schema = pa.schema({"a": pa.int64(), "x": pa.float32()})
    bound = BoundPreparation(schema, load([]), columns, {"a": 10})
    order = np.arange(3)
    with pytest.raises(DataError, match="row 1, column 'a'"):
        bound({"a": pa.array([1, 10, 3]), "x": pa.array([0, 1, 2], pa.float32())}, order)
    with pytest.raises(DataError, match="row 2, column 'x'"):
        bound({"a": pa.array([1, 1, 3]), "x": pa.array([0, 1, np.inf], pa.float32())}, order)
    check({"a": pa.array([1, 9, 3]), "x": pa.array([0, 1, 2], pa.float32())}, bound, load([]), {"a": 10}, order)
