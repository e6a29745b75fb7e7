"""Reads of Parquet: which bytes, from where, what is said of damaged files; every type comes back."""

import datetime as dt
import pickle
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from rowwise.base.errors import DataError
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.warehouse.ranges import ReadCounters, leaves_of, ranges_of
from rowwise.ingest.where import parse

TYPES = {
    "i8": pa.array([1, None, -3], pa.int8()),
    "u64": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "f16": pa.array(np.array([1, 2, 3], np.float16)),
    "f32": pa.array([1.5, None, float("nan")], pa.float32()),
    "bool": pa.array([True, None, False]),
    "text": pa.array(["ä", None, ""]),
    "large": pa.array(["a", None, "b"], pa.large_string()),
    "view": pa.array(["a text that is longer than twelve", None, "b"], pa.string_view()),
    "bytes": pa.array([b"a", None, b"\xff"]),
    "fixed": pa.array([b"abc", None, b"def"], pa.binary(3)),
    "dict": pa.array(["a", None, "b"]).dictionary_encode(),
    "dec": pa.array([Decimal("1.25"), None, Decimal("2")], pa.decimal128(5, 2)),
    "ts": pa.array([dt.datetime(2024, 1, 1), None, dt.datetime(1960, 1, 1)], pa.timestamp("ns")),
    "zoned": pa.array([dt.datetime(2024, 1, 1)] * 3, pa.timestamp("us", tz="UTC")),
    "day": pa.array([dt.date(2024, 1, 1), None, dt.date(1960, 1, 1)]),
    "list": pa.array([[1, None], None, []], pa.list_(pa.int64())),
    "large_list": pa.array([["a"], None, []], pa.large_list(pa.string())),
    "fixed_list": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
    "map": pa.array([[("a", [1])], None, []], pa.map_(pa.string(), pa.list_(pa.int64()))),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}]),
}


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("gap", [0, 1 << 20])
def test_every_type_comes_back(tmp_path, compression, gap):
    table = pa.table({name: pa.concat_arrays([array] * 50) for name, array in TYPES.items()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=60, compression=compression, write_page_checksum=True)
    plain = pq.read_table(tmp_path / "a.parquet", partitioning=None)
    reader = ParquetReader(tmp_path / "a.parquet", gap_bytes=gap, threads=False, verify=True)
    # Read all before looking: what was decoded must not lean on memory that was given back.
    names = [*table.column_names[:-1], "struct.a", "struct.b"]
    assert reader.schema.names == names
    plain = plain.flatten()
    tables = [reader.read(split, names) for split in reader.splits()]
    for name in names:
        assert str(pa.chunked_array([c for t in tables for c in t[name].chunks]).to_pylist()) == str(
            plain[name].to_pylist()
        )
        for split, got in zip(reader.splits(), tables, strict=True):
            assert str(reader.read(split, (name,))[name].to_pylist()) == str(got[name].to_pylist())
    pieces = [piece for split in reader.splits() for piece in reader.pieces(split, ("list", "i8"), 7)]
    assert max(piece.num_rows for piece in pieces) <= 7
    assert pa.concat_tables(pieces).to_pylist() == plain.select(["list", "i8"]).to_pylist()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_ranges_hold_every_chunk(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("ranges") / "a.parquet"
    pq.write_table(pa.table({f"c{i}": np.random.default_rng(i).random(50) for i in range(12)}), path, row_group_size=25)
    footer = pq.read_metadata(path)
    columns = data.draw(st.lists(st.sampled_from([f"c{i}" for i in range(12)]), min_size=1, unique=True))
    gap = data.draw(st.sampled_from([0, 1, 300, 1000, 1 << 20]))
    leaves = leaves_of(footer.schema.to_arrow_schema())
    ranges = ranges_of(footer, 1, [leaf for name in columns for leaf in leaves[name]], gap)
    leaves = leaves_of(footer.schema.to_arrow_schema())
    wanted = 0
    for name in columns:
        chunk = footer.row_group(1).column(leaves[name][0])
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        wanted += chunk.total_compressed_size
        assert any(r.start <= begin and begin + chunk.total_compressed_size <= r.stop for r in ranges)
    assert sum(r.wanted for r in ranges) == wanted
    assert all(b.start - a.stop > gap or (not gap and b.start >= a.stop) for a, b in pairwise(ranges))
    assert len(ranges) == len(columns) if gap == 0 else len(ranges) <= len(columns)


def test_counters_tell_what_was_read(tmp_path):
    pq.write_table(pa.table({f"c{i}": np.random.default_rng(i).random(1000) for i in range(9)}), tmp_path / "a.parquet")
    reader = ParquetReader(tmp_path, gap_bytes=0)
    split = reader.splits()[0]
    assert split.rows == 1000
    reader.read(split, ("c1", "c5"))
    before = reader.counters
    assert (before.reads, before.rows, before.groups, before.over_read) == (2, 1000, 1, 1.0)
    reader.read(split, ("c1",))
    assert (reader.counters - before).reads == 1
    joined = ParquetReader(tmp_path)
    joined.read(split, ("c1", "c5"))
    assert joined.counters.reads == 1
    assert joined.counters.over_read > 2
    assert ParquetReader(tmp_path).counters == ReadCounters()
    assert pickle.loads(pickle.dumps(reader)).counters == ReadCounters()


def test_a_pickled_reader_has_no_footers(tmp_path):
    for index in range(50):
        pq.write_table(pa.table({"a": [index], "b": [1]}), tmp_path / f"{index:03}.parquet")
    reader = ParquetReader(tmp_path)
    splits = reader.splits()
    data = pickle.dumps(reader)
    assert len(data) < 50 * len(str(tmp_path)) + 8000
    for index in range(49):
        (tmp_path / f"{index:03}.parquet").unlink()  # only the file of the split is looked at
    assert pickle.loads(data).read(splits[49], ("a",)).to_pylist() == [{"a": 49}]
    with pytest.raises(DataError, match=r"003.parquet: the file"):
        pickle.loads(data).read(splits[3], ("a",))


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_urls(tmp_path, scheme):
    base = f"memory:/{tmp_path}" if scheme == "memory" else f"file://{tmp_path}"
    system, root = fsspec.core.url_to_fs(base)
    for day in (1, 2):
        system.makedirs(f"{root}/day={day}", exist_ok=True)
        with system.open(f"{root}/day={day}/a.parquet", "wb") as file:
            pq.write_table(pa.table({"a": [day * 10, 1]}), file)
    reader = pickle.loads(pickle.dumps(ParquetReader(base)))
    rows = [row for split in reader.splits() for row in reader.read(split, ("day", "a")).to_pylist()]
    assert rows == [{"day": 1, "a": 10}, {"day": 1, "a": 1}, {"day": 2, "a": 20}, {"day": 2, "a": 1}]
    assert reader.splits()[1].source == f"{base}/day=2/a.parquet"
    assert len(ParquetReader(f"{base}/day=*/*.parquet").splits()) == 2
    assert len(ParquetReader(f"{base}/day=2/a.parquet").splits()) == 1
    for wrong in (f"{base}/nowhere", f"{base}/*.x"):
        with pytest.raises(DataError, match=r"no such file or folder|no file matches the pattern") as caught:
            ParquetReader(wrong)
        assert str(caught.value).startswith(wrong)
    with pytest.raises(DataError, match="cannot be reached"):
        ParquetReader("nosuch://x")


def test_folders_are_columns_and_prune_files(tmp_path):
    for day, country in ((1, "AT"), (2, "B R"), (3, "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / f"day={day}" / f"country={country}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"a": [day]}), folder / "a.parquet")
    reader = ParquetReader(tmp_path)
    assert [str(field.type) for field in reader.schema] == ["int64", "int64", "string"]
    rows = [row for split in reader.splits() for row in reader.read(split, ("country", "a", "day")).to_pylist()]
    assert rows[1:] == [{"country": "B R", "a": 2, "day": 2}, {"country": None, "a": 3, "day": 3}]
    (tmp_path / "day=1" / "country=AT" / "a.parquet").write_bytes(b"PAR1")  # is not looked at below, but for its schema
    pq.write_table(pa.table({"a": [1]}), tmp_path / "day=1" / "country=AT" / "a.parquet")
    assert len(ParquetReader(tmp_path, where=parse("day >= 2 and country is not null")).splits()) == 1
    assert len(ParquetReader(tmp_path, where=parse("country is null")).splits()) == 1


def test_damage_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": np.arange(1000), "b": np.random.default_rng(0).random(1000)}), path,
                   row_group_size=500, write_page_checksum=True, compression="none", use_dictionary=False)  # fmt: skip
    data = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(1).column(1).data_page_offset + 2000
    data[at] ^= 1
    path.write_bytes(data)
    reader = ParquetReader(path, verify=True)
    reader.read(reader.splits()[0], ("a", "b"))
    said = r"a.parquet: cannot be read as Parquet: row group 1, column 'b': .*; convert the data again"
    with pytest.raises(DataError, match=said):
        reader.read(reader.splits()[1], ("a", "b"))
    assert ParquetReader(path).read(reader.splits()[1], ("b",)).num_rows == 500  # nobody looked


