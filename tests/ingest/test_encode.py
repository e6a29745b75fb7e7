"""Encoded splits beside what plain Python makes of the same rows, in every layout that Arrow has for them."""

import datetime
import json
import math
import subprocess
import sys
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest.transform_reference import hashed

from rowwise import DataError
from rowwise.ingest import Columns, Dense, Sparse
from rowwise.ingest.bags import numpy_type
from rowwise.ingest.block import ALIGNMENT, BlockLayout, EncodedRows, allocate
from rowwise.ingest.encode import bad_rows, encode
from rowwise.ingest.kinds import decoded_kind, is_text
from rowwise.ingest.reader import Split

WORD = (1 << 64) - 1
SPLIT = Split(source="frame", start=0, stop=1, first_row=100)
ROWS = {"a": 97, "b": 64, "c": 50, "t": 1000}


def bag_of(cell, sparse):
    """What the ids of one row become."""
    ids = cell if isinstance(cell, list) else [cell]
    kept = [i for i in ids if i is not None][: sparse.first]
    return kept if sparse.ids == "direct" else [hashed(i) % ROWS[sparse.table_name] for i in kept]


def bags_of(encoded, f):
    values_N, offsets_R1 = encoded.bags[f].values_N, encoded.bags[f].offsets_R1
    if offsets_R1 is None:
        return [[i] for i in values_N.tolist()]
    return [part.tolist() for part in np.split(values_N, offsets_R1[1:-1])] if len(offsets_R1) > 1 else []


def hidden(cells, kind):
    """A missing list that has ids all the same, which nobody may see."""
    behind = ["behind"] if is_text(kind.value_type) else [1, 2]
    filled = [behind if cell is None else cell for cell in cells]
    offsets = np.concatenate([[0], np.cumsum([len(cell) for cell in filled])])
    flat = pa.array([i for cell in filled for i in cell], kind.value_type)
    made = pa.ListArray if pa.types.is_list(kind) else pa.LargeListArray
    width = pa.int32() if pa.types.is_list(kind) else pa.int64()
    mask = pa.array([cell is None for cell in cells], pa.bool_())
    return made.from_arrays(pa.array(offsets, width), flat, mask=mask)


def laid_out(draw, cells, kind):
    """The cells as a column: with rows around that are cut off, in chunks, or with something behind what is missing."""
    around = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    more = [cells[0]] * around[0] + cells + [cells[-1]] * around[1] if cells else cells
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        array = hidden(more, kind) if draw(st.booleans()) else pa.array(more, kind)
    else:
        array = pa.array(more, decoded_kind(kind))
        array = array.dictionary_encode() if pa.types.is_dictionary(kind) else array
    array = array.slice(around[0] if cells else 0, len(cells))
    cuts = sorted(draw(st.lists(st.integers(0, len(cells)), max_size=2)))
    ends = [0, *cuts, len(cells)]
    return pa.chunked_array([array.slice(a, b - a) for a, b in pairwise(ends)], type=array.type)


SMALL = st.integers(0, 49)
ANY = st.integers(-(1 << 63), (1 << 63) - 1) | SMALL
TEXT = st.text(max_size=12)
SINGLE = [
    (pa.int64(), ANY),
    (pa.uint64(), st.integers(0, WORD)),
    (pa.int8(), SMALL),
    (pa.uint16(), SMALL),
    (pa.uint32(), st.integers(0, (1 << 32) - 1)),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.binary(), st.binary(max_size=20)),
    (pa.dictionary(pa.int32(), pa.string()), TEXT),
    (pa.dictionary(pa.int32(), pa.int64()), ANY),
]
LISTS = [
    *(
        (made(kind), st.lists(st.none() | ids, max_size=6))
        for made in (pa.list_, pa.large_list)
        for kind, ids in SINGLE[:7]
    ),
    (pa.list_(pa.int16(), 3), st.lists(st.none() | SMALL, min_size=3, max_size=3)),
    (pa.list_view(pa.int32()), st.lists(st.none() | SMALL, max_size=6)),
]
SPARSE = (Sparse(column="a"), Sparse(column="b", first=2), Sparse(column="c", table="b", first=1))


@pytest.mark.slow
@given(data=st.data(), rows=st.integers(0, 9))
def test_every_layout_gives_the_ids_that_python_gives(data, rows):
    table, cells = {}, {}
    for sparse in SPARSE:
        kind, ids = data.draw(st.sampled_from(SINGLE + LISTS))
        missing = st.none() | ids if data.draw(st.booleans()) else ids
        cells[sparse.column] = data.draw(st.lists(missing, min_size=rows, max_size=rows))
        table[sparse.column] = laid_out(data.draw, cells[sparse.column], kind)
    order = data.draw(st.none() | st.lists(st.integers(0, max(rows - 1, 0)), max_size=2 * rows))
    columns = Columns(labels=(), sparse=SPARSE)
    order_R = None if order is None else np.array(order, np.int64)
    encoded = encode(pa.table(table), columns, ROWS, SPLIT, order_R)
    picked = range(rows) if order is None else order
    assert encoded.rows == len(picked)
    for f, sparse in enumerate(SPARSE):
        assert bags_of(encoded, f) == [bag_of(cells[sparse.column][r], sparse) for r in picked]


