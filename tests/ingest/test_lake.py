"""Tables of lakes: their rows as their own libraries read them, the files that a filter opens, and what is refused."""

import datetime as dt
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from base.storage.stores import moto
from lakes import LAKES, DeltaLake, IcebergLake, delete_a_row, deletion_vector, write_log
from launching import ENVIRONMENT, rowwise
from pyarrow import parquet as pq

from rowwise import DataError
from rowwise.ingest import ParquetReader
from rowwise.ingest.datasets.files import open_files, open_named, pin
from rowwise.ingest.lake.snapshot import TableSnapshot, as_path, split_version
from rowwise.ingest.where import ColumnBounds, parse

DAYS = [dt.date(2024, 5, day) for day in (1, 2, 3)]


def clicks(rows, first=0):
    """Rows with values of partitions that are hard to write into a path, and times that are finer than bounds."""
    at = np.arange(first, first + rows)
    return pa.table(
        {
            "user": at,
            "day": pa.array([[*DAYS, None][n % 4] for n in at], pa.date32()),
            "city": [["Linz a.d. Donau", "a/b=ü%20", None][n % 3] for n in at],
            "time": pa.array([dt.datetime(2024, 5, 1 + n % 20, 3, 4, 5, 678_901) for n in at], pa.timestamp("us")),
            "seen": pa.array([list(range(n % 3)) for n in at], pa.list_(pa.int64())),
            "price": at / 8,
            "shop": pa.array([{"floor": n % 5, "name": f"s{n}"} for n in at]),
        }
    )


def rows_of(name, where=None):
    """The rows by user, after a journey to another process, and the files that were opened."""
    chosen = None if where is None else parse(where)
    reader = pickle.loads(pickle.dumps(open_named(name, chosen)))
    tables = [reader.read(split, reader.schema.names) for split in reader.splits()]
    table = pa.concat_tables([reader.schema.empty_table(), *tables])
    table = table if chosen is None else table.filter(pa.array(chosen.mask(table)))
    return sorted(table.to_pylist(), key=lambda row: row["user"]), {split.source for split in reader.splits()}


def expected(table):
    flat = table.flatten()
    return sorted(flat.to_pylist(), key=lambda row: row["user"])


@pytest.fixture(params=sorted(LAKES))
def lake(request, tmp_path):
    return LAKES[request.param](tmp_path)


@pytest.fixture
def filled(lake):
    """A table with two snapshots, partitioned by day and city."""
    lake.append(clicks(40), ["day", "city"])
    lake.append(clicks(40, 40))
    return lake


def made(folder, **changes):
    """A snapshot of two files, without any library."""
    files = tuple(str(folder / name) for name in ("a.parquet", "b.parquet"))
    for at, file in enumerate(files):
        pq.write_table(pa.table({"user": [at, at + 10], "old": [0, 0]}), file)
    schema = pa.schema([("day", pa.date32()), ("user", pa.int64()), ("new", pa.string())])
    constants = {file: {"day": day} for file, day in zip(files, DAYS, strict=False)}
    return TableSnapshot(**{"name": "t@3", "files": files, "schema": schema, "constants": constants} | changes)


def test_a_snapshot_has_the_columns_of_the_table(tmp_path):
    reader = pickle.loads(pickle.dumps(ParquetReader(made(tmp_path))))
    assert reader.schema.names == ["user", "day", "new"]
    tables = [reader.read(split, ["new", "day", "user"]) for split in reader.splits()]
    assert pa.concat_tables(tables).to_pylist() == [
        {"new": None, "day": DAYS[0], "user": 0},
        {"new": None, "day": DAYS[0], "user": 10},
        {"new": None, "day": DAYS[1], "user": 1},
        {"new": None, "day": DAYS[1], "user": 11},
    ]


def test_bounds_of_a_snapshot_spare_files(tmp_path):
    files = made(tmp_path).files
    bounds = {file: {"user": ColumnBounds(least=at, most=at + 10)} for at, file in enumerate(files)}
    known = made(tmp_path, known_bounds=bounds)
    Path(files[0]).unlink()
    reader = ParquetReader(known, where=parse("user > 10"))
    assert {split.source for split in reader.splits()} == {files[1]}
    with pytest.raises(DataError, match=r"a.parquet: the file is gone; t@3 was vacuumed or expired"):
        ParquetReader(known, where=parse("user > 9"))


