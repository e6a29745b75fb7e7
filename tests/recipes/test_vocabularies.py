"""A recipe with vocabularies: tables follow from them, a run keeps them, unknown ids share row 0."""

import csv
import shutil

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet as pq

from rowwise import SpecError
from rowwise.ingest.transform import apply
from rowwise.recipes.compose import resolve
from rowwise.recipes.resolved import make_batcher
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import read
from rowwise.recipes.trained import load_trained

GENRES = ("Drama", "Comedy", "Action")


def write_films(path, rows=3000, users=40, seed=0):
    draw = np.random.default_rng(seed)
    user, film = draw.integers(0, users, rows), draw.integers(0, 25, rows)
    texts = ["|".join(GENRES[g] for g in range(3) if (f + 1) & 1 << g) or "Drama" for f in film.tolist()]
    label = (draw.random(rows) < 0.3 + 0.4 * (film % 2)).astype(np.int8)
    columns = {"label": label, "user_id": user, "film": [f"f{n}" for n in film], "genres": texts}
    pq.write_table(pa.table(columns), path, row_group_size=500)


@pytest.fixture
def films(tmp_path, command):
    write_films(tmp_path / "films.parquet")
    assert command("data", "inspect", "films.parquet")[0] == 0
    return tmp_path


def test_tables_and_lists_follow_from_what_inspect_wrote(films):
    resolved = resolve(read(films / "films.yaml"))
    assert {t.name: (t.rows, str(t.pooling)) for t in resolved.tables} == {
        "user_id": (41, "sum"), "film": (26, "sum"), "genres": (4, "mean"),
    }  # fmt: skip
    assert resolve(resolved.recipe).recipe == resolved.recipe
    batch = next(iter(make_batcher(resolved, resolved.rows.train)))
    assert batch.sparse.keys() == ["user_id", "film", "genres"]
    assert int(batch.sparse.values().min()) == 1
    with (films / "films.ids" / "genres.vocab").open() as file:
        assert {name for name, _ in csv.reader(file, delimiter="\t")} == set(GENRES)


def test_a_run_keeps_its_vocabularies_and_unknown_ids_share_row_0(films, command):
    recipe = read(films / "films.yaml", ["train.steps=4", "train.batch=64"])
    run = TrainingRun.start(recipe, films / "runs")
    run.go()
    shutil.rmtree(films / "films.ids")
    moved = films / "elsewhere"
    shutil.move(run.folder.path, moved)
    resolved, _ = load_trained(moved)
    table = pa.table(
        {"label": [0, 1], "user_id": [10**6, 3], "film": ["unheard of", "f3"], "genres": ["Noir|Drama", ""]}
    )
    pq.write_table(table, films / "new.parquet")
    code, _, err = command("predict", str(moved), "--data", "parquet:new.parquet", "--out", "p.parquet")
    assert code == 0, err
    rows, _ = apply(table, resolved.transforms, ["user_id.row", "film.row", "genres.row"])
    assert rows["user_id.row"][0].as_py() == rows["film.row"][0].as_py() == 0
    assert rows["user_id.row"][1].as_py() > 0
    genres = rows["genres.row"].to_pylist()
    assert genres[0][0] == 0 < genres[0][1]
    assert genres[1] == []


def test_a_warm_start_wants_the_rows_of_the_former_run(films, command):
    first = TrainingRun.start(read(films / "films.yaml", ["train.steps=2"]), films / "runs")
    first.go()
    write_films(films / "more.parquet", users=60, seed=1)
    assert command("data", "inspect", "more.parquet", "--recipe", "apart.yaml")[0] == 0
    with pytest.raises(SpecError, match=r"'.*' of column '.*'"):
        TrainingRun.start(read(films / "apart.yaml", [f"init_from={first.folder.path}"]), films / "runs")
    args = ("--recipe", "grown.yaml", "--grow", "films.ids")
    assert command("data", "inspect", "more.parquet", *args)[0] == 0
    grown = TrainingRun.start(read(films / "grown.yaml", [f"init_from={first.folder.path}"]), films / "runs")
    assert any("41 of 61 rows" in how for how in grown.match.grown.values())


@pytest.mark.parametrize(
    ("columns", "tables", "message"),
    [
        ([{"column": "film", "rows": 0}], {}, "columns: 'film': rows=0: expected at least 1"),
        (
            [{"column": "film", "vocabulary": "a.txt", "rows": 5}],
            {},
            "rows=5 with a vocabulary, which determines the rows: expected no rows=5",
        ),
        ([{"column": "film", "vocabulary": "a.txt"}], {}, "a.txt: cannot be read as a list of ids: No such file"),
        (
            [{"column": "film", "dim": 4}],
            {"list": [{"name": "film", "rows": 5, "dim": 4}]},
            "table 'film'; set dim there",
        ),
        (
            [{"column": "film", "table": "t", "rows": 5}, {"column": "user_id", "table": "t", "rows": 6}],
            {},
            "columns: 'user_id': rows=6, but another column of table 't' has 5: expected one value for the table",
        ),
    ],
    ids=str,
)
def test_what_a_column_says_of_its_table_is_said_once(films, columns, tables, message):
    made = {"data": {"dataset": "parquet:films.parquet"}, "columns": {"labels": ["label"], "sparse": columns}}
    (films / "mine.yaml").write_text(yaml.safe_dump(made | ({"tables": tables} if tables else {})))
    with pytest.raises(SpecError) as raised:
        resolve(read(films / "mine.yaml"))
    assert message in str(raised.value)


def test_a_column_alone_gets_a_table(films):
    made = {
        "data": {"dataset": "parquet:films.parquet"},
        "columns": {"labels": ["label"], "sparse": [{"column": "film"}]},
    }
    (films / "mine.yaml").write_text(yaml.safe_dump(made))
    [table] = resolve(read(films / "mine.yaml")).tables
    assert (table.name, table.rows, table.dim) == ("film", 16 * 25, 16)
    made["columns"]["sparse"] = [{"column": "film", "rows": 77, "dim": 8, "optimizer": {"kind": "sgd"}}]
    (films / "mine.yaml").write_text(yaml.safe_dump(made))
    [table] = resolve(read(films / "mine.yaml")).tables
    assert (table.rows, table.dim, table.optimizer.__struct_config__.tag) == (77, 8, "sgd")
