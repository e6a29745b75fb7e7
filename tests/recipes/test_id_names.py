"""What a person reads are ids of the data, not rows of tables."""

import csv

import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from small import trained, write_rows

from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.transform import MapId, SigridHash, SplitText, load
from rowwise.recipes.explain import explain
from rowwise.recipes.id_names import RARE_IDS, name_ids
from rowwise.recipes.rows import RowSelection, open_reader
from rowwise.recipes.trained import evaluate
from rowwise.tables.spec import Table

WORDS = ["red", "green", "blue", "grey"]


def named(tmp_path, column, shown, *transforms, sparse=None, rows=1000):
    pq.write_table(pa.table({"c": column}), tmp_path / "c.parquet")
    columns = Columns(labels=(), sparse=(sparse or Sparse("c"),))
    tables = (Table(name="c", rows=rows, dim=4),)
    selected = RowSelection(open_reader(str(tmp_path / "c.parquet")))
    return name_ids(selected, columns, tables, load(transforms), {"c": shown})["c"]


def rows_of(tmp_path, column, *transforms, rows=1000):
    """The names of all rows of the table that any row of the data looks up."""
    found = named(tmp_path, column, range(rows), *transforms, rows=rows)
    return {row: name for row, name in found.items() if not name.startswith("row ")}


@pytest.mark.parametrize(
    "column",
    [
        pa.array(WORDS * 3),
        pa.array(WORDS).dictionary_encode(),
        pa.array([word.encode() for word in WORDS]),
        pa.array([[word] for word in WORDS]),
        pa.array([["red", "green"], None, [], ["blue", None], ["blue", "grey"]]),
    ],
    ids=("text", "dictionary", "bytes", "lists", "lists with gaps"),
)
def test_a_hashed_id_is_named_by_the_data(tmp_path, column):
    assert sorted(rows_of(tmp_path, column).values()) == sorted(WORDS)


def test_whole_numbers_and_ids_behind_transforms_are_named_by_the_data(tmp_path):
    assert sorted(rows_of(tmp_path, [12, 5, None, 12]).values()) == ["12", "5"]
    hashing = SigridHash(column="c", rows=900)
    assert sorted(rows_of(tmp_path, [12, 5], hashing).values()) == ["12", "5"]
    split = SplitText(column="c", separator="|")
    assert sorted(rows_of(tmp_path, ["red|green", "blue", "grey"], split, hashing).values()) == sorted(WORDS)


def test_ids_that_share_a_row_are_all_its_name(tmp_path):
    assert named(tmp_path, ["a", "b", "b"], [0], rows=1) == {0: "b, a"}
    assert named(tmp_path, [str(n) for n in range(9)], [0], rows=1)[0].endswith(" and 6 more")


def test_a_vocabulary_names_its_rows_and_the_row_of_all_others(tmp_path):
    vocabulary = MapId(column="c", mapping={"twelve": 1, "seven": 2}, unknown=0)
    shown = named(tmp_path, ["twelve"], [0, 1, 2, 3], vocabulary, sparse=Sparse("c", ids="direct"))
    assert shown == {0: RARE_IDS, 1: "twelve", 2: "seven", 3: "row 3 of table c"}


def test_slices_of_runs_have_the_ids_of_the_data(tmp_path):
    words = lambda table: pa.array([f"u{user}" for user in table["user"].to_pylist()])  # noqa: E731
    write_rows(tmp_path / "rows.parquet", word=words)
    hashed = [{"column": "word", "rows": 500, "dim": 8}, {"column": "user", "ids": "direct"}]
    made = {"columns": {"sparse": hashed}, "evaluate": {"slices": ["word", "user"]}, "train": {"steps": 4}}
    made["tables"] = {"list": [{"name": "user", "rows": 50, "dim": 8}]}
    run, _ = trained(tmp_path, **made)
    scores = evaluate(run.folder.path)
    count = {f: {r.value: r.values["count"] for r in scores.slices if r.feature == f} for f in ("word", "user")}
    both = [user for user in count["user"] if f"u{user}" in count["word"]]
    assert len(both) > 5
    assert all(count["user"][user] == count["word"][f"u{user}"] for user in both)
    with (run.folder.path / "slices.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["split"] == "test"]
    assert [line["value"] for line in lines] == [row.value or "other" for row in scores.slices]
    found = explain(run.folder.path, rows=600, repeats=2, seconds=5)
    assert found.names["word"]
    assert all(name.startswith("u") for name in found.names["word"].values())