def test_files_of_two_stores_are_refused(tmp_path):
    with pytest.raises(DataError, match="t@3: its files are in local folders and s3://b: expected files in one store"):
        ParquetReader(made(tmp_path, files=("s3://b/x", "/c")))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lake/clicks@12", ("lake/clicks", 12)),
        ("lake/clicks", ("lake/clicks", None)),
        ("s3://me@lake/clicks", ("s3://me@lake/clicks", None)),
        ("a@1@2", ("a@1", 2)),
    ],
)
def test_versions_are_behind_the_last_at(name, parts):
    assert split_version(name) == parts


def test_paths_of_other_systems():
    assert as_path("file:///a/b c%20d") == as_path("file:/a/b c%20d") == "/a/b c%20d"
    assert as_path("s3a://lake/x") == "s3://lake/x"
    assert as_path("/a/b") == "/a/b"


def test_names_are_pinned_to_places(tmp_path):
    here = Path.cwd()
    assert pin("parquet:a/*.parquet") == f"parquet:{here}/a/*.parquet"
    assert pin("parquet:s3://lake/a") == "parquet:s3://lake/a"
    assert pin("delta:a@3") == f"delta:{here}/a@3"
    assert pin("iceberg:lake/shop.clicks@3") == "iceberg:lake/shop.clicks@3"
    assert pin(f"iceberg:{tmp_path}@3") == f"iceberg:{tmp_path}@3"
    assert pin("movielens-100k") == "movielens-100k"


@pytest.mark.slow
def test_rows_are_those_of_its_own_library(filled):
    rows, files = rows_of(filled.name)
    assert rows == expected(filled.read()) == expected(clicks(80))
    assert len(files) == 24
    old, _ = rows_of(f"{filled.name}@{filled.versions()[-2]}")
    assert old == expected(clicks(40))
    assert pin(filled.name) == f"{filled.name}@{filled.versions()[-1]}"


@pytest.mark.slow
def test_the_order_of_delta_is_that_of_commits(tmp_path):
    """Also after the log was cut down to a checkpoint, whose order is another."""
    from deltalake import DeltaTable

    lake = DeltaLake(tmp_path)
    for first in range(0, 120, 40):
        lake.append(clicks(40, first), ["day", "city"])
    splits = open_named(lake.name).splits()
    reader = open_named(lake.name)
    users = [reader.read(split, ["user"])["user"].to_pylist() for split in splits]
    assert sorted(user // 40 for rows in users for user in rows) == [user // 40 for rows in users for user in rows]
    DeltaTable(lake.folder).create_checkpoint()
    for log in (tmp_path / "clicks/_delta_log").glob("*.json"):
        log.unlink() if log.name < f"{2:020}" else None
    assert open_named(lake.name).splits() == splits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "most"),
    [
        ("day == '2024-05-02'", 6),
        ("day >= '2024-05-02' and city == 'a/b=ü%20'", 4),
        ("day is null", 6),
        ("city in ['Linz a.d. Donau']", 8),
        ("city != 'a/b=ü%20'", 8),
        ("user < 5", 5),
        ("user >= 40", 12),
        ("time >= '2024-05-20T03:04:05.678901'", 12),
        ("time > '2024-05-20T03:04:05.68'", 0),
        ("time < '2024-05-01'", 0),
        ("user > 100", 0),
    ],
)
def test_a_filter_opens_the_files_that_may_have_its_rows(filled, where, most):
    rows, files = rows_of(filled.name, where)
    whole, _ = rows_of(filled.name)
    table = pa.Table.from_pylist(whole, open_named(filled.name).schema)
    assert rows == table.filter(pa.array(parse(where).mask(table))).to_pylist()
    assert len(files) <= most
    # No other file is touched, footers included.
    for split in open_named(filled.name).splits():
        if split.source not in files:
            Path(split.source).unlink()
    assert rows_of(filled.name, where) == (rows, files)


@pytest.mark.slow
def test_filters_without_bounds_in_the_log(filled):
    """Footers have bounds of the row groups."""
    whole, files = rows_of(filled.name)
    some, opened = rows_of(filled.name, "price >= 9.875")
    assert some == [row for row in whole if row["price"] >= 9.875]
    assert len(opened) == 1 < len(files)
    assert rows_of(filled.name, "shop.floor == 3")[0] == [row for row in whole if row["shop.floor"] == 3]


