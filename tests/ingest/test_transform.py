"""Every transform does what its reference says, on every layout of a column, whatever rows are around a row."""

import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest.transform_reference import reference
from test_encode import laid_out

from rowwise.ingest.transform import (
    BoxCox,
    Bucketize,
    Cartesian,
    Clamp,
    ComputeScore,
    Enumerate,
    Fill,
    FirstX,
    GetLocalHour,
    GetLocalWeekday,
    IdListTransform,
    Log1p,
    Logit,
    MapId,
    NGram,
    Onehot,
    PositiveModulus,
    RowPosition,
    SigridHash,
    SplitText,
    ToNumber,
    ToTime,
    ToWhole,
    apply,
    load,
    schema_after,
    sources,
)

IDS = st.one_of(st.integers(-3, 6), st.integers(-(2**63), 2**63 - 1))
SMALL = st.integers(-(2**31), 2**31 - 1)
WORDS = st.sampled_from(["", "a", "b", "ünï", "12345678", "a longer word", "7", "-1"])
DOUBLES = st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.0, -1.0, math.inf, -math.inf, math.nan]))
FLOATS = st.one_of(st.floats(width=32), st.sampled_from([0.5, 2.5, 1.0]))


def maybe(values):
    return st.none() | values


def listed(values):
    return maybe(st.lists(maybe(values), max_size=5))


MOMENTS = ["2024-01-03", " 2024-01-03T10:15:00+02:00", "2024-02-30", "2024-01-03 10:15:00.5", "x"]
COLUMNS = {  # their values, and the types that hold them
    "id": (maybe(IDS), [pa.int64()]),
    "small": (maybe(SMALL), [pa.int32(), pa.int64()]),
    "big": (maybe(st.integers(0, 2**64 - 1)), [pa.uint64()]),
    "word": (maybe(WORDS), [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.string_view()]),
    "ids": (listed(IDS), [pa.list_(pa.int64()), pa.large_list(pa.int64())]),
    "other": (listed(IDS), [pa.list_(pa.int64()), pa.large_list(pa.int64())]),
    "few": (listed(st.integers(0, 2)), [pa.list_(pa.int64()), pa.list_(pa.int8())]),
    "fewer": (listed(st.integers(1, 2)), [pa.large_list(pa.int32())]),
    "smalls": (listed(SMALL), [pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_(pa.int64())]),
    "words": (listed(WORDS), [pa.list_(pa.string()), pa.large_list(pa.large_string())]),
    "others": (listed(WORDS), [pa.list_(pa.string()), pa.large_list(pa.string())]),
    "x": (maybe(DOUBLES), [pa.float64()]),
    "y": (maybe(FLOATS), [pa.float32()]),
    "xs": (listed(DOUBLES), [pa.list_(pa.float64()), pa.large_list(pa.float64())]),
    "ys": (listed(FLOATS), [pa.list_(pa.float32())]),
    "number": (maybe(st.sampled_from([" 1,234.50", "7", "-.5", "+3e2", "1e99", ".", "", "12a", "nan"])), [pa.string()]),
    "moment": (maybe(st.sampled_from(MOMENTS)), [pa.string(), pa.large_string()]),
    "flag": (maybe(st.booleans()), [pa.bool_()]),
    # Up to 2037: Arrow knows no summer time after it.
    "time": (maybe(st.integers(-(2**31), 2**31 - 1)), [pa.int64(), pa.timestamp("s"), pa.timestamp("s", "Asia/Tokyo")]),
    "minutes": (maybe(st.floats(-900, 900) | st.just(math.nan) | st.just(math.inf)), [pa.float64()]),
}
KNOWN = {-1: 5, 0: 0, 3: 9, 6: -2, 2**62: 1}
KNOWN_WORDS = {"a": 0, "ünï": 7, "": 3, "7": 2}
BORDERS = (-1.0, 0.1, 0.5, 1.0, 1e10)
CASES = [
    *(SigridHash(column=c, rows=97, salt=-5, to="t") for c in ("id", "small", "big", "word", "ids", "smalls", "words")),
    SigridHash(column="ids", rows=1),
    SigridHash(column="ids", rows=2**62, salt=2**63 - 1),
    *(FirstX(column=c, count=2) for c in ("ids", "smalls", "words", "xs", "ys")),
    *(PositiveModulus(column=c, rows=7) for c in ("id", "small", "big", "ids", "smalls")),
    *(Enumerate(column=c, to="t") for c in ("ids", "words")),
    *(NGram(column=c, n=n, rows=r) for c, n, r in (("ids", 2, None), ("smalls", 3, 50), ("words", 2, 64))),
    *(MapId(column=c, mapping=KNOWN) for c in ("id", "small", "ids")),
    *(MapId(column=c, mapping=KNOWN_WORDS, unknown=-9) for c in ("word", "words")),
    *(MapId(column=c, mapping=KNOWN_WORDS) for c in ("word", "words")),
    *(SplitText(column="word", separator=s, to="t") for s in ("a", "|", "ab")),
    *(Cartesian(columns=c, to="t", rows=r) for c, r in ((("id", "small"), None), (("word", "ids"), 31))),
    *(Cartesian(columns=c, to="t") for c in (("ids", "words"), ("ids", "other"), ("word", "id"))),
    *(IdListTransform(columns=c, to="t") for c in (("ids", "other"), ("words", "others"), ("few", "fewer"))),
    *(Bucketize(column=c, borders=BORDERS) for c in ("x", "y", "xs", "ys", "id", "flag")),
    *(Clamp(column=c, low=-2, high=3) for c in ("x", "y", "xs", "ys", "id", "smalls")),
    Clamp(column="big", low=-5, high=2**63),
    Clamp(column="y", high=1.5),
    *(Log1p(column=c) for c in ("x", "y", "xs", "small", "flag")),
    *(Logit(column=c, eps=0.01) for c in ("x", "y", "xs")),
    *(BoxCox(column=c, power=p, shift=1.0) for c, p in (("x", 0.5), ("y", -0.5), ("xs", 0.0), ("small", 2.0))),
    *(Fill(column=c, value=7) for c in ("x", "y", "id", "xs", "ids", "smalls", "big")),
    *(Fill(column=c, value="ü") for c in ("word", "words")),
    *(Onehot(column=c, borders=BORDERS, into="lists") for c in ("x", "y", "xs")),
    *(Onehot(column=c, classes=(3, -1, 0)) for c in ("id", "ids", "small")),
    *(Onehot(column=c, classes=("a", "")) for c in ("word", "words")),
    *(GetLocalHour(column="time", to="t", zone=z) for z in (None, "Europe/Vienna", "Asia/Kolkata")),
    GetLocalHour(column="time", to="t", offset="minutes"),
    *(GetLocalWeekday(column="time", to="t", zone=z) for z in (None, "Europe/Vienna")),
    GetLocalWeekday(column="time", to="t", offset="minutes"),
    *(ToWhole(column=c) for c in ("x", "y", "id", "small", "flag")),
    *(ToNumber(column=c) for c in ("x", "y", "id", "word", "number")),
    *(ToTime(column=c) for c in ("word", "moment")),
]


