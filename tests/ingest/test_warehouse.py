"""Warehouses: what convert writes is what it was given, in the order asked for, whatever happens on the way."""

import hashlib
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from base.storage.stores import FAULTS, MemoryStorage, connect, server_of_urls
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from pyarrow import parquet as pq

from rowwise.base.errors import DataError, SpecError, StorageError
from rowwise.base.storage.folder import StorageFolder
from rowwise.ingest.frames import FrameReader
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.warehouse.convert import convert
from rowwise.ingest.warehouse.hive import infer_fields, parse_value
from rowwise.ingest.warehouse.journal import ConversionRequest, Journal, SourceSurvey, WarehouseFile
from rowwise.ingest.warehouse.layout import WarehouseLayout
from rowwise.ingest.warehouse.popularity import log_use, popularity
from rowwise.ingest.warehouse.source import split_by_key


def rows_of(place, columns=None):
    reader = ParquetReader(place)
    return pa.concat_tables([reader.read(split, columns or reader.schema.names) for split in reader.splits()])


def digest(place):
    """Of all files with their names, but not of what is noted aside."""
    files = sorted(p for p in Path(place).rglob("*.parquet"))
    return [(str(p.relative_to(place)), hashlib.sha256(p.read_bytes()).hexdigest()) for p in files]


def log(rows, seed=0):
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "id": np.arange(rows),
            "day": rng.integers(0, 5, rows),
            "session": pa.array([None if x == 0 else f"s{x}" for x in rng.integers(0, rows // 8, rows)]),
            "x": pa.array(rng.random(rows), mask=rng.random(rows) < 0.1),
            "ids": pa.array([list(range(n)) for n in rng.integers(0, 9, rows)], pa.list_(pa.int64())),
            "m": pa.array([[(int(k), float(k)) for k in rng.choice(9, 2)] for _ in range(rows)],
                          pa.map_(pa.int64(), pa.float32())),
        }
    )  # fmt: skip


ENTRY = st.lists(st.tuples(st.integers(0, 5), st.none() | st.lists(st.integers(0, 9), max_size=3)), max_size=4)


@given(rows=st.lists(st.none() | ENTRY, max_size=10), skip=st.integers(0, 3))
@settings(deadline=None)
def test_maps_become_columns(rows, skip):
    kind = pa.map_(pa.int64(), pa.list_(pa.int64()))
    array = pa.array(rows, kind).slice(min(skip, len(rows)))
    made = split_by_key(array, range(5))
    for key, column in enumerate(made):
        assert column.to_pylist() == [dict(row or []).get(key) for row in rows[min(skip, len(rows)) :]]


def test_maps_with_entries_under_null():
    array = pa.MapArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.array(["a", "a"]), pa.array([1.0, 2.0]), mask=pa.array([True, False])
    )
    assert split_by_key(array, ["a", "b"])[0].to_pylist() == [None, 2.0]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_clustering_is_a_permutation(data, tmp_path_factory):
    count = data.draw(st.integers(1, 300))
    cell = data.draw(st.sampled_from([st.none() | st.integers(-3, 30), st.none() | st.text("aß", max_size=2)]))
    table = pa.table(
        {
            "id": np.arange(count),
            "session": data.draw(st.lists(cell, min_size=count, max_size=count).filter(lambda c: set(c) != {None})),
            "time": pa.array(
                data.draw(st.lists(st.none() | st.integers(0, 3), min_size=count, max_size=count)), pa.int8()
            ),
            "day": data.draw(st.lists(st.none() | st.integers(0, 3), min_size=count, max_size=count)),
        },
        schema=None,
    )
    if pa.types.is_null(table["day"].type):
        table = table.set_column(3, "day", table["day"].cast(pa.int64()))
    by_day = data.draw(st.booleans())
    how = WarehouseLayout(
        cluster_by="session",
        sort_by=data.draw(st.sampled_from([None, "time"])),
        partition_by=("day",) if by_day else (),
        group_rows=data.draw(st.integers(1, 100)),
        part_groups=2,
    )
    place = tmp_path_factory.mktemp("clustered") / "w"
    convert(FrameReader(table, split_rows=data.draw(st.integers(1, 300))), place, how)
    made = rows_of(place, table.column_names)
    assert sorted(made.to_pylist(), key=lambda r: r["id"]) == table.to_pylist()
    seen, last = set(), None
    for row in made.to_pylist():
        key = (row["day"] if by_day else 0, row["session"])
        if row["session"] is None:
            last = None
            continue
        if last is not None and last[0] == key:
            order = (row["time"] is None, row["time"] or 0, row["id"]) if how.sort_by else row["id"]
            assert order > last[1]
        else:
            assert key not in seen
            seen.add(key)
        last = key, (row["time"] is None, row["time"] or 0, row["id"]) if how.sort_by else row["id"]


