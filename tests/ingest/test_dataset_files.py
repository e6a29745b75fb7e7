"""Datasets made of downloaded files: tiny files in each publisher's format become parts that train."""

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import dataset_files
import numpy as np
import pyarrow as pa
import pytest
from dataset_files import ROWS, WRITERS
from pyarrow import parquet as pq

from rowwise import DataError
from rowwise.ingest.datasets.catalog import FROM_FILES, catalog, get, load
from rowwise.ingest.datasets.criteo import DAYS
from rowwise.ingest.datasets.stored import PARTS, TEST, VALID, in_ten_folds
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import read


def made(name, tmp_path):
    WRITERS[name](tmp_path / "downloads")
    place = get(name, tmp_path / "data", tmp_path / "downloads")
    return {part: pq.read_table(place / f"{part}.parquet") for part in PARTS}


def rows_of(parts):
    return sum(table.num_rows for table in parts.values())


def test_every_dataset_has_a_file_to_read():
    assert WRITERS.keys() == FROM_FILES.keys()


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_files_become_parts_with_the_columns_that_train(name, tmp_path):
    parts = made(name, tmp_path)
    columns = FROM_FILES[name].columns
    dataset = load(name, tmp_path / "data")
    assert dataset.valid is not None
    assert dataset.test is not None
    wanted = [*columns.labels, *(s.column for s in columns.sparse), *(d.column for d in columns.dense)]
    for part, table in parts.items():
        assert table.num_rows, part
        assert set(wanted) <= set(table.schema.names)
        for label in columns.labels:
            assert set(np.unique(table[label].to_numpy().astype(int))) <= {0, 1}
            assert table[label].null_count == 0
        for column in wanted:
            assert table[column].null_count < table.num_rows or column == "store", (part, column)
    # No row is in two parts.
    keys = np.concatenate([table["row"].to_numpy() for table in parts.values()])
    assert sorted(keys) == list(range(len(keys)))
    # An id of training rows has a row in its vocabulary, if it comes often enough.
    for sparse, table in zip(dataset.columns.sparse, dataset.tables, strict=True):
        if sparse.vocabulary:
            lines = Path(sparse.vocabulary).read_text().splitlines()
            assert table.rows == 1 + len(lines)
            assert {line.rpartition("\t")[2] for line in lines} == {str(n) for n in range(1, 1 + len(lines))}


@pytest.mark.parametrize("name", ["movielens-1m", "criteo-x4", "ali-ccp", "gowalla-m1"])
def test_a_dataset_of_files_trains(name, tmp_path):
    made(name, tmp_path)
    model = (
        "{kind: two_tower, item: item_id, user_features: [user_id], sizes: [8]}"
        if name == "gowalla-m1"
        else "{kind: dcn}"
    )
    metric = "recall@10" if name == "gowalla-m1" else "loss"
    text = f"data: {{dataset: {name}, folder: {tmp_path / 'data'}}}\nmodel: {model}\ntrain: {{batch: 16}}\n"
    text += f"evaluate: {{metric: {metric}}}\n"
    if name == "criteo-x4":  # whose tables are large
        text += "tables: {all: {rows: 1000}}\n"
    (tmp_path / "a.yaml").write_text(text)
    result = TrainingRun.start(read(tmp_path / "a.yaml"), tmp_path / "runs").go()
    assert result.test


def test_films_of_1_million_ratings(tmp_path):
    parts = made("movielens-1m", tmp_path)
    times = np.concatenate([parts[part]["timestamp"].to_numpy() for part in PARTS])
    assert (np.diff(times) >= 0).all()
    assert [parts[part].num_rows for part in PARTS] == [48, 6, 6]
    first = parts["train"].slice(0, 1).to_pylist()[0]
    assert first["genres"] == ["Drama", "Comedy"]
    assert first["gender"] == "MF"[first["user_id"] % 2]
    assert all(row["label"] == (row["rating"] >= 4) for row in parts["test"].to_pylist())