@given(data=st.data(), rows=st.integers(0, 40))
def test_numbers_labels_keys_and_times(data, rows):
    def cells(what):
        return data.draw(st.lists(what, min_size=rows, max_size=rows))

    number = st.none() | st.floats(width=32, allow_infinity=False)
    frame = {
        "x": (cells(number), pa.float32()),
        "y": (cells(number), pa.float64()),
        "z": (cells(st.none() | st.integers(-5, 5)), pa.int8()),
        "b": (cells(st.none() | st.booleans()), pa.bool_()),
        "l": (cells(st.booleans()), pa.bool_()),
        "w": (cells(st.floats(0, 9, width=32)), pa.float32()),
        "k": (cells(TEXT), pa.string()),
        "t": (cells(st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2100, 1, 1))), pa.timestamp("us")),
        "a": (cells(SMALL), pa.int64()),
    }
    table = pa.table({name: laid_out(data.draw, of, kind) for name, (of, kind) in frame.items()})
    columns = Columns(
        labels=("l",),
        dense=(
            Dense(column="y", log1p=True, mean=0.1, std=0.3),
            Dense(column="x", fill=2.5, mean=-1.0),
            Dense(column="z", fill=3.0, log1p=True),
            Dense(column="b"),
        ),
        sparse=(Sparse(column="a", ids="direct"),),
        weight="w",
        key="k",
        time="t",
    )
    order = data.draw(st.none() | st.lists(st.integers(0, max(rows - 1, 0)), max_size=2 * rows))
    encoded = encode(table, columns, ROWS, SPLIT, None if order is None else np.array(order, np.int64))
    picked = range(rows) if order is None else order

    def expected(dense):
        x = [frame[dense.column][0][r] for r in picked]
        x_R = np.array([dense.fill if v is None or math.isnan(v) else v for v in x], np.float32)
        x_R = np.log1p(np.maximum(x_R, 0)) if dense.log1p else x_R
        return (x_R - np.float32(dense.mean)) / np.float32(dense.std)

    for k, dense in enumerate(columns.dense):
        assert encoded.dense_RF[:, k].tolist() == expected(dense).tolist()
    assert encoded.labels_RK[:, 0].tolist() == [float(frame["l"][0][r]) for r in picked]
    assert encoded.weights_R.tolist() == [frame["w"][0][r] for r in picked]
    assert encoded.keys_R.view(np.uint64).tolist() == [hashed(frame["k"][0][r]) for r in picked]
    times = [(frame["t"][0][r] - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1) for r in picked]
    assert encoded.times_R.tolist() == times


def test_many_rows_go_through_in_parts():
    rng = np.random.default_rng(3)
    rows = 20_001
    x_R = rng.standard_normal(rows).astype(np.float32)
    mask_R = rng.random(rows) < 0.3
    table = pa.table({"x": pa.array(x_R, mask=mask_R), "y": pa.array(x_R), "a": np.arange(rows)}).slice(5)
    columns = Columns(labels=(), dense=(Dense(column="x", fill=1), Dense(column="y", log1p=True)), sparse=SPARSE[:1])
    expected = np.stack([np.where(mask_R, 1, x_R), np.log1p(np.maximum(x_R, 0))], 1)[5:]
    for order_R in (None, rng.permutation(rows - 5), rng.permutation(rows - 5)[:3000]):
        encoded = encode(table, columns, ROWS, SPLIT, order_R)
        assert (encoded.dense_RF == (expected if order_R is None else expected[order_R])).all()


def test_a_dictionary_may_hold_nothing():
    """A missing id is no id, whether the row says so or the dictionary."""
    for kind, name in ((pa.string(), "x"), (pa.int64(), 5)):
        words = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 1], pa.int8()), pa.array([None, name], kind))
        encoded = encode(pa.table({"a": words}), Columns(labels=(), sparse=SPARSE[:1]), ROWS, SPLIT)
        row = hashed(name) % 97
        assert bags_of(encoded, 0) == [[], [row], [], [row]]