@st.composite
def tables(draw, names, rows):
    """A table of rows, each column in some layout."""
    cells = zip(*rows, strict=True) if rows else [()] * len(names)
    kinds = [draw(st.sampled_from(COLUMNS[name][1])) for name in names]
    return pa.table({n: laid_out(draw, list(c), k) for n, c, k in zip(names, cells, kinds, strict=True)})


def values_of(table):
    return list(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))


def close(got, expected, single):
    """Equal, floats to within what the last steps of their type can be off."""
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(close(g, e, single) for g, e in zip(got, expected, strict=True))
    if not isinstance(expected, float) or got is None:
        return (got == expected and type(got) is type(expected)) or (isinstance(got, float) and got == expected)
    if single:
        with np.errstate(over="ignore"):
            expected = float(np.float32(expected))
    bound = (1e-6, 1e-38) if single else (1e-11, 1e-300)
    return (math.isnan(expected) and math.isnan(got)) or math.isclose(got, expected, rel_tol=bound[0], abs_tol=bound[1])


def plain(name, value):
    """Times as the whole numbers that the reference takes."""
    return int(value.timestamp()) if hasattr(value, "timestamp") and value.tzinfo else _naive(value)


def _naive(value):
    import datetime as dt

    return int(value.replace(tzinfo=dt.UTC).timestamp()) if isinstance(value, dt.datetime) else value


def expected_of(transform, row):
    if isinstance(transform, Fill) and transform.column.endswith("s") and row[0] is None:
        return ([transform.value],)
    if isinstance(transform, FirstX) and transform.column in ("xs", "ys"):
        return (None if row[0] is None else row[0][: transform.count],)
    return reference(transform, tuple(plain(n, v) for n, v in zip(transform.reads, row, strict=True)))