def test_a_film_that_is_not_listed_has_no_genres(tmp_path):
    parts = made("movielens-20m", tmp_path)
    rows = [row for table in parts.values() for row in table.to_pylist()]
    assert all((row["genres"] is None) == (row["movie_id"] == 50) for row in rows)
    assert all(row["label"] == (row["rating"] >= 4) for row in rows)


def test_days_of_avazu(tmp_path):
    parts = made("avazu", tmp_path)
    assert [parts[part].num_rows for part in PARTS] == [48, 6, 6]
    row = parts["test"].slice(0, 1).to_pylist()[0]
    assert row["time"] == 1_414_627_200 + row["hour"] * 3600  # 30 October 2014, a Thursday
    assert (row["weekday"], row["is_weekend"]) == (3, 0)


def test_folds_are_those_of_the_published_benchmark(tmp_path):
    """Scikit-learn 0.19 splits each label by `KFold` with the seed, and joins the folds by their number."""
    from sklearn.model_selection import KFold

    label_R = (np.random.default_rng(0).random(1003) < 0.3).astype(np.int8)
    part_R = in_ten_folds([pa.table({"label": label_R})], 2018)
    expected_R = np.zeros(1003, np.int8)
    for value in (0, 1):
        at_L = np.flatnonzero(label_R == value)
        folds = [test for _, test in KFold(10, shuffle=True, random_state=2018).split(at_L)]
        expected_R[at_L[folds[0]]], expected_R[at_L[folds[1]]] = TEST, VALID
    assert (part_R == expected_R).all()
    parts = made("criteo-x4", tmp_path)
    positives = {part: int(table["label"].to_numpy().sum()) for part, table in parts.items()}
    assert positives == {"train": 16, "valid": 2, "test": 2}
    assert rows_of(parts) == ROWS


def test_numbers_of_criteo_become_ids(tmp_path):
    parts = made("criteo-x4", tmp_path)
    made_rows = list(dataset_files.criteo_rows())
    for table in parts.values():
        for row in table.to_pylist():
            cells = made_rows[row["row"]]
            for index, cell in enumerate(cells[1:14], 1):
                x = float(cell or 0)
                assert row[f"I{index}"] == (int(np.floor(np.log(x) ** 2)) if x > 2 else int(x))
            assert [row[f"C{i}"] for i in range(1, 27)] == [cell or "missing" for cell in cells[14:]]


def test_days_of_taobao(tmp_path):
    parts = made("taobao", tmp_path)
    assert rows_of(parts) == ROWS  # without the row from 1902
    borders = (1_512_144_000, 1_512_230_400)
    assert parts["train"]["timestamp"].to_numpy().max() < borders[0]
    assert borders[0] <= parts["valid"]["timestamp"].to_numpy().min()
    assert borders[1] <= parts["test"]["timestamp"].to_numpy().min()
    assert all(row["label"] == (row["behavior"] != "pv") for row in parts["train"].to_pylist())


def test_samples_of_ali_ccp_have_the_fields_of_their_user(tmp_path):
    parts = made("ali-ccp", tmp_path)
    assert [parts[part].num_rows for part in PARTS] == [54, 6, 60]
    row = parts["train"].to_pylist()[7]
    assert (row["f205"], row["f101"], row["f109_14"]) == ("3205", "2101", "3109")
    assert (parts["train"]["click"][6].as_py(), parts["train"]["buy"][6].as_py()) == (True, True)


def test_terabyte_days(tmp_path):
    folder = tmp_path / "criteo-terabyte"
    folder.mkdir()
    with pytest.raises(DataError, match="day_0 to day_23, unpacked"):
        load("criteo-terabyte", tmp_path)
    for day in range(DAYS):
        dataset_files.write_csv(folder / f"day_{day}", (), dataset_files.criteo_rows(5), "\t")
    with pytest.raises(DataError, match="day_23: 1 split"):
        load("criteo-terabyte", tmp_path)


