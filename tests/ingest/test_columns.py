"""What columns may hold, what missing values mean, and what is said of values that cannot be."""

import datetime

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from rowwise import DataError, SpecError, Table
from rowwise.ingest import Batcher, Batching, Columns, Dense, FrameReader, Sparse
from rowwise.ingest.mix import mix, mix_bytes, permutation, remainder

LABEL = [0, 1, 0, 1]
TABLES = (Table(name="id", rows=50, dim=4),)


def batch(frame, columns, tables=TABLES):
    frame = pa.table({"label": LABEL} | frame)
    return next(iter(Batcher(FrameReader(frame), columns, tables, Batching(size=9, shuffle=False))))


def ids(values, **how):
    made = batch({"id": values}, Columns(labels=("label",), sparse=(Sparse(column="id", **how),))).sparse
    return [part.tolist() for part in made.values_N.split(made.lengths_FB.tolist())]


def test_missing_ids_are_no_ids():
    assert ids(pa.array([3, None, 5, 0]), ids="direct") == [[3], [], [5], [0]]
    lists = pa.array([[1, None, 2], None, [], [None, None]], pa.list_(pa.int32()))
    assert ids(lists, ids="direct") == [[1, 2], [], [], []]
    # The first of those that are there.
    assert ids(pa.array([[None, 1, 2], [3, 4], [], [5]]), ids="direct", first=1) == [[1], [3], [], [5]]


def test_all_layouts_hash_alike():
    words = [["a", "löng word with spaces"], [""], None, ["a", None, "12345678"]]
    expected = ids(pa.array(words))
    assert expected[3][0] == expected[0][0]
    assert [len(bag) for bag in expected] == [2, 1, 0, 2]
    for kind in (
        pa.large_list(pa.large_string()),
        pa.list_(pa.binary()),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
    ):
        array = pa.array(words, pa.list_(pa.string())).cast(kind) if "dict" not in str(kind) else _dictionaries(words)
        assert ids(array) == expected
    numbers = [[1, -1], [2**40], None, [7]]
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int64())):
        assert ids(pa.array(numbers, kind)) == ids(pa.array(numbers))
    small = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert ids(pa.array(small, pa.list_(pa.int16(), 2))) == ids(pa.array(small, pa.list_(pa.uint64())))
    flat = ["x", None, "y", "x"]
    x, y = ids(pa.array(["x", "y"] * 2))[:2]
    for kind in (pa.string(), pa.string_view(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())):
        assert ids(pa.array(flat).cast(kind)) == [x, [], y, x]


def _dictionaries(words):
    flat = pa.array([w for bag in words for w in bag or []]).dictionary_encode()
    offsets = pa.array([0, 2, None, 3, 6], pa.int32())
    return pa.ListArray.from_arrays(offsets, flat)


def test_slices_and_chunks_make_no_difference():
    whole = pa.table(
        {
            "label": [0, 1] * 50,
            "id": [[i] * (i % 4) if i % 5 else None for i in range(100)],
            "word": [f"w{i}" if i % 3 else None for i in range(100)],
        }
    )
    columns = Columns(labels=("label",), sparse=(Sparse(column="id"), Sparse(column="word")))
    tables = [Table(name=name, rows=1000, dim=4) for name in ("id", "word")]

    def first(frame):
        return next(iter(Batcher(FrameReader(frame), columns, tables, Batching(size=99, shuffle=False)))).sparse

    pieces = pa.concat_tables([whole.slice(7, 20), whole.slice(27, 3), whole.slice(30, 33)])
    for frame in (whole.slice(7, 56), pieces):
        assert first(frame).values_N.tolist() == first(pa.Table.from_pylist(frame.to_pylist())).values_N.tolist()
        assert len(first(frame).lengths_FB) == 112


def test_the_hash_is_this_one_for_ever():
    """Rows of saved tables mean what this hash made them mean."""
    numbers = mix(np.array([0, 1, 2**64 - 1], np.uint64))
    assert [hex(n) for n in numbers.tolist()] == ["0xe220a8397b1dcdaf", "0x910a2dec89025cc1", "0xe4d971771b652c20"]
    data = "".join(WORDS).encode()
    offsets = np.cumsum([0] + [len(w.encode()) for w in WORDS])
    assert [hex(n) for n in mix_bytes(np.frombuffer(data, np.uint8), offsets).tolist()] == HASHES
    assert permutation(6, 1, 2).tolist() == ORDER


WORDS = ["", "a", "68fd1e64", "a longer word", "ünï"]
HASHES = ["0xe220a8397b1dcdaf", "0x5e025f9ade9eaf3e", "0xafd2ea734b8e1a17", "0x158d87811436f237", "0x8e990d8e6acca274"]
ORDER = [5, 1, 4, 3, 0, 2]


def test_the_hash_spreads():
    for rows, bins in ((64, 64), (100, 50), (2**33 + 1, 50)):
        found = remainder(mix(np.arange(10_000, dtype=np.uint64)), rows)
        assert (found == (mix(np.arange(10_000, dtype=np.uint64)) % np.uint64(rows)).astype(np.int64)).all()
        counts = np.histogram(found, bins=bins)[0]
        assert abs(counts - 10_000 / bins).max() < 80
    words = [str(i).encode() for i in range(20_000)]
    offsets = np.cumsum([0] + [len(w) for w in words])
    assert len(set(mix_bytes(np.frombuffer(b"".join(words), np.uint8), offsets).tolist())) == 20_000


