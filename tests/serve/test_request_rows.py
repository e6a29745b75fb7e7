"""Rows of requests: what is read, what is converted, and what each mistake is told."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import DataError
from rowwise.serve.request import RequestReader

SCHEMA = pa.schema(
    {"user": pa.int64(), "x": pa.float32(), "name": pa.string(), "seen": pa.list_(pa.int32()), "yes": pa.bool_()}
)
ROWS = {"user": [1, None], "x": [0.5, None], "name": ["a", None], "seen": [[1, 2], None], "yes": [True, None]}


def reader(most=100):
    return RequestReader(SCHEMA, most)


def read(value):
    return reader().read_json(json.dumps(value).encode())


def as_stream(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_json_and_arrow_are_read_alike():
    found = read({"rows": ROWS | {"more": [1]}})
    assert (found.rows, found.ignored) == (2, 1)
    assert pa.table(found.arrays).schema == SCHEMA
    assert pa.table(found.arrays).to_pydict() == ROWS
    table = pa.table(ROWS, schema=SCHEMA).append_column("more", pa.array([1, 2]))
    assert reader().read_arrow(as_stream(table)).arrays == found.arrays
    wide = table.set_column(0, "user", pa.array([1, None], pa.int8())).set_column(1, "x", pa.array([0.5, None]))
    assert reader().read_arrow(as_stream(wide)).arrays == found.arrays


def test_a_context_is_repeated_for_each_candidate():
    context = {"x": 2.5, "name": None, "seen": [3]}
    found = read({"context": context, "candidates": {"user": [7, 8, 9], "yes": [True, False, None]}})
    assert pa.table(found.arrays).to_pylist() == [
        context | {"user": user, "yes": yes} for user, yes in ((7, True), (8, False), (9, None))
    ]


def test_a_context_that_grows_with_its_candidates_is_refused():
    body = {"context": {"x": 1, "name": "a", "yes": True, "seen": [1] * 1000}, "candidates": {"user": [1] * 100}}
    with pytest.raises(DataError, match=r"the context of 100 candidates takes .*: want at most 100,000: send fewer"):
        RequestReader(SCHEMA, 100, most_bytes=100_000).read_json(json.dumps(body).encode())


def test_whole_numbers_may_be_text():
    large = (1 << 63) - 1
    found = read({"rows": ROWS | {"user": [str(large), -5], "seen": [["7"], ["-8", None]]}})
    assert found.arrays["user"].to_pylist() == [large, -5]
    assert found.arrays["seen"].to_pylist() == [[7], [-8, None]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "want JSON with rows"),
        ("[1]", "want JSON with rows"),
        ("[" * 100_000, "want JSON with rows"),
        ({}, "want {"),
        ({"rows": ROWS, "context": {}}, "want {"),
        ({"row": ROWS}, "unknown field `row`"),
        ({"rows": {**ROWS, "user": 1}}, r"Expected `array`, got `int`"),
        (
            {"rows": {k: v for k, v in ROWS.items() if k != "user"} | {"users": [1, 2]}},
            "no column 'user'; did you mean 'users'",
        ),
        ({"rows": {}}, "no column 'user'. There are none"),
        ({"rows": ROWS | {"user": [1]}}, "column 'user' has 1 rows, others have 2"),
        ({"rows": {name: [] for name in ROWS}}, "0 rows: want 1 to 100 in a request"),
        ({"rows": {name: [None] * 101 for name in ROWS}}, "101 rows: want 1 to 100 in a request"),
        ({"rows": ROWS | {"user": [1, 2.5]}}, "row 1, column 'user': 2.5: want a whole number of int64, or null"),
        ({"rows": ROWS | {"user": [1 << 63, 2]}}, "row 0, column 'user': 9223372036854775808: want a whole number"),
        ({"rows": ROWS | {"user": [1, "x"]}}, "row 1, column 'user': 'x': want a whole number of int64"),
        ({"rows": ROWS | {"x": [1, "2"]}}, "row 1, column 'x': '2': want a number, or null"),
        ({"rows": ROWS | {"name": [5, "2"]}}, "row 0, column 'name': 5: want text, or null"),
        ({"rows": ROWS | {"seen": [[1], 2]}}, "row 1, column 'seen': 2: want a list, each a whole number of int32"),
        ({"rows": ROWS | {"yes": [1, True]}}, "row 0, column 'yes': 1: want bool, or null"),
        ({"context": {"user": 1}, "candidates": {"user": [1]}}, "column 'user' is in context and in candidates"),
        ({"context": dict.fromkeys(ROWS), "candidates": {"z": [1]}}, "no column in candidates is read"),
        ({"context": {"x": 1, "name": "a", "seen": []}, "candidates": {"user": [1], "yes": []}}, "0 candidates"),
    ],
)
def test_what_mistakes_are_told(body, message):
    text = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(DataError, match=message):
        reader().read_json(text.encode())


def test_what_mistakes_in_arrow_are_told():
    table = pa.table(ROWS, schema=SCHEMA)
    for change, message in (
        (lambda t: t.drop_columns(["x"]), "no column 'x'"),
        (lambda t: t.set_column(0, "user", pa.array([0.5, 1])), "column 'user' holds double: want int64: .*truncated"),
        (lambda t: t.slice(0, 0), "0 rows: want 1 to 100"),
        (lambda t: t.append_column("user", t["user"]), "2 columns are called 'user'"),
    ):
        with pytest.raises(DataError, match=message):
            reader().read_arrow(as_stream(change(table)))
    for body in (b"", b"nothing", as_stream(table)[:-100]):
        with pytest.raises(DataError, match=r"not an Arrow IPC stream|no column"):
            reader().read_arrow(body)


@given(st.data())
def test_a_damaged_stream_is_one_clear_error(data):
    body = bytearray(as_stream(pa.table(ROWS, schema=SCHEMA)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = reader().read_arrow(bytes(body))
    except DataError:
        return
    assert pa.table(found.arrays).num_rows == found.rows


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*ROWS, "rows"]), inner, max_size=4),
    max_leaves=20,
)


@given(
    st.fixed_dictionaries({"rows": st.fixed_dictionaries({name: st.lists(VALUES, max_size=3) for name in ROWS})})
    | VALUES
)
def test_any_json_is_rows_or_one_clear_error(value):
    try:
        found = reader().read_json(json.dumps(value).encode())
    except DataError:
        return
    assert pa.table(found.arrays).schema == SCHEMA
