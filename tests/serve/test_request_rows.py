"""Rows of requests: what is read, what is converted, and what each mistake is told."""

import io
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import DataError
from rowwise.serve.client import arrow_stream
from rowwise.serve.json_body import BodyLimits, SMALL_bytes
from rowwise.serve.request import RequestReader, RequestRows, to_array

SCHEMA = pa.schema(
    {"user": pa.int64(), "x": pa.float32(), "name": pa.string(), "seen": pa.list_(pa.int32()), "yes": pa.bool_()}
)
ROWS = {"user": [1, None], "x": [0.5, None], "name": ["a", None], "seen": [[1, 2], None], "yes": [True, None]}


def reader(most=100):
    return RequestReader(SCHEMA, most)


def read(value):
    return reader().read_json(json.dumps(value).encode())


def test_json_and_arrow_are_read_alike():
    found = read({"rows": ROWS | {"more": [1]}})
    assert (found.rows, found.ignored) == (2, 1)
    assert pa.table(dict(found.arrays)).schema == SCHEMA
    assert pa.table(dict(found.arrays)).to_pydict() == ROWS
    table = pa.table(ROWS, schema=SCHEMA).append_column("more", pa.array([1, 2]))
    assert reader().read_arrow(arrow_stream(table)).arrays == found.arrays
    wide = table.set_column(0, "user", pa.array([1, None], pa.int8())).set_column(1, "x", pa.array([0.5, None]))
    assert reader().read_arrow(arrow_stream(wide)).arrays == found.arrays


def test_a_context_is_repeated_for_each_candidate():
    context = {"x": 2.5, "name": None, "seen": [3]}
    found = read({"context": context, "candidates": {"user": [7, 8, 9], "yes": [True, False, None]}})
    assert pa.table(dict(found.arrays)).to_pylist() == [
        context | {"user": user, "yes": yes} for user, yes in ((7, True), (8, False), (9, None))
    ]


def test_a_context_that_grows_with_its_candidates_is_refused():
    body = {"context": {"x": 1, "name": "a", "yes": True, "seen": [1] * 1000}, "candidates": {"user": [1] * 100}}
    with pytest.raises(DataError, match=r"100 candidates takes .*"):
        RequestReader(SCHEMA, 100, max_bytes=100_000).read_json(json.dumps(body).encode())