@pytest.mark.slow
def test_only_needed_columns_are_read(filled):
    reader = open_named(filled.name)
    for split in reader.splits():
        reader.read(split, ["user", "day"])
    some = reader.counters.bytes_read
    for split in reader.splits():
        reader.read(split, reader.schema.names)
    assert some * 4 < reader.counters.bytes_read


@pytest.mark.slow
def test_columns_that_were_added_later(filled):
    more = clicks(20, 80).append_column("late", pa.array(range(20), pa.int64()))
    filled.add_column(more)
    rows, _ = rows_of(filled.name)
    assert [row["late"] for row in rows] == [None] * 80 + list(range(20))
    assert [row["user"] for row in rows_of(filled.name, "late >= 15")[0]] == list(range(95, 100))
    assert "late" not in rows_of(f"{filled.name}@{filled.versions()[-2]}")[0][0]


@pytest.mark.slow
def test_columns_that_are_gone_or_wider_or_only_in_partitions(tmp_path):
    """Files of an Iceberg table may lack the column by which they are partitioned, if others have written them."""
    from pyiceberg.types import LongType

    lake = IcebergLake(tmp_path)
    lake.append(clicks(12).set_column(0, "user", pa.array(range(12), pa.int32())), ["day"])
    with lake.table.update_schema() as schema:
        schema.delete_column("price")
        schema.update_column("user", field_type=LongType())
    lake.append(clicks(12, 1 << 40).drop_columns(["price"]))
    for file in sorted((tmp_path / "shop/clicks/data").glob("day=2024-05-01/*"))[:1]:
        kept = pq.read_table(file, partitioning=None).drop_columns(["day"])
        pq.write_table(kept, file)
    rows, _ = rows_of(lake.name)
    assert rows == expected(clicks(12).drop_columns(["price"])) + expected(clicks(12, 1 << 40).drop_columns(["price"]))


@pytest.mark.slow
def test_a_version_that_is_gone(filled):
    old, newest = filled.versions()[-2:]
    filled.overwrite(clicks(5))
    filled.forget(old if filled.kind == "iceberg" else newest)
    with pytest.raises(DataError) as met:
        open_named(f"{filled.name}@{old}")
    if filled.kind == "delta":
        assert f"{filled.name}@{old} was vacuumed or expired: start a new run on a newer version" in str(met.value)
    else:
        assert str(met.value).startswith(f"{filled.name}@{old}: no such snapshot, or it has expired: expected one that")
        assert str(filled.versions()[-1]) in str(met.value)
    assert rows_of(filled.name)[0] == expected(clicks(5))


@pytest.mark.slow
def test_wrong_names(lake, tmp_path):
    lake.append(clicks(4))
    with pytest.raises(DataError, match=r"no (version|such snapshot).*: expected one that is kept, "):
        open_named(f"{lake.name}@99")
    with pytest.raises(DataError, match=r"(no Delta table|no such folder): ?.*expected|expected"):
        open_named(f"{lake.kind}:{tmp_path}/nowhere")
    with pytest.raises(DataError, match="no column 'dey'; did you mean 'day'"):
        open_named(lake.name, parse("dey > 3"))
    with pytest.raises(DataError, match="column 'user' holds int64, but is compared with 'x'"):
        open_named(lake.name, parse("user == x"))
    shutil.rmtree(tmp_path / ("clicks" if lake.kind == "delta" else "shop"))
    with pytest.raises(DataError, match=re.escape(lake.name)):
        pin(lake.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"features": ["deletionVectors"], "vector": [3, 4]}, "a.parquet are deleted by a deletion vector: expected"),
        ({"features": ["columnMapping"], "mapping": "name"}, "column mapping by name: expected delta.columnMapping"),
        ({"features": ["typeWidening"]}, "the table has the feature typeWidening: expected only columnMapping, del"),
        ({"features": ["mystery"]}, "'mystery' is not supported"),
    ],
)
def test_features_of_delta_that_change_rows_are_refused(tmp_path, how, message):
    vector = deletion_vector(how.pop("vector")) if "vector" in how else None
    name = write_log(tmp_path / "t", **how, vector=vector)
    with pytest.raises(DataError) as met:
        open_files(name)
    assert str(met.value).startswith(name)
    assert message in str(met.value)
    assert "\n" not in str(met.value)