@pytest.mark.parametrize("changes", [{"mean": float("nan")}, {"std": 0.0}, {"std": float("inf")}, {"std": -1.0}])
def test_numbers_without_a_scale_are_refused(changes):
    with pytest.raises(SpecError, match=f"columns: 'x': {next(iter(changes))}="):
        Dense(column="x", **changes)


def test_several_labels_weights_keys_and_times():
    columns = Columns(labels=("label", "b"), sparse=(Sparse(column="id"),), weight="w", key="k", time="t")
    day = datetime.date(1970, 1, 2)
    frame = {
        "id": [1] * 4,
        "b": [True, False, True, True],
        "w": [0, 1, 2, 0.5],
        "k": ["a", "b", "c", "a"],
        "t": [day] * 4,
    }
    made = batch(frame, columns)
    assert made.labels_BK.tolist() == [[0, 1], [1, 0], [0, 1], [1, 1]]
    assert made.weights_B.tolist() == [0, 1, 2, 0.5]
    assert made.keys_B[0] == made.keys_B[3] != made.keys_B[1]
    assert made.times_B.tolist() == [86_400_000_000] * 4


BAD = [
    ({"label": [0, 1, 2, 1]}, r"frame: row 2, column 'label': 2: expected a label of 0 or 1"),
    (
        {"label": ["0", "1", "0", "1"]},
        r"frame: column 'label' holds string: expected numbers for a label, or a condition",
    ),
    ({"x": [0.0, 1.0, float("inf"), 0.0]}, r"frame: row 2, column 'x': inf: expected a finite number in 32 bits"),
    ({"x": [["a"]] * 4}, r"frame: column 'x' holds list<.*>: expected numbers"),
    (
        {"id": [1, 2, 3, 10]},
        r"frame: row 3, column 'id': id 10: expected 0 to 9, the rows of table 'id'; ids='hash' takes any",
    ),
    ({"id": [[1], [], None, [2, -3]]}, r"frame: row 3, column 'id': id -3: expected 0 to 9"),
    ({"id": ["a"] * 4}, r"frame: column 'id' holds string: expected whole numbers, or lists of them; set ids='hash'"),
    ({"id": [1.0, None, 2.0, 3.0]}, r"frame: column 'id' holds double: .*as Int64"),
    (
        {"w": [1.0, -1.0, 1.0, 1.0]},
        r"frame: row 1, column 'w': -1.0: expected a weight that is finite and not negative",
    ),
    ({"k": [1, 2, 3, None]}, r"frame: row 3, column 'k': None: expected a key in every row"),
    ({"k": [1.0, 2.0, 3.0, 4.0]}, r"frame: column 'k' holds double: expected whole numbers or text"),
    ({"t": [1, None, 3, 4]}, r"frame: row 1, column 't': None: expected a time in every row"),
]


@pytest.mark.parametrize(("frame", "message"), BAD, ids=lambda b: next(iter(b)) if isinstance(b, dict) else "")
def test_bad_values_are_named(frame, message):
    columns = Columns(
        labels=("label",),
        dense=(Dense(column="x"),),
        sparse=(Sparse(column="id", ids="direct"),),
        weight="w",
        key="k",
        time="t",
    )
    good = {"x": [0.0] * 4, "id": [1] * 4, "w": [1] * 4, "k": [1, 2, 3, 4], "t": [0] * 4}
    with pytest.raises(DataError, match=message):
        batch(good | frame, columns, [Table(name="id", rows=10, dim=4)])


def test_a_table_that_maps_unknown_ids_gets_them():
    columns = Columns(labels=("label",), sparse=(Sparse(column="id", ids="direct"),))
    made = batch({"id": [1, 2, 3, 99]}, columns, [Table(name="id", rows=10, dim=4, unknown="last_row")])
    assert made.sparse.values_N.tolist() == [1, 2, 3, 99]


def test_wrong_names():
    columns = Columns(labels=("lable",), sparse=(Sparse(column="id"),))
    with pytest.raises(DataError, match=r"you mean 'label'. There"):
        batch({"id": [1] * 4}, columns)
    columns = Columns(labels=("label",), sparse=(Sparse(column="id", table="ids"),))
    with pytest.raises(SpecError, match="'id': no table 'ids'"):
        batch({"id": [1] * 4}, columns)
    columns = Columns(labels=("label",), sparse=(Sparse(column="id", feature="other"),))
    with pytest.raises(SpecError, match="table 'id' has features"):
        batch({"id": [1] * 4}, columns)


def test_columns_that_cannot_be():
    with pytest.raises(SpecError, match="sparse feature"):
        Columns(labels=(), sparse=())
    with pytest.raises(SpecError, match="columns make feature 'a'"):
        Columns(labels=("l",), sparse=(Sparse(column="a"), Sparse(column="a", table="t")))
    with pytest.raises(SpecError, match="least 1"):
        Columns(labels=("l",), sparse=(Sparse(column="a", first=0),))
    with pytest.raises(SpecError, match="'direct' or 'hash'"):
        Columns(labels=("l",), sparse=(Sparse(column="a", ids="modulo"),))


def test_columns_round_trip():
    columns = Columns(
        labels=("l",), dense=(Dense(column="x", log1p=True),), sparse=(Sparse(column="a", first=3),), key="k"
    )
    assert msgspec.json.decode(msgspec.json.encode(columns), type=Columns) == columns
    assert columns.names == ("l", "x", "a", "k")