def test_whole_numbers_may_be_text():
    large = (1 << 63) - 1
    found = read({"rows": ROWS | {"user": [str(large), -5], "seen": [["7"], ["-8", None]]}})
    assert found.arrays["user"].to_pylist() == [large, -5]
    assert found.arrays["seen"].to_pylist() == [[7], [-8, None]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "expected JSON with rows"),
        ("[1]", "expected JSON with rows"),
        ("[" * 100_000, "expected JSON with rows"),
        ({}, "expected {"),
        ({"rows": ROWS, "context": {}}, "expected {"),
        ({"row": ROWS}, "unknown field `row`"),
        ({"rows": {**ROWS, "user": 1}}, r"Expected `array`, got `int`"),
        (
            {"rows": {k: v for k, v in ROWS.items() if k != "user"} | {"users": [1, 2]}},
            "no column 'user'; did you mean 'users'",
        ),
        ({"rows": {}}, "no column 'user'. There are none"),
        ({"rows": ROWS | {"user": [1]}}, "column 'user' has 1 rows, others have 2"),
        ({"rows": {name: [] for name in ROWS}}, "0 rows: expected 1 to 100 in a request"),
        ({"rows": {name: [None] * 101 for name in ROWS}}, "101 rows: expected 1 to 100 in a request"),
        ({"rows": ROWS | {"user": [1, 2.5]}}, "row 1, column 'user': 2.5: expected a whole number of int64, or null"),
        ({"rows": ROWS | {"user": [1 << 63, 2]}}, "row 0, column 'user': 9223372036854775808: expected a whole number"),
        ({"rows": ROWS | {"user": [1, "x"]}}, "row 1, column 'user': 'x': expected a whole number of int64"),
        ({"rows": ROWS | {"x": [1, "2"]}}, "row 1, column 'x': '2': expected a number, or null"),
        ({"rows": ROWS | {"name": [5, "2"]}}, "row 0, column 'name': 5: expected text, or null"),
        ({"rows": ROWS | {"seen": [[1], 2]}}, "row 1, column 'seen': 2: expected a list, each a whole number of int32"),
        ({"rows": ROWS | {"yes": [1, True]}}, "row 0, column 'yes': 1: expected bool, or null"),
        ({"context": {"user": 1}, "candidates": {"user": [1]}}, "column 'user' is given twice"),
        ('{"rows": {"user": [1], "user": [2]}}', "column 'user' is given twice"),
        ({"rows": ROWS | {"user": [1, True]}}, "row 1, column 'user': True: expected a whole number of int64"),
        ({"rows": ROWS | {"x": [1.5, True]}}, "row 1, column 'x': True: expected a number"),
        (
            {"rows": ROWS | {"seen": [[1, True], [2]]}},
            r"row 0, column 'seen': \[1, True\]: expected a list, each a whole",
        ),
        *(
            ({"rows": ROWS | change}, "row 1, column '.*': .* expected a")
            for text in ("0x7", "１", " 7", "7 ", "7\n", "1_0", "+7", "", "7.0", "1e2", "9" * 30)
            for change in ({"user": ["1", text]}, {"seen": [["1"], ["2", text]]})
        ),
        ({"rows": ROWS | {str(k): [] for k in range(300)}}, "305 columns: expected at most 266"),
        ({"rows": ROWS | {"n" * 300: []}}, "has a name of 300 characters: expected at most 256"),
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
        (
            lambda t: t.set_column(0, "user", pa.array([0.5, 1])),
            "column 'user' holds double: expected int64: .*truncated",
        ),
        (lambda t: t.slice(0, 0), "0 rows: expected 1 to 100"),
        (lambda t: t.append_column("user", t["user"]), "column 'user' is given twice"),
        (lambda t: t.append_column("more", t["user"]).append_column("more", t["x"]), "column 'more' is given twice"),
        (lambda t: t.set_column(0, "user", pa.array(["1", "0x7"])), "column 'user' holds string: expected int64"),
        (
            lambda t: t.set_column(0, "user", pa.array(["1", " 7"]).dictionary_encode()),
            "column 'user' holds dictionary",
        ),
        (lambda t: t.set_column(0, "user", pa.array([True, False])), "column 'user' holds bool: expected int64"),
        (lambda t: t.set_column(1, "x", pa.array(["1", "2"])), "column 'x' holds string: expected float"),
        (lambda t: t.set_column(3, "seen", pa.array([[True], [False]])), "column 'seen' holds list<.*bool>"),
    ):
        with pytest.raises(DataError, match=message):
            reader().read_arrow(arrow_stream(change(table)))
    for body in (b"", b"nothing", arrow_stream(table)[:-100]):
        with pytest.raises(DataError, match=r"invalid Arrow IPC stream|no column"):
            reader().read_arrow(body)


def test_text_of_digits_is_a_whole_number_in_arrow():
    table = pa.table(ROWS, schema=SCHEMA).set_column(0, "user", pa.array(["-12", None]))
    assert reader().read_arrow(arrow_stream(table)).arrays["user"].to_pylist() == [-12, None]
    encoded = table.set_column(0, "user", table["user"].dictionary_encode())
    assert reader().read_arrow(arrow_stream(encoded)).arrays["user"].to_pylist() == [-12, None]


LONG = "x" * 60_000


