"""Transforms one after another: what is read, what is run, which rows are kept, and what an export holds."""

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest.transform_reference import keeps

from rowwise import Table
from rowwise.ingest import Batcher, Batching, Columns, Dense, FrameReader, Sparse, Split
from rowwise.ingest.transform import (
    BoxCox,
    Bucketize,
    Cartesian,
    Clamp,
    Fill,
    FirstX,
    Log1p,
    Logit,
    MapId,
    Onehot,
    RowPosition,
    Sampling,
    SigridHash,
    Transforms,
    UserFunction,
    apply,
    digest,
    from_json,
    load,
    schema_after,
    serving,
    sources,
    to_json,
)

TABLE = pa.table(
    {"label": [0, 1, 0, 0], "x": [0.5, None, 2.0, 9.0], "ids": [[1, 2, 3], [], None, [4]], "u": [7, 8, 9, 7]}
)
LIST = (
    FirstX(column="ids", to="cut", count=2),
    Bucketize(column="x", to="bucket", borders=(1.0, 5.0)),
    SigridHash(column="cut", rows=100),
    Cartesian(columns=("bucket", "u"), to="cross"),
    Fill(column="x", value=-1.0),
)


def test_only_what_is_wanted_is_read_and_run():
    loaded = load(LIST)
    assert sources(loaded, ["label"]) == ("label",)
    assert sources(loaded, ["cut"]) == ("ids",)
    assert set(sources(loaded, ["cross", "u"])) == {"u", "x"}
    assert sources(loaded, ["x"]) == ("x",)
    # A column that is made anew is not read for what it was.
    assert sources(load([FirstX(column="a", to="b", count=1)]), ["b"]) == ("a",)
    made, _ = apply(TABLE.select(["ids"]), loaded, ["cut"])
    assert made.column_names == ["cut"]
    assert made["cut"].to_pylist()[1:3] == [[], None]


def test_transforms_read_what_those_before_made():
    loaded = load(LIST)
    made, keep_R = apply(TABLE, loaded, ["x", "bucket", "label", "cross"])
    assert keep_R is None
    assert made["x"].to_pylist() == [0.5, -1, 2, 9]
    assert made["bucket"].to_pylist() == [0, None, 1, 2]
    assert made["cross"].null_count == 1
    assert made["label"].equals(TABLE["label"])
    after = schema_after(TABLE.schema, loaded)
    assert after.names == ["label", "x", "ids", "u", "cut", "bucket", "cross"]
    assert after.field("cut").type == pa.large_list(pa.int64())


def test_functions_of_numbers_do_not_depend_on_where_they_are():
    """Vector instructions take several numbers at once, and what is left at the end one by one."""
    rng = np.random.default_rng(0)
    for kind in (np.float32, np.float64):
        table = pa.table({"x": rng.exponential(2, 1000).astype(kind)})
        for transform in (
            Log1p(column="x"),
            Logit(column="x"),
            BoxCox(column="x", power=0.3),
            Clamp(column="x", low=1),
        ):
            loaded = load([transform])
            together = apply(table, loaded, ["x"])[0]
            for begin, size in ((0, 1), (1, 7), (3, 64), (990, 10), (999, 1)):
                assert apply(table.slice(begin, size), loaded, ["x"])[0].equals(together.slice(begin, size))


@given(
    known=st.dictionaries(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9), min_size=1, max_size=300),
    step=st.sampled_from([1, 2**20, 2**60]),
)
def test_large_mappings(known, step):
    mapping = known | {n * step - 2**62: n for n in range(7)}
    ids = [*mapping, *(key ^ 1 for key in mapping)]
    for kind in (int, str):
        column = [kind(i) for i in ids]
        made = apply(pa.table({"a": column}), load([MapId(column="a", mapping=mapping)]), ["a"])[0]
        assert made["a"].to_pylist() == [mapping.get(i) for i in ids]


def where(index):
    return RowPosition(split=Split(source="f", start=index, stop=index + 1, first_row=0), index=index)


