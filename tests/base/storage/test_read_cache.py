"""Ranges of objects that are kept: the bytes of the store, bounded, shared, and never those of another object."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from base.storage.stores import connect, server_of_urls
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as pq

from rowwise.base.storage.interface import StoredObject
from rowwise.base.storage.read_cache import CacheFolder, ReadCache
from rowwise.ingest.datasets.files import open_named
from rowwise.ingest.warehouse.storage import FileStore

MOST = 100_000


class Store:
    """Objects whose bytes follow from their names and versions, and how often they were read."""

    def __init__(self):
        self.reads = 0

    def fetch(self, one, begin, end):
        self.reads += 1
        return memoryview(bytes((hash((one, at)) & 255) for at in range(begin, end)))


def files_of(folder):
    return [path for path in folder.glob("??/*") if path.is_file()]


def test_a_range_is_read_once_and_only_for_its_object(tmp_path):
    store = Store()
    objects = [StoredObject(name, size, time) for name in "ab" for size in (500, 501) for time in (1.0, 1.5)]
    ranges = [(0, 500), (0, 499), (1, 500), (7, 7)]
    for attempt in range(2):
        cache = ReadCache(tmp_path / "kept", MOST)  # of another process
        for one in objects:
            for begin, end in ranges:
                found = cache.read("s3://x", one, begin, end, lambda o=one, b=begin, e=end: store.fetch(o, b, e))
                assert found == Store().fetch(one, begin, end)
        assert store.reads == len(objects) * len(ranges), attempt
    cache.read("s3://y", objects[0], 0, 500, lambda: store.fetch(objects[0], 0, 500))
    assert store.reads == len(objects) * len(ranges) + 1


@given(st.data())
def test_damaged_files_are_read_again(tmp_path_factory, data):
    folder, store, one = tmp_path_factory.mktemp("cache"), Store(), StoredObject("a", 300, 0.0)
    cache = ReadCache(folder, MOST)
    want = bytes(cache.read("u", one, 0, 300, lambda: store.fetch(one, 0, 300)))
    (path,) = files_of(folder)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        content = content[: data.draw(st.integers(0, len(content) - 1))] + b"x" * data.draw(st.integers(2, 9)) * 200
    path.write_bytes(content)
    for _ in range(2):
        assert bytes(cache.read("u", one, 0, 300, lambda: store.fetch(one, 0, 300))) == want
    assert store.reads == 2


def test_the_least_recently_used_go_first(tmp_path):
    store, cache = Store(), ReadCache(tmp_path, MOST)

    def read(number):
        one = StoredObject(str(number), 10_000, 0.0)
        cache.read("u", one, 0, 10_000, lambda: store.fetch(one, 0, 10_000))

    for number in range(40):
        read(number)
        for age, path in enumerate(sorted(files_of(tmp_path), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, ns=(age, age))  # in order, whatever the clock shows
        read(0)
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 1.2 * MOST
    assert store.reads == 40
    store.reads = 0
    read(39)
    assert store.reads == 0
    large = StoredObject("large", MOST, 0.0)
    cache.read("u", large, 0, MOST // 2, lambda: store.fetch(large, 0, MOST // 2))
    assert all(path.stat().st_size < MOST // 4 for path in files_of(tmp_path))


def test_several_threads_share_a_folder(tmp_path):
    def read_all(_):
        cache, store = ReadCache(tmp_path, 20_000), Store()  # of four files: room is made all the time
        for number in range(200):
            one = StoredObject(str(number % 23), 5_000, 0.0)
            found = cache.read("u", one, 0, 5_000, lambda o=one: store.fetch(o, 0, 5_000))
            assert found == store.fetch(one, 0, 5_000), number

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read_all, range(4)))


def test_a_folder_that_cannot_be_written_costs_reads(tmp_path):
    (tmp_path / "file").touch()
    cache, store, one = ReadCache(tmp_path / "file/kept", MOST), Store(), StoredObject("a", 9, 0.0)
    with pytest.warns(UserWarning, match="kept cannot keep what is read: Not a directory: reads go to the store"):
        cache.read("u", one, 0, 9, lambda: store.fetch(one, 0, 9))
    assert cache.read("u", one, 0, 9, lambda: store.fetch(one, 0, 9)) == store.fetch(one, 0, 9)


def test_an_epoch_after_the_first_reads_what_is_kept(tmp_path, monkeypatch):
    """The object is changed behind the store's back, so what is read again tells from where."""
    with server_of_urls(tmp_path / "s3", monkeypatch) as server:
        connect(server.endpoint).write("a.bin", lambda: [b"old" * 1000], 3000)
        files = FileStore("s3://bucket/a.bin", (".bin",), CacheFolder(tmp_path / "kept", MOST))
        assert files.stream("s3://bucket/a.bin").read() == b"old" * 1000
        (stored,) = [path for path in (tmp_path / "s3").rglob("*") if path.is_file() and path.stat().st_size == 3000]
        status = stored.stat()
        stored.write_bytes(b"new" * 1000)
        os.utime(stored, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert files.stream("s3://bucket/a.bin").read() == b"old" * 1000
        os.utime(stored, ns=(status.st_atime_ns, status.st_mtime_ns + 10**10))
        assert files.stream("s3://bucket/a.bin").read() == b"new" * 1000
        pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")
        content = (tmp_path / "a.parquet").read_bytes()
        connect(server.endpoint).write("a.parquet", lambda: [content], len(content))
        opened = open_named("parquet:s3://bucket/a.parquet", cache=CacheFolder(tmp_path / "rows", 2_000_000))
        reader = pickle.loads(pickle.dumps(opened))  # as workers get it
        assert reader.read(reader.splits()[0], ["x"])["x"].to_pylist() == [1, 2, 3]
        assert files_of(tmp_path / "rows")