def test_views_of_text_are_text():
    """As polars writes them: also of digits, in lists, and of categories."""
    import polars

    frame = polars.from_arrow(pa.table(ROWS, schema=SCHEMA)).with_columns(
        polars.Series("user", ["-12", None]),
        polars.Series("name", ["a" * 30, None], polars.Categorical),
        polars.Series("seen", [["1", "2"], None]),
    )
    sink = io.BytesIO()
    frame.write_ipc_stream(sink, compat_level=polars.CompatLevel.newest())
    assert pa.types.is_string_view(pa.ipc.open_stream(sink.getvalue()).schema.field("user").type)
    found = reader().read_arrow(sink.getvalue()).arrays
    assert pa.table(dict(found)).to_pydict() == ROWS | {"user": [-12, None], "name": ["a" * 30, None]}


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("name", pa.DictionaryArray.from_arrays(pa.array([0] * 100), [LONG])),
        ("seen", pa.ListArray.from_arrays([0, *[1 << 30] * 100], pa.nulls(1 << 30))),
        ("seen", pa.ListArray.from_arrays([0, *[1 << 15] * 100], pa.array(np.zeros(1 << 15, bool)))),
        ("seen", pa.ListViewArray.from_arrays([0] * 100, [10_000] * 100, pa.array(np.zeros(10_000, np.int8)))),
        ("user", pa.RunEndEncodedArray.from_arrays(pa.array([100], pa.int32()), pa.array([1]))),
        ("name", pa.array([LONG] * 100, pa.string_view())),
    ],
    ids=["dictionary", "nulls", "bits", "list views", "runs", "views"],
)
def test_columns_of_arrow_that_grow_with_their_type_are_refused(column, values):
    table = pa.table({name: [found[1]] * 100 for name, found in ROWS.items()}, schema=SCHEMA)
    body = arrow_stream(table.set_column(table.column_names.index(column), column, values))
    with pytest.raises(DataError, match=r"bytes (when it is unpacked|in that type)|expected plain values"):
        RequestReader(SCHEMA, 100, max_bytes=100_000).read_arrow(body)


def test_streams_of_many_messages_or_columns_are_refused():
    sink, few = pa.BufferOutputStream(), pa.table(ROWS, schema=SCHEMA)
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for _ in range(4100):
            writer.write_table(few)
    with pytest.raises(DataError, match="more than 4096 messages"):
        reader(100_000).read_arrow(sink.getvalue().to_pybytes())
    many = pa.table({"n" * 5000 + str(k): [1] for k in range(220)})
    with pytest.raises(DataError, match="most 1,048,576"):
        reader().read_arrow(arrow_stream(many))
    with pytest.raises(DataError, match="300 columns"):
        reader().read_arrow(arrow_stream(pa.table({str(k): [1] for k in range(300)})))


ONES = b", ".join([b"1"] * 30_000)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"rows": {"user": [' + ONES + b"]}}", "more than 20,000 values"),
        (b'{"rows": {"user": [' + b"[]," * 30_000 + b"1]}}", "more than 20,000 values"),
        (b'{"rows": {"user": ' + b"[" * 70_000 + b"]}}", "more than 20,000 values"),
        (b'{"rows": {' + b",".join(b'"%d": []' % k for k in range(9000)) + b"}}", "9,001 keys: expected at most 2,128"),
        (b'{"rows": {' + b" " * 600_000 + b"}}", "600,012 bytes of JSON: expected at most 500,000"),
    ],
    ids=["values", "lists", "nested", "keys", "bytes"],
)
def test_the_parts_of_a_large_body_are_counted(body, message):
    limits = BodyLimits(500_000, 20_000)
    with pytest.raises(DataError, match=message):
        RequestReader(SCHEMA, 100, limits=limits).read_json(body)


def test_what_is_in_texts_is_not_counted():
    text = json.dumps(
        {"rows": {"name": ['\\"[,{:' * 9000, ',"' * 9000 + "\\\\"]} | {k: v for k, v in ROWS.items() if k != "name"}}
    )
    assert len(text) > SMALL_bytes
    found = RequestReader(SCHEMA, 100, limits=BodyLimits(500_000, 40)).read_json(text.encode())
    assert found.arrays["name"].to_pylist() == json.loads(text)["rows"]["name"]