@given(
    labels=st.lists(st.sampled_from([0, 1, None]), max_size=20),
    rate=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
    index=st.integers(0, 5),
    which=st.sampled_from([("label", None), (None, "word"), ("label", "id"), (None, None)]),
    data=st.data(),
)
def test_sampling_is_its_reference(labels, rate, seed, index, which, data):
    rows = len(labels)
    words = data.draw(st.lists(st.sampled_from(["a", "ünï", None]), min_size=rows, max_size=rows))
    ids = data.draw(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows))
    table = pa.table(
        {"label": pa.array(labels, pa.float32()), "word": pa.array(words, pa.string()), "id": pa.array(ids, pa.int64())}
    )
    transform = Sampling(rate=rate, seed=seed, column=which[0], key=which[1])
    made, keep_R = apply(table, load([transform]), ["label"], where(index))
    assert made.num_rows == rows
    columns = [table[name].to_pylist() for name in transform.reads]
    expected = [keeps(transform, tuple(c[row] for c in columns), index, row) for row in range(rows)]
    assert keep_R.tolist() == expected


def test_sampling_keeps_its_share_and_never_cuts_the_table():
    rows = 20_000
    table = pa.table({"label": np.arange(rows) % 4 == 0, "user": [f"u{n % 500}" for n in range(rows)]})
    negatives = Sampling(rate=0.1, column="label", value=0)
    made, keep_R = apply(table, load([negatives]), ["user"], where(1))
    assert made.num_rows == rows
    label_R = table["label"].to_numpy()
    assert keep_R[label_R].all()
    assert abs(keep_R[~label_R].mean() - 0.1) < 0.01
    other = apply(table, load([negatives]), ["user"], where(2))[1]
    assert (other != keep_R).any()
    users = apply(table, load([Sampling(rate=0.3, key="user")]), ["user"], where(1))[1]
    assert (users[:500] == users[500:1000]).all()
    assert abs(users.mean() - 0.3) < 0.1
    # Two of them keep what both keep; rows that are served are all kept, and need no label.
    both = load([negatives, Sampling(rate=0.3, key="user")])
    assert (apply(table, both, ["user"], where(1))[1] == (keep_R & users)).all()
    assert set(sources(both, ["user"])) == {"user", "label"}
    assert sources(serving(both), ["user"]) == ("user",)
    assert apply(table.select(["user"]), serving(both), ["user"])[1] is None
    words = pa.table({"w": pa.array(["no", "yes", None]).dictionary_encode()})
    kept = apply(words, load([Sampling(rate=0, column="w", value="no")]), ["w"])[1]
    assert kept.tolist() == [False, True, True]


OWN = '''
import dataclasses

import pyarrow as pa
import pyarrow.compute as pc


@dataclasses.dataclass
class Least:
    views: "int" = 1


def ratio(clicks, views):
    """Clicks for each time it was shown."""
    return pc.divide(pc.cast(clicks, pa.float64()), pc.max_element_wise(views, Least().views))


def both(values, *, other=1):
    return {"length": pc.list_value_length(values), "kind": pa.array([str(values.type)] * len(values), pa.string())}


def pair(a, b):
    return b, pa.chunked_array([a])
'''


@pytest.fixture
def own(tmp_path):
    place = tmp_path / "mine.py"
    place.write_text(OWN)
    return place


def test_own_functions(own):
    table = pa.table({"clicks": [1, 2, None], "views": [4, 0, 2], "values": [[1], None, [2, 3]]})
    loaded = load(
        [
            f"{own}:ratio",
            UserFunction(function=f"{own}:both", columns=("values",), to=("kind", "length")),
            UserFunction(function=f"{own}:pair", columns=("clicks", "views"), to=("views", "clicks")),
        ]
    )
    wanted = ["ratio", "kind", "length", "views", "clicks"]
    made, _ = apply(table, loaded, wanted)
    assert made.to_pydict() == {
        "ratio": [0.25, 2.0, None],
        "kind": ["large_list<item: int64>"] * 3,
        "length": [1, None, 2],
        "views": [4, 0, 2],
        "clicks": [1, 2, None],
    }
    assert made.schema == pa.schema([schema_after(table.schema, loaded).field(name) for name in wanted])
    assert sources(loaded, ["length"]) == ("values",)
    assert set(sources(loaded, ["ratio"])) == {"clicks", "views"}
    for rows in (0, 1):
        assert apply(table.slice(0, rows), loaded, wanted)[0].equals(made.slice(0, rows))


