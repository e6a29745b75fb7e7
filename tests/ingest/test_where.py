"""Conditions on rows: what texts mean, what they hold for, and that pruning never loses a row."""

import datetime as dt
import itertools
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from rowwise.base.errors import DataError, SpecError
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.where import ColumnBounds, Comparison, RowFilter, parse

OPS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
KINDS = {
    pa.int64(): st.integers(-5, 5),
    pa.uint8(): st.integers(0, 5),
    pa.uint64(): st.integers(2**64 - 4, 2**64 - 1),
    pa.float64(): st.sampled_from([-1.5, 0.0, 2.0, float("nan"), float("inf")]),
    pa.float32(): st.sampled_from([-1.5, 0.0, 2.0, float("nan")]),
    pa.string(): st.sampled_from(["", "a", "é", "zz"]),
    pa.large_string(): st.sampled_from(["a", "b"]),
    pa.bool_(): st.booleans(),
    pa.dictionary(pa.int32(), pa.string()): st.sampled_from(["a", "b", "c"]),
    pa.decimal128(6, 2): st.sampled_from([Decimal("1.25"), Decimal("-3")]),
}


def test_texts():
    found = parse(
        ["day >= 3", "country in [AT, 'B R', 7]", "`a b` is  NOT null and x=-1.5", "flag == true", "t != '3'"]
    )
    assert found.all_of == (
        Comparison(column="day", op=">=", value=3),
        Comparison(column="country", op="in", value=("AT", "B R", 7)),
        Comparison(column="a b", op="not null"),
        Comparison(column="x", op="==", value=-1.5),
        Comparison(column="flag", op="==", value=True),
        Comparison(column="t", op="!=", value="3"),
    )
    assert parse("a in []").all_of[0].value == ()
    assert parse([]) == RowFilter()


@pytest.mark.parametrize(
    "text", ["", "day", "day >=", "day in 3", "day >= [3]", "a is null 3", "a == 1 or b == 2", "a ~ 1"]
)
def test_texts_that_mean_nothing(text):
    with pytest.raises(SpecError, match="'column op value'"):
        parse(text)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_mask_is_what_python_says(data):
    kind = data.draw(st.sampled_from(list(KINDS)))
    values = data.draw(st.lists(st.none() | KINDS[kind], max_size=12))
    op = data.draw(st.sampled_from(["==", "!="] if kind == pa.bool_() else [*OPS]))
    value = data.draw(KINDS[kind])
    given_ = float(value) if isinstance(value, Decimal) else value
    one = Comparison(column="x", op=op, value=given_)
    mask = RowFilter(all_of=(one,)).mask(pa.table({"x": pa.array(values, kind)}))
    assert mask.tolist() == [v is not None and OPS[op](v, value) for v in values]


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_pruned_is_filtered(data, tmp_path_factory):
    kind = data.draw(st.sampled_from([kind for kind in KINDS if kind != pa.decimal128(6, 2)]))
    values = data.draw(st.lists(st.none() | KINDS[kind], min_size=1, max_size=20))
    op = data.draw(st.sampled_from(["==", "!=", "in", "is null", "not null", *([] if kind == pa.bool_() else OPS)]))
    drawn = data.draw(st.lists(KINDS[kind], min_size=1, max_size=3))
    value = {"in": tuple(drawn), "is null": None, "not null": None}.get(op, drawn[0])
    where = RowFilter(all_of=(Comparison(column="x", op=op, value=value),))
    table = pa.table({"x": pa.array(values, kind), "row": np.arange(len(values))})
    path = tmp_path_factory.mktemp("pruned") / "a.parquet"
    pq.write_table(table, path, row_group_size=3)
    reader = ParquetReader(path, where=where)
    read = [reader.read(split, ("x", "row")) for split in reader.splits()]
    rows = [row for t in read for row in t.filter(pa.array(where.mask(t)))["row"].to_pylist()]
    assert rows == np.flatnonzero(where.mask(table)).tolist()
    assert reader.counters.pruned_groups == -(-len(values) // 3) - len(reader.splits())


@pytest.mark.parametrize("op", OPS)
def test_bounds_decide_to_the_number(op):
    for least, most, value in itertools.product(range(3), range(3), range(-1, 4)):
        if least <= most:
            one = Comparison(column="x", op=op, value=value)
            holds = one.may_hold(ColumnBounds(least=least, most=most), pa.int64())
            assert holds == any(OPS[op](x, value) for x in range(least, most + 1)), (least, most, value)


def test_numbers_beyond_the_type_and_times():
    table = pa.table({"x": pa.array([0, 255, None], pa.uint8()), "t": pa.array([dt.datetime(2024, 5, 1)] * 3)})
    assert parse("x < 300").mask(table).tolist() == [True, True, False]
    assert parse("x > -1").mask(table).tolist() == [True, True, False]
    assert parse("x == 300").mask(table).tolist() == [False] * 3
    assert parse("t >= 2024-05-01 and t < 2024-05-01T00:00:01").mask(table).tolist() == [True] * 3


def test_times_prune(tmp_path):
    days = [dt.datetime(2024, 5, day) for day in range(1, 11)]
    for unit in ("s", "ms", "us", "ns"):
        pq.write_table(pa.table({"t": pa.array(days, pa.timestamp(unit))}), tmp_path / "a.parquet", row_group_size=2)
        assert len(ParquetReader(tmp_path, where=parse("t >= 2024-05-09")).splits()) == 1
    pq.write_table(pa.table({"t": pa.array([d.date() for d in days])}), tmp_path / "a.parquet", row_group_size=2)
    assert len(ParquetReader(tmp_path, where=parse("t == 2024-05-03")).splits()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x == a", "column 'x' holds int64, but is compared with 'a': expected a whole number"),
        ("x < 2.5", "compared with 2.5: expected a whole number"),
        ("s == 3", "holds string, but is compared with 3: expected text, in quotes"),
        ("l == 3", "expected 'is null' or 'not null' only"),
        ("b < true", "column 'b' holds bool: expected ==, != or in"),
        ("t > soon", "expected a time such as"),
        ("y == 1", "no column 'y'"),
        ("x < 1e999", "compared with inf: expected a whole number"),
        ("x == " + "9" * 5000, "compared with inf: expected a whole number"),
        ("x == 1_0", "compared with '1_0': expected a whole number"),
        ("x == \u0661", "compared with '\u0661': expected a whole number"),
        ("d < inf", "compared with inf: expected a number"),
        ("d in [1, 1e308]", r"compared with 1e\+308: expected a number"),
    ],
)
def test_types_are_checked(text, said):
    kinds = {"x": pa.int64(), "s": pa.string(), "l": pa.list_(pa.int64()), "b": pa.bool_(), "t": pa.timestamp("us")}
    kinds["d"] = pa.decimal128(5, 2)
    with pytest.raises(DataError, match=said) as caught:
        parse(text).check(pa.schema(kinds), "a.parquet")
    assert str(caught.value).startswith("a.parquet: ")