@pytest.mark.few(20)
@pytest.mark.parametrize("transform", CASES, ids=lambda t: f"{t.kind}-{'-'.join(t.reads)}")
@given(data=st.data())
def test_transforms_are_their_references(transform, data):
    names = transform.reads
    rows = data.draw(st.lists(st.tuples(*(COLUMNS[name][0] for name in names)), max_size=6))
    table = data.draw(tables(names, rows))
    loaded = load([transform])
    made, keep_R = apply(table, loaded, transform.makes)
    assert keep_R is None
    assert made.num_rows == len(rows)
    after = schema_after(table.schema, loaded)
    assert all(made.schema.field(name).type == after.field(name).type for name in transform.makes)
    single = "float" in str(made.schema.field(0).type)
    got = values_of(made)
    for row, result in zip(rows, got, strict=True):
        assert close(result, expected_of(transform, row), single), (row, result, expected_of(transform, row))
    made.validate(full=True)
    for at in range(len(rows)):  # alone as among others, to the bit
        alone = apply(table.slice(at, 1), loaded, transform.makes)[0]
        assert alone.to_pydict().__repr__() == made.slice(at, 1).to_pydict().__repr__()


SCORED = st.lists(st.tuples(maybe(st.integers(0, 4)), maybe(DOUBLES)), max_size=6)