def test_an_export_needs_nothing_else(own, tmp_path):
    ids = tmp_path / "ids.txt"
    ids.write_text("red\ngreen\n")
    (tmp_path / "numbered.txt").write_text("red\t5\n")
    transforms = [
        f"{own}:ratio",
        MapId(column="colour", file=str(ids)),
        Onehot(column="colour", to="is", classes=(0, 1)),
        Sampling(rate=0.5),
    ]
    loaded = load(transforms)
    table = pa.table({"clicks": [1], "views": [2], "colour": ["green"]})
    wanted = ["ratio", "colour", "is_0", "is_1"]
    expected = apply(table, loaded, wanted)[0]
    assert expected.to_pydict() == {"ratio": [0.5], "colour": [1], "is_0": [0], "is_1": [1]}
    data, marked = to_json(serving(loaded)), digest(loaded)
    for path in (own, ids):
        path.unlink()
    again = from_json(data)
    assert apply(table, again, wanted)[0].equals(expected)
    assert to_json(again) == data
    assert digest(again) == digest(serving(loaded)) != marked
    assert load([MapId(column="c", file=str(tmp_path / "numbered.txt"))]).transforms[0].mapping == {"red": 5}
    (tmp_path / "lines.txt").write_text("a\x85b\r\nc\u2028d\n", "utf-8")
    assert load([MapId(column="c", file=str(tmp_path / "lines.txt"))]).transforms[0].mapping == {
        "a\x85b": 0,
        "c\u2028d": 1,
    }


def test_the_digest_goes_by_what_is_done(own, tmp_path):
    marked = digest(load([f"{own}:ratio", *LIST]))
    assert len(marked) == 64
    (tmp_path / "there").mkdir()
    moved = tmp_path / "there" / "mine.py"
    moved.write_text(OWN)
    assert digest(load([f"{moved}:ratio", *LIST])) == marked
    moved.write_text(OWN + "\n# another\n")
    assert digest(load([f"{moved}:ratio", *LIST])) != marked
    others = [LIST[:-1], LIST[::-1], (*LIST[:-1], Fill(column="x", value=-2.0))]
    assert len({digest(load(some)) for some in (*others, LIST)}) == 4
    a, b = ({1: 2, 3: 4}, {3: 4, 1: 2})
    assert digest(load([MapId(column="a", mapping=a)])) == digest(load([MapId(column="a", mapping=b)]))
    assert digest(load([Bucketize(column="a", borders=(1, 2))])) == digest(
        load([Bucketize(column="a", borders=(1.0, 2.0))])
    )
    # Checkpoints compare it, so it stays the same for ever.
    assert digest(load([SigridHash(column="a", rows=9)])).startswith("b01e487d7a2ccc5a")


def test_recipes_hold_them(own):
    text = [
        {"kind": "first_x", "column": "ids", "count": 2},
        "mine.py:ratio",
        {"kind": "map_id", "column": "a", "mapping": {7: 1}},
    ]
    decoded = msgspec.convert(text, Transforms)
    assert decoded == (FirstX(column="ids", count=2), "mine.py:ratio", MapId(column="a", mapping={7: 1}))
    assert msgspec.json.decode(msgspec.json.encode(decoded), type=Transforms) == decoded


def test_batches_are_made_of_them():
    """What transforms make is what columns take; a null that comes out is what is missing in a batch."""
    made, _ = apply(TABLE, load(LIST), ["label", "cut", "bucket", "cross", "x"])
    sparse = (*(Sparse(column=name, ids="direct") for name in ("cut", "bucket")), Sparse(column="cross"))
    columns = Columns(labels=("label",), sparse=sparse, dense=(Dense(column="x"),))
    tables = [Table(name=name, rows=100, dim=4) for name in ("cut", "bucket", "cross")]
    batch = next(iter(Batcher(FrameReader(made), columns, tables, Batching(size=4, shuffle=False))))
    assert batch.sparse.lengths_FB.tolist() == [2, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1]
    assert batch.dense_BF.flatten().tolist() == [0.5, -1, 2, 9]