def test_a_schema_that_changes_midway(tmp_path):
    pq.write_table(pa.table({"a": [1], "b": [1.0]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": pa.array([2], pa.int32()), "b": [[1.0]]}), tmp_path / "1.parquet")
    reader = ParquetReader(tmp_path)
    split = reader.splits()[1]
    assert reader.read(split, ("a",)).schema.field("a").type == pa.int64()
    said = r"1.parquet: row group 0, column 'b' holds list<.*: double>, but double in .*0.parquet: expected files"
    with pytest.raises(DataError, match=said):
        reader.read(split, ("b",))
    pq.write_table(pa.table({"a": [2, 3], "b": [1.0, 2.0]}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match="group 0 has 2"):
        ParquetReader(tmp_path).read(split, ("a",))


def test_threads_share_a_reader(tmp_path):
    """A run reads ahead in one thread while it evaluates in another."""
    path = tmp_path / "a.parquet"
    rows = np.arange(200_000)
    pq.write_table(pa.table({"x": rows, "y": rows.astype(np.float64)}), path, row_group_size=20_000)
    reader = ParquetReader(path)
    splits = reader.splits()
    before = reader.counters.groups

    def read(split):
        table = reader.read(split, ("x", "y"))
        want = np.arange(split.first_row, split.first_row + split.rows)
        return bool(np.array_equal(table["x"].to_numpy(), want) and np.array_equal(table["y"].to_numpy(), want))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, splits * 20))
    assert reader.counters.groups - before == 200