def test_what_is_missing_is_said(tmp_path):
    for name in FROM_FILES:
        with pytest.raises(DataError, match=f"rowwise data get {name}"):
            load(name, tmp_path)
        with pytest.raises(DataError, match=rf"no .*; download .* from http.* into .*: rowwise data get {name}, or"):
            get(name, tmp_path)
    WRITERS["movielens-20m"](tmp_path / "ml")
    (tmp_path / "ml" / "copy").mkdir()
    (tmp_path / "ml" / "copy" / "ratings.csv").write_text("userId\n")
    with pytest.raises(DataError, match=r"2 files fit ratings\.csv"):
        get("movielens-20m", tmp_path, tmp_path / "ml")


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        (
            "movielens-20m",
            "ml-20m/ratings.csv",
            b"a,b\n1,2\n",
            r"ratings\.csv: .*: expected the columns userId, movieId",
        ),
        ("movielens-20m", "ml-20m/ratings.csv", b"userId,movieId,rating,timestamp\nx,1,1,1\n", r"ratings\.csv: .*'x'"),
        (
            "avazu",
            "train.gz",
            gzip.compress(b"id,click,hour\n" * 99, mtime=0)[:-9],
            r"train\.gz: .*expected the columns click",
        ),
        (
            "gowalla-m1",
            "train.txt",
            b"1 2 x\n",
            r"train\.txt: .*'x'.*: expected lines of whole numbers: a user and items",
        ),
        (
            "yelp",
            "yelp_academic_dataset_review.json",
            b"{}\n[1]\n",
            r"review\.json: .*: expected one JSON object a line",
        ),
        ("ali-ccp", "sample_train/common_features_train.csv", b"c1,1\n", r"features_train\.csv: a line has 2 cells"),
        (
            "ali-ccp",
            "sample_train/common_features_train.csv",
            b"c9,1,x\n",
            "sample 0 has common features 'c0', unknown",
        ),
        ("movielens-1m", "ml-1m.zip", b"PK\x05\x06" + bytes(18), r"no ratings\.dat; download ml-1m\.zip"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path, name, file, content, message):
    WRITERS[name](tmp_path / "downloads")
    (tmp_path / "downloads" / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        get(name, tmp_path, tmp_path / "downloads")
    with pytest.raises(DataError, match=f"{name} is not here"):
        load(name, tmp_path)


def test_making_again_replaces_what_was_made(tmp_path):
    first = made("movielens-20m", tmp_path)
    place = get("movielens-20m", tmp_path / "data", tmp_path / "downloads")
    assert {part: pq.read_table(place / f"{part}.parquet") for part in PARTS} == first
    assert not list(place.glob(".*unfinished"))


@pytest.mark.dist
def test_killed_while_making(tmp_path):
    rows = ([1 + i % 70, 10 * (1 + i % 50), 4.0, 1_147_880_044 + i] for i in range(300_000))
    dataset_files.write_csv(tmp_path / "ml" / "ratings.csv", ["userId", "movieId", "rating", "timestamp"], rows)
    dataset_files.write_csv(tmp_path / "ml" / "movies.csv", ["movieId", "title", "genres"], [[10, "A", "B"]])
    command = [
        sys.executable,
        "-m",
        "rowwise",
        "data",
        "get",
        "movielens-20m",
        "--to",
        tmp_path,
        "--source",
        tmp_path / "ml",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    unfinished = tmp_path / "movielens-20m" / ".train.unfinished"
    while not unfinished.exists() and process.poll() is None:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(DataError, match="movielens-20m"):
        load("movielens-20m", tmp_path)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    dataset = load("movielens-20m", tmp_path)
    assert sum(dataset.test.read(split, ["row"]).num_rows for split in dataset.test.splits()) == 30_000


def test_the_catalog_says_what_is_here(tmp_path):
    WRITERS["gowalla"](tmp_path / "gowalla")
    get("gowalla", tmp_path)
    assert {entry.name for entry in catalog(tmp_path) if entry.is_here} == {"gowalla", "synthetic"}
    for entry in catalog(tmp_path):
        assert entry.what
        assert entry.split
        assert bool(entry.files) == bool(entry.page)