def test_these_bits_for_ever():
    """Saved models depend on them."""
    table = pa.table(
        {
            "l": [0, 1, 1, 0],
            "a": [1, -1, None, 1 << 62],
            "b": [[1, 2, 3], None, [None, 4], []],
            "c": ["68fd1e64", "", None, "a longer word"],
            "k": ["p", "q", "r", "s"],
        }
    )
    columns = Columns(labels=("l",), sparse=SPARSE, key="k")
    encoded = encode(table, columns, ROWS, SPLIT)
    assert [bags_of(encoded, f) for f in range(3)] == GOLDEN["bags"]
    assert encoded.keys_R.tolist() == GOLDEN["keys"]


GOLDEN = {
    "bags": [[[27], [52], [], [28]], [[1, 14], [], [10], []], [[23], [47], [], [55]]],
    "keys": [6186809627307975536, -3661155774956447961, 3341490973895284898, 202683911809892382],
}


def example(rows=50):
    table = pa.table(
        {
            "l": [r % 2 for r in range(rows)],
            "x": [r / 3 for r in range(rows)],
            "a": [r if r % 7 else None for r in range(rows)],
            "b": [list(range(r % 5)) for r in range(rows)],
            "c": range(rows),
            "k": range(rows),
        }
    )
    return table, Columns(labels=("l",), dense=(Dense(column="x"),), sparse=SPARSE, key="k")


def arrays_of(encoded):
    bags = [part for bag in encoded.bags for part in (bag.values_N, bag.offsets_R1)]
    return [encoded.dense_RF, encoded.labels_RK, encoded.weights_R, encoded.keys_R, encoded.times_R, *bags]


def test_a_block_holds_everything():
    table, columns = example()
    asked = []
    room = allocate(1 << 16)
    room[:] = 255

    def memory(count):
        asked.append(count)
        return room

    encoded = encode(table, columns, ROWS, SPLIT, allocator=memory)
    assert asked == [encoded.layout.size] == [len(encoded.block)]
    assert (room[encoded.layout.size :] == 255).all()
    begin = room.ctypes.data
    for array in (a for a in arrays_of(encoded) if a is not None and a.size):
        assert begin <= array.ctypes.data < begin + encoded.layout.size
        assert not array.flags.owndata
    places = [getattr(encoded.layout, name) for name in ("dense", "labels", "values", "offsets", "keys")]
    assert all(place.offset % ALIGNMENT == 0 for place in places)
    spans = sorted((place.offset, place.end) for place in places)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    alone = encode(table, columns, ROWS, SPLIT)
    for a, b in zip(arrays_of(alone), arrays_of(encoded), strict=True):
        assert (a is None and b is None) or a.tolist() == b.tolist()
    with pytest.raises(DataError, match="of its layout"):
        EncodedRows.from_block(room[:100], encoded.layout)


READ = """
import json, sys
import msgspec, numpy as np
from pathlib import Path
from rowwise.ingest.block import BlockLayout, EncodedRows
layout = msgspec.json.decode(sys.argv[1].encode(), type=BlockLayout)
e = EncodedRows.from_block(np.frombuffer(Path(sys.argv[2]).read_bytes(), np.uint8), layout)
bags = [[b.values_N.tolist(), None if b.offsets_R1 is None else b.offsets_R1.tolist()] for b in e.bags]
print(json.dumps([e.rows, e.dense_RF.tolist(), e.labels_RK.tolist(), e.keys_R.tolist(), e.times_R, bags]))
assert "torch" not in sys.modules and "pyarrow" not in sys.modules
"""


def test_another_process_reads_the_block(tmp_path):
    table, columns = example()
    encoded = encode(table, columns, ROWS, SPLIT, np.arange(49, 10, -2))
    (tmp_path / "block").write_bytes(encoded.block.tobytes())
    layout = msgspec.json.encode(encoded.layout).decode()
    done = subprocess.run([sys.executable, "-c", READ, layout, tmp_path / "block"], capture_output=True, check=True)
    bags = [[b.values_N.tolist(), None if b.offsets_R1 is None else b.offsets_R1.tolist()] for b in encoded.bags]
    parts = [encoded.dense_RF.tolist(), encoded.labels_RK.tolist(), encoded.keys_R.tolist(), None, bags]
    assert json.loads(done.stdout) == [20, *parts]
    assert msgspec.json.decode(layout, type=BlockLayout) == encoded.layout


def test_an_order_of_rows_that_are_not_there():
    table, columns = example()
    for order in ([0, 50], [-1]):
        with pytest.raises(IndexError, match="expected 0 to 49"):
            encode(table, columns, ROWS, SPLIT, np.array(order))