def test_layout_of_files(tmp_path):
    how = WarehouseLayout(group_rows=3000, popularity={"x": 5, "m.3": 7})
    summary = convert(FrameReader(log(10_000)), tmp_path / "w", how)
    assert (summary.rows, summary.files, summary.groups, summary.columns) == (10_000, 1, 4, 14)
    file = tmp_path / "w" / "part-00000.parquet"
    footer = pq.read_metadata(file)
    assert footer.schema.to_arrow_schema().names[:4] == ["m.3", "x", "id", "day"]
    assert footer.row_group(0).column(2).statistics.max == 2999
    about = json.loads(footer.metadata[b"rowwise"])
    assert (about["rows"], about["popularity"], about["cluster_by"]) == (10_000, {"m.3": 7.0, "x": 5.0}, None)
    assert rows_of(tmp_path / "w", ("id",))["id"].to_pylist() == list(range(10_000))


def test_groups_are_cut_by_bytes(tmp_path):
    convert(FrameReader(log(10_000)), tmp_path / "w", WarehouseLayout(group_bytes=100_000))
    sizes = [split.rows for split in ParquetReader(tmp_path / "w").splits()]
    assert 500 < sizes[0] < 2000
    assert len(set(sizes[:-1])) == 1


def test_columns_and_keys(tmp_path):
    convert(FrameReader(log(100)), tmp_path / "w", WarehouseLayout(columns=("x", "m.4", "m.77")))
    assert ParquetReader(tmp_path / "w").schema.names == ["x", "m.4", "m.77"]
    convert(FrameReader(log(100)), tmp_path / "v", WarehouseLayout(columns=("m",), keys={"m": (1, 2)}))
    assert ParquetReader(tmp_path / "v").schema.names == ["m.1", "m.2"]
    with pytest.raises(DataError, match="no column 'y'"):
        convert(FrameReader(log(100)), tmp_path / "u", WarehouseLayout(columns=("y",)))
    with pytest.raises(DataError, match="ordered by 'day'"):
        convert(FrameReader(log(100)), tmp_path / "u", WarehouseLayout(columns=("x",), partition_by=("day",)))
    with pytest.raises(DataError, match="column 'x' holds double"):
        convert(FrameReader(log(100)), tmp_path / "t", WarehouseLayout(cluster_by="x"))
    convert(FrameReader(log(100)), tmp_path / "t", WarehouseLayout(cluster_by="session"))  # the mistake is put right
    with pytest.raises(SpecError, match="sort_by='x' without"):
        WarehouseLayout(sort_by="x")


@pytest.mark.slow
def test_many_folders_need_few_open_files(tmp_path):
    rows = 4000
    table = pa.table({"id": np.arange(rows), "day": [f"2024/{i % 500}" for i in range(rows)]})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    try:
        summary = convert(FrameReader(table, split_rows=100), tmp_path / "w", WarehouseLayout(partition_by=("day",)))
        assert summary.folders == 500
        made = rows_of(tmp_path / "w")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert made.sort_by("id").select(["id", "day"]).to_pylist() == table.to_pylist()