@pytest.mark.parametrize("by", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("among", [None, "among"])
@given(data=st.data())
def test_scores(by, among, data):
    rows = data.draw(st.lists(st.tuples(maybe(SCORED), listed(st.integers(0, 4)), st.sampled_from("bis")), max_size=6))
    ids = [None if r is None or which == "i" else [i for i, _ in r] for r, _, which in rows]
    scores = [None if r is None or which == "s" else [s for _, s in r] for r, _, which in rows]
    columns = {
        "ids": pa.array(ids, pa.list_(pa.int32())),
        "scores": pa.array(scores, pa.large_list(pa.float64())),
        "among": pa.array([a for _, a, _ in rows], pa.list_(pa.int64())),
    }
    transform = ComputeScore(ids="ids", scores="scores", to="score", by=by, among=among)
    table = pa.table(columns).select(transform.reads)
    with np.errstate(invalid="ignore"):
        made = apply(table, load([transform]), ["score"])[0]
    for row, got in zip(values_of(table), made["score"].to_pylist(), strict=True):
        assert close((got,), reference(transform, row), False)


def test_sigrid_hash_is_torcharrows():
    """Rows of saved tables mean what this hash made them mean; the numbers are those of torcharrow's own test."""
    table = pa.table({"id": range(1, 17), "ids": [[1], [14, 15, 16], *[[]] * 14]})
    made = apply(table, load([SigridHash(column=c, rows=100) for c in ("id", "ids")]), ["id", "ids"])[0]
    assert made["id"].to_pylist() == [60, 54, 54, 9, 4, 91, 11, 67, 79, 2, 25, 92, 98, 83, 66, 2]
    assert made["ids"].to_pylist()[:2] == [[60], [83, 66, 2]]


@given(data=st.data(), count=st.integers(1, 4), salt=IDS)
def test_first_and_hash_are_the_same_together(data, count, salt):
    rows = data.draw(st.lists(st.tuples(COLUMNS["ids"][0]), max_size=8))
    table = data.draw(tables(["ids"], rows))
    cut, hashing = FirstX(column="ids", count=count), SigridHash(column="ids", rows=1000, salt=salt)
    fused = apply(table, load([cut, hashing]), ["ids"])[0]
    apart = apply(apply(table, load([cut]), ["ids"])[0], load([hashing]), ["ids"])[0]
    assert fused.equals(apart)
    assert fused["ids"].to_pylist() == [reference(hashing, reference(cut, row))[0] for row in rows]
    # What is cut stays there for others, too.
    hashing = SigridHash(column="ids", to="rows", rows=1000, salt=salt)
    both = apply(table, load([cut, hashing]), ["ids", "rows"])[0]
    assert both["rows"].to_pylist() == fused["ids"].to_pylist()
    assert both["ids"].to_pylist() == [reference(cut, row)[0] for row in rows]


def test_borders_are_exact_in_32_bits():
    x = np.array([0.1], np.float32)  # more than 0.1
    borders = (0.1, float(x[0]), math.nextafter(float(x[0]), 1), 3.4e38, 1e39)
    table = pa.table({"x": np.array([x[0], np.nextafter(x[0], np.float32(0)), np.inf, np.float32(3.4028235e38)], "f4")})
    made = apply(table, load([Bucketize(column="x", borders=borders)]), ["x"])[0]
    assert made["x"].to_pylist() == [sum(b < float(v) for b in borders) for v in table["x"].to_pylist()] == [1, 0, 5, 4]


SELDOM = [
    (pa.array([[1, 2], None, [3, None]], pa.list_(pa.int32(), 2)), FirstX(column="a", count=1), [[1], None, [3]]),
    (pa.array([[1, 2], None, [3, None]], pa.list_(pa.int32(), 2)), Fill(column="a", value=5), [[1, 2], [5], [3, 5]]),
    (
        pa.array([[1, 2], None, [3, None]], pa.list_view(pa.int64())),
        Clamp(column="a", low=2),
        [[2, 2], None, [3, None]],
    ),
    (pa.array([5, None]).dictionary_encode(), MapId(column="a", mapping={5: 1}), [1, None]),
    (pa.array([5, None]).dictionary_encode(), Fill(column="a", value=1), [5, 1]),
    (pa.array([decimal.Decimal("1.5"), None]), Bucketize(column="a", borders=(1,)), [1, None]),
    (pa.array(np.array([1.5, np.nan], np.float16)), Fill(column="a", value=0), [1.5, 0]),
    (pa.array([b"\xff", b"a"]), MapId(column="a", mapping={"a": 1}), [None, 1]),
    (pa.chunked_array([], pa.list_(pa.int64())), FirstX(column="a", count=1), []),
    (pa.chunked_array([], pa.string()), SigridHash(column="a", rows=3), []),
]


@pytest.mark.parametrize(("column", "transform", "expected"), SELDOM, ids=range(len(SELDOM)))
def test_other_layouts(column, transform, expected):
    table = pa.table({"a": column})
    made = apply(table, load([transform]), ["a"])[0]
    assert made["a"].to_pylist() == expected
    assert made.schema.types == schema_after(table.schema, load([transform])).types


def test_no_rows_and_no_columns():
    table = pa.table({"id": pa.array([], pa.int64())})
    assert apply(table, load([]), ["id"])[0].num_rows == 0
    assert apply(pa.table({"id": [1, 2]}), load([]), [])[0].num_columns == 0
    assert sources(load([]), ["b", "a", "b"]) == ("b", "a")


@pytest.mark.parametrize("zone", [None, "Europe/Vienna"])
def test_times_in_a_wrong_unit_have_no_hour(zone):
    table = pa.table({"time": [2**62, -(2**63), 28_000 * 31_556_952, -28_000 * 31_556_952]})
    hours = apply(table, load([GetLocalHour(column="time", to="hour", zone=zone)]), ["hour"])[0]["hour"].to_pylist()
    assert hours[:2] == [None, None]
    assert all(0 <= hour < 24 for hour in hours[2:])


def test_times_in_other_units():
    import datetime as dt

    day = dt.date(1969, 12, 31)
    table = pa.table(
        {"day": [day, None], "ns": pa.array([-1, 3_600_000_000_000], pa.timestamp("ns")), "ms": [-1, 10**7]}
    )
    hours = load([GetLocalHour(column=c, to=f"{c}_hour", unit="ms") for c in ("day", "ns", "ms")])
    made = apply(table, hours, ["day_hour", "ns_hour", "ms_hour"])[0]
    assert made.to_pydict() == {"day_hour": [0, None], "ns_hour": [23, 1], "ms_hour": [23, 2]}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("%d/%m/%Y %H:%M", "03/01/2024 10:15"),
        ("%m/%d/%Y %I:%M %p", "1/3/2024 10:15 AM"),
        ("%b %d %Y %H:%M", "Jan 3 2024 10:15"),
        ("%d/%b/%Y:%H:%M:%S %z", "03/Jan/2024:12:15:00 +0200"),
        ("iso", "2024-01-03T11:15+01:00"),
    ],
)
def test_times_in_text(form, text):
    import datetime as dt

    times = ToTime(column="a", formats=("%Y", form)).run((pa.array([text, None, "no time"]),), RowPosition())[0]
    assert times.to_pylist() == [dt.datetime(2024, 1, 3, 10, 15), None, None]


def test_numbers_in_text():
    texts = pa.array(["$1,250.5", " 7% ", "€3", "1.2.3", "12,50", "-", "", "+4", "--1", None])
    assert ToNumber(column="a").run((texts,), RowPosition())[0].to_pylist() == [
        1250.5, 7, 3, None, None, None, None, 4, None, None,
    ]  # fmt: skip