CHECKED = Columns(
    labels=("l",),
    dense=(Dense(column="x"),),
    sparse=(Sparse(column="a", ids="direct"), Sparse(column="b", ids="direct", first=2), Sparse(column="c")),
    weight="w",
    key="k",
    time="t",
)
MOSTLY = {  # good values again and again, so that some tables are good
    "l": [0, 1, 1, 0, 1, 0, 1, 0, 2, None],
    "x": [0.0, None, 1.5, math.nan, 1.0, 2.0, 3.0, math.inf],
    "a": [0, 5, 96, None, 1, 2, 3, 4, 97, -1],
    "b": [[], None, [0, 63], [None, 1], [1, 2, 64], [5], [6], [64], [-1, 64]],
    "c": [0, None, -5],
    "w": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -1.0, math.inf, None],
    "k": ["a", "b", "c", "d", "e", "f", None],
    "t": [0, 1, 2, 3, 4, 5, None],
}


def is_bad(name, value):
    """Plainly."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    return {
        "l": value not in (0, 1),
        "x": value == math.inf,
        "a": any(not 0 <= i < 97 for i in ids if name == "a"),
        "b": any(not 0 <= i < 64 for i in [i for i in ids if i is not None][:2] if name == "b"),
        "c": False,
        "w": value is None or value in (-1.0, math.inf),
        "k": value is None,
        "t": value is None,
    }[name]


@given(data=st.data(), rows=st.integers(1, 6), good=st.booleans())
def test_encode_refuses_what_bad_rows_finds(data, rows, good):
    of = {n: [v for v in values if not (good and is_bad(n, v))] for n, values in MOSTLY.items()}
    cells = {n: data.draw(st.lists(st.sampled_from(v), min_size=rows, max_size=rows)) for n, v in of.items()}
    kinds = {"l": pa.int8(), "b": pa.list_(pa.int64()), "x": pa.float32(), "w": pa.float64(), "k": pa.string()}
    table = pa.table({n: laid_out(data.draw, v, kinds.get(n, pa.int64())) for n, v in cells.items()})
    expected = [any(is_bad(n, cells[n][r]) for n in cells) for r in range(rows)]
    bad = bad_rows(table, CHECKED, ROWS, SPLIT)
    assert (bad is not None) == any(expected)
    if bad is None:
        encode(table, CHECKED, ROWS, SPLIT)
        return
    assert bad.mask_R.tolist() == expected
    first = bad.reasons[0]
    with pytest.raises(DataError) as refused:
        encode(table, CHECKED, ROWS, SPLIT)
    assert str(refused.value) == f"frame: row {100 + first.row}, column {first.column!r}: {first.reason}"
    assert all(is_bad(wrong.column, cells[wrong.column][wrong.row]) for wrong in bad.reasons)
    assert {(w.row, w.column) for w in bad.reasons} == {
        (r, n) for n in cells for r in range(rows) if is_bad(n, cells[n][r])
    } or len(bad.reasons) >= 5
    rest_R = np.flatnonzero(~bad.mask_R)
    encode(table, CHECKED, ROWS, SPLIT, rest_R)
    encode(table.take(pa.array(rest_R)), CHECKED, ROWS, SPLIT)
    asked = data.draw(st.lists(st.integers(0, rows - 1), max_size=8))
    if any(expected[r] for r in asked):
        with pytest.raises(DataError):
            encode(table, CHECKED, ROWS, SPLIT, np.array(asked, np.int64))
    else:
        encode(table, CHECKED, ROWS, SPLIT, np.array(asked, np.int64))


def test_what_is_said_of_bad_rows():
    table = pa.table(
        {"l": [0, 1, 2, None], "x": [0.0] * 4, "a": [0, 200, 1, 2], "b": [[1]] * 3 + [[1, -3]], "c": [1] * 4}
    )
    table = table.append_column("w", pa.array([1.0] * 4)).append_column("k", pa.array(range(4)))
    bad = bad_rows(table.append_column("t", pa.array(range(4))), CHECKED, ROWS, SPLIT)
    assert bad.mask_R.tolist() == [False, True, True, True]
    assert [(w.row, w.column, w.reason) for w in bad.reasons] == [
        (2, "l", "2: expected a label of 0 or 1"),
        (3, "l", "None: expected a label of 0 or 1"),
        (1, "a", "id 200: expected 0 to 96, the rows of table 'a'; ids='hash' takes any"),
        (3, "b", "id -3: expected 0 to 63, the rows of table 'b'; ids='hash' takes any"),
    ]


def test_a_column_of_the_wrong_type_is_still_raised():
    table, columns = example()
    with pytest.raises(DataError, match="column 'x' holds string"):
        bad_rows(table.set_column(1, "x", pa.array(["a"] * 50)), columns, ROWS, SPLIT)


NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
]


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_numbers_have_the_numpy_type_that_arrow_gives_them(kind):
    assert numpy_type(kind) == kind.to_pandas_dtype()
