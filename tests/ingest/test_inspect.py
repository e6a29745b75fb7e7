"""Dataset cards: counts are right, estimates are as good as they say, and what is wrong is warned of."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as pq
from test_cli import rowwise_cli

from rowwise import DataError
from rowwise.ingest import FrameReader, ParquetReader
from rowwise.ingest.inspect import inspect
from rowwise.ingest.mix import mix
from rowwise.ingest.sketch import Sketch

ROWS = 4000


def frame(**columns):
    draw = np.random.default_rng(0)
    label = draw.integers(0, 2, ROWS)
    return pa.table({"label": label, "x": draw.normal(size=ROWS), "user_id": draw.integers(0, 300, ROWS)} | columns)


def card(**columns):
    return inspect(FrameReader(frame(**columns), split_rows=700)).card


def column(made, name):
    return next(c for c in made.columns if c.name == name)


def test_plain_columns():
    lists = [None if i % 4 == 0 else list(range(i % 4)) for i in range(ROWS)]
    made = card(
        bag=lists, word=[None if i % 10 == 0 else f"w{i % 7}" for i in range(ROWS)], big=2**45 + np.arange(ROWS) // 2
    )
    assert made.rows == ROWS
    assert made.label_rate == pytest.approx(frame()["label"].to_numpy().mean())
    assert {c.name: c.role for c in made.columns} == {
        "label": "label",
        "x": "dense",
        "user_id": "sparse",
        "bag": "sparse",
        "word": "sparse",
        "big": "sparse",
    }
    # Each id of `big` is in two rows: a fifth of those of test rows are in no training row.
    (line,) = made.warnings
    assert "unseen in training" in line
    assert line.endswith(" 'big' 20%")
    bag, word, user = (column(made, name) for name in ("bag", "word", "user_id"))
    assert (bag.nulls, bag.mean_length, bag.longest, bag.distinct) == (1000, 1.5, 3, 3)
    assert (word.nulls, word.distinct, word.distinct_error) == (400, 7, 0)
    assert (user.least, user.most, user.distinct, user.table_rows, user.table_dim) == (0, 299, 300, 301, 24)
    counts = np.sort(np.bincount(frame()["user_id"]))[::-1]
    assert user.top_share == pytest.approx(counts[:3].sum() / ROWS)


label_R = frame()["label"].to_numpy()
WRONG = [
    ({"same": label_R}, "'same' leaks the label: it alone cuts errors by 100%"),
    ({"near": label_R + np.linspace(0, 0.1, ROWS)}, "'near' leaks the label: it alone orders rows by label"),
    ({"text": ["yes" if y else "no" for y in label_R]}, "'text' leaks the label"),
    ({"one": [7] * ROWS}, "'one' is constant"),
    ({"one": ["a", None] * (ROWS // 2)}, "'one' is constant or missing"),
    ({"n": np.arange(ROWS)}, "'n' is unique in nearly every row"),
    ({"label": np.zeros(ROWS, int)}, "the label 'label' is the same in all rows"),
]


@pytest.mark.parametrize(("columns", "message"), WRONG, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_warnings(columns, message):
    made = card(**columns)
    assert len(made.warnings) == 1
    assert made.warnings[0].startswith(message)
    name = next(iter(columns))
    assert column(made, name).role == {"label": "label", "n": "key"}.get(name, "unused")
    assert column(made, name).note == made.warnings[0]


def test_labels():
    without = frame(seen=frame()["label"]).drop_columns(["label"])
    assert inspect(FrameReader(without)).card.warnings == ("no label: name it with --label; 'seen' hold 0 and 1",)
    assert inspect(FrameReader(frame().rename_columns(["Click", "x", "user_id"]))).card.label == "Click"
    with pytest.raises(DataError, match="frame: no column 'lable'"):
        inspect(FrameReader(frame()), "lable")
    with pytest.raises(DataError, match="label 'label' is 'a'"):
        inspect(FrameReader(frame(label=["a"] * ROWS)), "label")
    assert card(label=["a"] * ROWS).label is None
    with pytest.raises(DataError, match="logs: no rows"):
        inspect(FrameReader(frame().slice(0, 0)), name="logs")


@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=5))
def test_sketch_counts(parts):
    sketch = Sketch(1000)
    for part in parts:
        x = np.array(part, np.uint64)
        sketch.add(mix(x), (x % 2).astype(bool))
    flat = [x for part in parts for x in part]
    assert sketch.exact
    assert sketch.distinct == len(set(flat))
    counts = np.sort(np.bincount(flat))[::-1] if flat else np.zeros(1)
    assert sketch.top_share() == pytest.approx(counts[0] / max(len(flat), 1))
    assert sketch.repeats(5)[:2] == ((counts >= 5).sum(), counts[counts >= 5].sum())
    assert sketch.repeats(5).guess.wrong == 0


@pytest.mark.parametrize("distinct", [3_000, 50_000, 400_000])
def test_sketch_estimates(distinct):
    sketch = Sketch(1024)
    for part in np.array_split(np.arange(distinct, dtype=np.uint64), 7):
        for _ in range(2):
            sketch.add(mix(part), np.zeros(len(part), bool))
    assert not sketch.exact
    assert 0 < sketch.error < 0.05
    assert sketch.distinct == pytest.approx(distinct, rel=4 * sketch.error)
    assert len(sketch._hash_U) <= 1024


@pytest.mark.slow
def test_command(tmp_path):
    pq.write_table(frame(one=[7] * ROWS), tmp_path / "a.parquet", row_group_size=500)
    done = rowwise_cli("data", "inspect", str(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path}: 4,000 rows, " in done.stdout
    assert "! 'one' is constant" in done.stdout
    made = json.loads(rowwise_cli("data", "inspect", str(tmp_path), "--json", "--label", "label").stdout)
    assert made["rows"] == ROWS
    assert [c["name"] for c in made["columns"]] == ["label", "x", "user_id", "one"]


@pytest.mark.slow
def test_the_command_needs_no_torch(tmp_path):
    pq.write_table(frame(), tmp_path / "a.parquet")
    done = rowwise_cli("data", "inspect", str(tmp_path), python=["-X", "importtime"], cwd=tmp_path)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "pyarrow" in loaded
    assert "torch" not in loaded


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("inspect", "nowhere"), "nowhere: no such file or folder"),
        (("get", "criteo"), "Criteo's terms have to be accepted"),
        (("get", "movies"), "no dataset 'movies'; did you mean 'movielens-1m'"),
    ],
)
def test_user_errors_are_one_line(args, message, tmp_path):
    done = rowwise_cli("data", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


NAMES = {"user": "sparse", "userId": "sparse", "ad_id": "sparse", "last_item": "sparse", "ZIP": "sparse"}
COUNTS = dict.fromkeys(("user_age", "item_views", "paid", "views", "website_load"), "dense")


@pytest.mark.parametrize(("name", "role"), (NAMES | COUNTS).items())
def test_whole_numbers_that_name_something(name, role):
    """Numbers alone do not say whether they count or name; what a column is called does."""
    table = pa.table({"label": np.arange(ROWS) % 2, name: np.random.default_rng(0).integers(0, 300, ROWS)})
    assert column(inspect(FrameReader(table)).card, name).role == role


def test_ignored_columns_are_not_read(tmp_path):
    """Files may disagree on the type of one."""
    for number, value in enumerate(["a", 1]):
        rows = {"user": list(range(50)), "clicked": [0, 1] * 25, "odd": [value] * 50}
        pq.write_table(pa.table(rows), tmp_path / f"{number}.parquet")
    made = inspect(ParquetReader(tmp_path), roles={"odd": "unused"}).card
    assert made.rows == 100
    assert {c.name: c.rows for c in made.columns} == {"user": 100, "clicked": 100, "odd": 0}
    with pytest.raises(DataError, match="every column is ignored"):
        inspect(FrameReader(pa.table({"a": [1, 2]})), roles={"a": "unused"})