@pytest.mark.slow
def test_features_of_delta_without_effect_are_read(tmp_path):
    """Databricks turns deletion vectors on for every new table."""
    name = write_log(tmp_path / "t", ["deletionVectors", "columnMapping", "v2Checkpoint", "timestampNtz"])
    assert [row["user"] for row in rows_of(name)[0]] == list(range(30))


@pytest.mark.slow
def test_deleted_rows_and_new_names_of_iceberg_are_refused(tmp_path):
    lake = IcebergLake(tmp_path)
    lake.append(clicks(8))
    with lake.table.update_schema() as schema:
        schema.rename_column("price", "cost")
    assert "price" in rows_of(lake.name)[0][0]  # no snapshot has the new name yet
    names = ["cost" if name == "price" else name for name in clicks(1).column_names]
    lake.append(clicks(8, 8).rename_columns(names))
    with pytest.raises(DataError, match=r"column 'cost' is called 'price' in .*: expected columns never renamed"):
        open_named(lake.name)
    lake.overwrite(clicks(8).rename_columns(names))
    assert len(rows_of(lake.name)[0]) == 8
    for file in (tmp_path / "shop/clicks/data").glob("*.parquet"):  # as files that were added to the table
        pq.write_table(pa.table(pq.read_table(file).to_pydict()), file)
    with pytest.raises(DataError, match=r"column 'cost' was called 'price', and .* has no field ids"):
        open_named(lake.name)
    delete_a_row(lake.table)
    with pytest.raises(
        DataError, match=r"@77: rows of .* are deleted by 1 delete file: expected files without deleted"
    ):
        open_named(lake.name)


@pytest.mark.slow
def test_a_table_of_a_catalog(tmp_path):
    """The catalog is configured by pyiceberg's own variables."""
    lake = IcebergLake(tmp_path)
    lake.append(clicks(200).append_column("label", pa.array(np.arange(200) % 2)))
    done = rowwise(tmp_path, "data", "inspect", "iceberg:lake/shop.clicks", "--json", environment=lake.environment)
    assert done.returncode == 0, done.stderr
    assert '"rows":200' in done.stdout.replace(" ", "")
    for name, message in (("lake/shop.nothing", "Table does not exist"), ("other/shop.clicks", "URI missing")):
        done = rowwise(tmp_path, "data", "inspect", f"iceberg:{name}", environment=lake.environment)
        assert (done.returncode, done.stderr.count("\n"), message in done.stderr) == (2, 1, True), done.stderr


@pytest.mark.slow
def test_tables_at_a_store(tmp_path):
    """They are written by their own libraries with their own settings, and read with those of the environment."""
    from deltalake import write_deltalake
    from pyiceberg.catalog.sql import SqlCatalog

    with moto() as endpoint:
        keys = {
            "ACCESS_KEY_ID": "key-1",
            "SECRET_ACCESS_KEY": "secret-2",
            "REGION": "us-east-1",
            "ENDPOINT_URL": endpoint,
        }
        environment = {f"AWS_{name}": value for name, value in keys.items()}
        write_deltalake("s3://bucket/clicks", clicks(20), storage_options=environment | {"AWS_ALLOW_HTTP": "true"})
        names = {"access-key-id": "key-1", "secret-access-key": "secret-2", "region": "us-east-1", "endpoint": endpoint}
        settings = {f"s3.{name}": value for name, value in names.items()}
        lake = IcebergLake(tmp_path, SqlCatalog("s", uri="sqlite://", warehouse="s3://bucket/lake", **settings))
        lake.append(clicks(30))
        for name, rows in (("delta:s3://bucket/clicks", 20), (f"iceberg:{lake.table.metadata_location}", 30)):
            done = rowwise(tmp_path, "data", "inspect", name, "--json", environment=environment)
            assert f'"rows":{rows},' in done.stdout.replace(" ", ""), done.stderr
        done = rowwise(tmp_path, "data", "inspect", "delta:s3://bucket/nowhere", environment=environment)
        assert (done.returncode, "no Delta table" in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "name"), [("deltalake", "delta:a"), ("pyiceberg", "iceberg:a/b.c"), ("confluent_kafka", "kafka:h:1/c")]
)
def test_without_its_package_a_line_names_the_extra(tmp_path, package, name):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    done = rowwise(tmp_path, "data", "inspect", name, environment=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    kind, _, _ = name.partition(":")
    assert re.match(f"rowwise: {kind}:.* needs ", done.stderr)
    assert f"pip install 'rowwise[{'kafka' if kind == 'kafka' else 'lake'}]'" in done.stderr