def test_text_of_digits_stays_text(tmp_path):
    table = pa.table({"id": [1, 2], "zip": ["01", "2"]})
    convert(FrameReader(table), tmp_path / "w", WarehouseLayout(partition_by=("zip",)))
    assert rows_of(tmp_path / "w", ("id", "zip")).to_pylist() == table.to_pylist()


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", ".day", "_day", "a=b", "a\nb", "\x1b[2J", "d" * 300])
def test_a_folder_has_a_plain_name(name):
    with pytest.raises(SpecError, match="cannot be the name") as told:
        WarehouseLayout(partition_by=(name,))
    assert len(str(told.value)) < 200


@pytest.mark.parametrize("name", ["lock", "journal.tmp", "warehouse.tmp", "part.tmp", "spill/0.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_notes_are_not_written_through_a_link_or_into_a_pipe(tmp_path, name, kind):
    """As it was: the file that a link named was cut to nothing."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    path = tmp_path / "w" / "_rowwise" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(mine)
    with pytest.raises(OSError, match="this is a link" if kind == "link" else "this is no regular file"):
        convert(FrameReader(log(100)), tmp_path / "w", WarehouseLayout())
    assert mine.read_text() == "mine"


def test_a_folder_that_is_a_link_is_not_written_into(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "w" / "_rowwise").mkdir(parents=True)
    (tmp_path / "w" / "day=1").symlink_to(other)
    with pytest.raises(OSError, match="this is a link"):
        convert(FrameReader(log(100)), tmp_path / "w", WarehouseLayout(partition_by=("day",)))
    assert not list(other.iterdir())


def test_a_line_that_was_cut_is_dropped_and_the_next_one_is_whole(tmp_path):
    request = ConversionRequest(version=1, source="s", layout=WarehouseLayout())
    journal = Journal(tmp_path)
    journal.folder.mkdir()
    journal.begin_or_resume(request)
    with (journal.folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"keys": {"us')
    assert Journal(tmp_path).begin_or_resume(request)
    survey = SourceSurvey(keys={}, popularity={"user": 1.0})
    Journal(tmp_path).append(survey)
    again = Journal(tmp_path)
    assert again.begin_or_resume(request)
    assert again.survey == survey


@pytest.mark.parametrize("path", ["../mine", "/mine", "link/part", "part\n", "x\\y", ".", ""])
def test_a_journal_names_files_of_its_own_folder(tmp_path, path):
    dest = tmp_path / "w"
    asked = ConversionRequest(version=1, source="s", layout=WarehouseLayout())
    for place in (tmp_path / "mine", dest / "part\n", dest / "x\\y", tmp_path / "elsewhere" / "part"):
        place.parent.mkdir(exist_ok=True)
        place.write_text("mine")
    (dest / "link").symlink_to(tmp_path / "elsewhere")
    (dest / "_rowwise").mkdir()
    Journal(dest).begin_or_resume(asked)
    Journal(dest).append(SourceSurvey(keys={}, popularity={}))
    Journal(dest).append(WarehouseFile(path=path, rows=1, bytes=4, groups=1, unit=0, row=1))
    with pytest.raises(DataError, match="missing or was changed"):
        Journal(dest).begin_or_resume(asked)


SCRIPT = """
import sys, msgspec
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.warehouse.convert import convert
from rowwise.ingest.warehouse.layout import WarehouseLayout
convert(ParquetReader(sys.argv[1]), sys.argv[2], msgspec.json.decode(sys.argv[3], type=WarehouseLayout))
"""
LAYOUTS = {
    "plain": {"group_rows": 1000, "part_groups": 2},
    "folders": {"partition_by": ["day"], "group_rows": 1000, "part_groups": 1},
    "sessions": {"cluster_by": "session", "sort_by": "x", "group_rows": 1000, "part_groups": 2},
}


@pytest.mark.slow
def test_many_columns_take_memory(tmp_path):
    pq.write_table(pa.table({f"c{i}": [i] for i in range(1000)}), tmp_path / "a.parquet")
    with pytest.raises(SpecError, match="450MB for 1,000 columns"):
        convert(ParquetReader(tmp_path / "a.parquet"), tmp_path / "w", WarehouseLayout(memory_bytes=450_000_000))
    convert(ParquetReader(tmp_path / "a.parquet"), tmp_path / "w", WarehouseLayout(memory_bytes=750_000_000))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_killed_at_any_point(name, tmp_path):
    source = tmp_path / "a.parquet"
    pq.write_table(log(60_000), source, row_group_size=7000)
    how = json.dumps(LAYOUTS[name])

    def start(place):
        return subprocess.Popen([sys.executable, "-c", SCRIPT, source, place, how])

    def files():
        return sum(path.is_file() for path in (tmp_path / "w").rglob("*"))

    assert start(tmp_path / "whole").wait() == 0
    want = digest(tmp_path / "whole")
    killed, rng = 0, np.random.default_rng(0)
    for trial in range(12):
        before, process = files(), start(tmp_path / "w")
        more = int(rng.integers(1, 6))  # files, then a moment
        while process.poll() is None and files() < before + more:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        if trial == 0 and (tmp_path / "w" / "_rowwise" / "journal.jsonl").exists():
            with pytest.raises(DataError, match="its conversion is unfinished"):
                ParquetReader(tmp_path / "w")
    assert start(tmp_path / "w").wait() == 0
    assert digest(tmp_path / "w") == want
    assert killed


class Stop(Exception):
    """From outside."""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_stopped_at_every_step(name, tmp_path):
    how = WarehouseLayout(**{k: tuple(v) if isinstance(v, list) else v for k, v in LAYOUTS[name].items()})
    reader = FrameReader(log(12_000), split_rows=2000)
    convert(reader, tmp_path / "whole", how)
    steps = 0
    for stop_at in range(1, 40):
        steps = 0

        def tell(_done, _of, stop_at=stop_at):
            nonlocal steps
            steps += 1
            if steps == stop_at:
                raise Stop

        try:
            convert(reader, tmp_path / "w", how, tell)
        except Stop:
            continue
        break
    assert digest(tmp_path / "w") == digest(tmp_path / "whole")
    assert convert(reader, tmp_path / "w", how).was_done


class Counting(MemoryStorage):
    """Objects in a dict, the last writes of which fail."""

    left = 10**9

    def write(self, name, pieces, size_bytes):
        self.left -= 1
        if self.left < 0:
            raise StorageError("the connection is gone")
        super().write(name, pieces, size_bytes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_stored_warehouse_has_the_bytes_of_a_local_one_after_any_number_of_kills(name, tmp_path, monkeypatch):
    how = WarehouseLayout(**{k: tuple(v) if isinstance(v, list) else v for k, v in LAYOUTS[name].items()})
    reader, storage = FrameReader(log(6000), split_rows=2000), Counting()
    convert(reader, tmp_path / "whole", how)
    monkeypatch.setattr("rowwise.ingest.warehouse.convert.parse_folder", lambda _: StorageFolder(storage, "w"))
    attempts = 0
    while True:
        attempts, storage.left = attempts + 1, 5
        try:
            convert(reader, "s3://bucket/w", how)
            break
        except StorageError:
            assert "w/_rowwise/warehouse.json" not in storage.objects
            assert "w/_rowwise/journal.jsonl" in storage.objects
    assert attempts > 1
    whole = {
        path.relative_to(tmp_path / "whole").as_posix(): path.read_bytes()
        for path in (tmp_path / "whole").rglob("*")
        if path.is_file() and path.name != "lock"
    }
    assert {key.removeprefix("w/"): value for key, value in storage.objects.items()} == whole
    storage.left = 10**9
    assert convert(reader, "s3://bucket/w", how).was_done
    with pytest.raises(DataError, match=r"other options \(group_rows\)"):
        convert(reader, "s3://bucket/w", structs.replace(how, group_rows=999))
    storage.objects = {"w/other": b""}
    with pytest.raises(DataError, match="memory/w: has objects"):
        convert(reader, "s3://bucket/w", how)


def test_rows_are_read_from_a_server_with_faults(tmp_path, monkeypatch):
    """Errors, 429s, and answers that are reset: rows of a folder, of a file, of a pattern, whole or in pieces."""
    source = tmp_path / "a.parquet"
    pq.write_table(log(6000), source, row_group_size=700)
    convert(ParquetReader(source), tmp_path / "w", WarehouseLayout(group_rows=500))
    with server_of_urls(tmp_path / "s3", monkeypatch, **FAULTS) as server:
        store = connect(server.endpoint)
        for path in (source, *(tmp_path / "w").rglob("*")):
            if path.is_file() and path.name != "lock":
                content = path.read_bytes()
                store.write(path.relative_to(tmp_path).as_posix(), lambda content=content: [content], len(content))
        assert rows_of("s3://bucket/w").equals(rows_of(tmp_path / "w"))
        one = ParquetReader("s3://bucket/a.parquet")
        pieces = [piece for split in one.splits() for piece in one.pieces(split, one.schema.names, 100)]
        assert pa.concat_tables(pieces).equals(pq.read_table(source))
        (found,) = one.splits()[:1]
        assert one.stamp(found.source) == one.stamp(found.source)
        assert one.stamp(found.source)[0] == source.stat().st_size
        assert len(ParquetReader("s3://bucket/*.parquet").splits()) == len(one.splits())
        with pytest.raises(DataError, match="such file or folder"):
            ParquetReader("s3://bucket/none")
        store.delete("a.parquet")
        with pytest.raises(DataError, match=r"s3://bucket/a\.parquet"):
            ParquetReader.read(pickle.loads(pickle.dumps(one)), found, one.schema.names)


@pytest.mark.slow
def test_a_conversion_to_a_store_that_is_killed_leaves_nothing_that_is_read(tmp_path, monkeypatch):
    source, how = tmp_path / "a.parquet", json.dumps({**LAYOUTS["folders"], "group_rows": 500})
    pq.write_table(log(60_000), source, row_group_size=7000)
    subprocess.run([sys.executable, "-c", SCRIPT, source, tmp_path / "whole", how], check=True)
    seed = random.randrange(2**32)
    print("seed", seed)
    draw, killed = random.Random(seed), 0
    with server_of_urls(tmp_path / "s3", monkeypatch, **FAULTS) as server:
        command = [sys.executable, "-c", SCRIPT, str(source), "s3://bucket/w", how]
        place = StorageFolder(connect(server.endpoint), "w")
        for _ in range(6):
            with subprocess.Popen(command) as process:
                time.sleep(draw.uniform(0.8, 3))
                process.kill()
            names = place.relative_names()
            if names and "_rowwise/warehouse.json" not in names:
                killed += 1
                with pytest.raises(DataError, match="w: its conversion"):
                    ParquetReader("s3://bucket/w")
        subprocess.run(command, check=True)
        names = [name for name in place.relative_names() if name.endswith(".parquet")]
        found = [(name, hashlib.sha256(place.storage.read(place.inside(name))).hexdigest()) for name in names]
        assert found == digest(tmp_path / "whole")
        assert rows_of("s3://bucket/w").equals(rows_of(tmp_path / "whole"))
    print("killed in the middle", killed)


def test_changes_are_refused(tmp_path):
    source = tmp_path / "a.parquet"
    pq.write_table(log(100), source)
    convert(ParquetReader(source), tmp_path / "w", WarehouseLayout())
    want = r"holds a warehouse made with other options \(compression\).*another folder"
    with pytest.raises(DataError, match=want):
        convert(ParquetReader(source), tmp_path / "w", WarehouseLayout(compression="none"))
    pq.write_table(log(100, seed=1), source)
    with pytest.raises(DataError, match="data, or the data"):
        convert(ParquetReader(source), tmp_path / "w", WarehouseLayout())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(DataError, match="exists"):
        convert(ParquetReader(source), tmp_path / "mine", WarehouseLayout())


def test_popularity(tmp_path):
    convert(FrameReader(log(100)), tmp_path / "w", WarehouseLayout())
    now = 1_700_000_000.0
    for columns, ago_days in ((("x", "day"), 1), (("x",), 2), (("id",), 8)):
        assert log_use(tmp_path / "w", columns, now - ago_days * 86_400) is not None
    assert popularity(tmp_path / "w", now) == {"x": 2.0, "day": 1.0}
    assert log_use(tmp_path / "w" / "part-00000.parquet", ("x",), now) is not None
    (tmp_path / "w" / "_rowwise" / "popularity" / "torn.json").write_text('{"time": ')
    assert popularity(tmp_path / "w", now)["x"] == 3.0
    assert log_use("s3://bucket/w", ("x",), now) is None
    (tmp_path / "plain").mkdir()
    assert log_use(tmp_path / "plain", ("x",), now) is None
    assert not list((tmp_path / "plain").iterdir())
    convert(ParquetReader(tmp_path / "w"), tmp_path / "v", WarehouseLayout(), used=popularity(tmp_path / "w", now))
    assert ParquetReader(tmp_path / "v").schema.names[:2] == ["x", "day"]


def test_values_of_folders_are_numbers_in_digits_of_ascii():
    for texts, kind in ((("1", "-7", None), pa.int64()), (("\u0661",), pa.string()), (("9" * 5000,), pa.string())):
        (field,) = infer_fields([{"day": text} for text in texts], {})
        assert field.type == kind
        assert parse_value(texts[0], kind) == (int(texts[0]) if kind == pa.int64() else texts[0])