PLAIN = pa.table(ROWS | {"name": ["a" * 30, None]}, schema=SCHEMA)
STREAMS = [
    arrow_stream(table)
    for table in (
        PLAIN,
        PLAIN.set_column(2, "name", PLAIN["name"].cast(pa.string_view())),
        PLAIN.set_column(2, "name", PLAIN["name"].dictionary_encode()),
        PLAIN.set_column(0, "user", pa.array(["1", None], pa.string())),
        PLAIN.set_column(3, "seen", pa.array([["1"], None], pa.list_(pa.dictionary(pa.int8(), pa.string())))),
        PLAIN.append_column("more", pa.array([{"a": "b" * 30}, None], pa.struct({"a": pa.string_view()}))),
    )
]
WORDS = [0, 1, 13, 1000, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]


@given(st.data())
def test_a_damaged_stream_is_one_clear_error(data):
    body = bytearray(data.draw(st.sampled_from(STREAMS)))
    for _ in range(data.draw(st.integers(1, 4))):
        place, word = data.draw(st.integers(0, len(body) // 4 - 1)), data.draw(st.sampled_from(WORDS))
        if data.draw(st.booleans()):
            body[4 * place + data.draw(st.integers(0, 3))] = data.draw(st.integers(0, 255))
        else:
            body[4 * place : 4 * place + 4] = word.to_bytes(4, "little")
    try:
        found = RequestReader(SCHEMA, 100, max_bytes=1 << 20).read_arrow(body)
    except DataError:
        return
    assert pa.table(dict(found.arrays)).num_rows == found.rows


NUMBERS = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("c", pa.int8()), ("x", pa.float32()), ("y", pa.float64())])
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ANY_NUMBER = st.integers(-100, 100) | st.integers(-(1 << 65), 1 << 65) | FLOATS | st.none() | st.booleans()
PLAIN = {"i": st.integers(-100, 100), "f": FLOATS}


@given(st.data(), st.integers(1, 3), st.booleans())
def test_numbers_are_read_together_as_each_column_alone(data, rows, is_plain):
    columns = {}
    for field in NUMBERS:
        numbers = PLAIN["i" if pa.types.is_integer(field.type) else "f"] if is_plain else ANY_NUMBER
        columns[field.name] = data.draw(st.lists(numbers, min_size=rows, max_size=rows))
    text = json.dumps(columns)

    def alone():
        whole = {field.name: pa.types.is_integer(field.type) for field in NUMBERS}
        return {f.name: to_array(columns[f.name], f, is_whole=whole[f.name]) for f in NUMBERS}

    def together():
        return RequestReader(NUMBERS, 10).read_json(f'{{"rows": {text}}}'.encode()).arrays

    try:
        wanted = alone()
    except DataError:
        with pytest.raises(DataError, match="row"):
            together()
        return
    found = together()
    assert not is_plain or not found.arrays
    assert pa.table(dict(found)).equals(pa.table(wanted, schema=NUMBERS))


@pytest.mark.parametrize("spaces", ["", " "])
@pytest.mark.parametrize("name", ["a", "a:b", '"a": 7, "b'])
def test_a_column_that_is_given_twice_is_refused(name, spaces):
    text = json.dumps(name) + spaces
    for rows in (f'{text}: [1], "user": [2], {text}: [3]', f'"user": [1], {text}: [3], "user"{spaces}: [2]'):
        with pytest.raises(DataError, match="given twice"):
            reader().read_json(f'{{"rows": {{{rows}}}}}'.encode())


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
    assert pa.table(dict(found.arrays)).schema == SCHEMA


def test_rows_of_long_lists_count_as_several_and_have_a_bound():
    def of(*lengths, rows_at_once=256):
        count = len(lengths)
        rows = {name: [values[0]] * count for name, values in ROWS.items()} | {"seen": [[1] * n for n in lengths]}
        return RequestRows.costs(read({"rows": rows}), rows_at_once)

    assert of(1) is None
    assert of(0, 128, 128) is None
    assert of(1, 256, 0).tolist() == [0, 1, 3, 4]
    assert of(32_768, rows_at_once=16).tolist() == [0, 16]
    with pytest.raises(DataError, match="'seen' has a list"):
        of(1, 32_769)
