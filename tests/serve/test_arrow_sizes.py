"""Bodies of Arrow are bounded before they are decompressed."""

import struct
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import DataError
from rowwise.ingest.arrow_sizes import decompressed_bytes
from rowwise.serve.request import RequestReader

SCHEMA = pa.schema([("x", pa.int64())])
LARGE = 1 << 26  # numbers: half a gigabyte in a few kilobytes


def stream(table, compression, rows=None):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, rows)
    return sink.getvalue().to_pybytes()


def table_of(rows):
    return pa.table(
        {
            "number": np.arange(rows) % 7,
            "text": pa.array([f"text {row % 3}" for row in range(rows)], pa.string()),
            "list": pa.array([[row, None] if row % 5 else None for row in range(rows)], pa.list_(pa.int32())),
            "name": pa.array([f"name {row % 11}" for row in range(rows)], pa.string()).dictionary_encode(),
            "flag": pa.array([bool(row % 2) for row in range(rows)], pa.bool_()),
        }
    )


@given(rows=st.integers(0, 700), batch=st.integers(1, 800), compression=st.sampled_from(("zstd", "lz4")))
def test_sizes_are_those_of_the_buffers_of_a_plain_stream(rows, batch, compression):
    """Arrow pads each buffer of a plain body to 8 bytes; small ones may stay plain in a compressed one."""
    table = table_of(rows)
    plain = sum(
        message.body.size
        for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(stream(table, None, batch)))
        if message.type in ("record batch", "dictionary")
    )
    buffers = 14 * (1 + -(-rows // batch))
    assert plain - 64 * buffers <= decompressed_bytes(pa.py_buffer(stream(table, compression, batch))) <= plain
    assert decompressed_bytes(pa.py_buffer(stream(table, None, batch))) == 0


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_small_body_that_would_be_large_is_refused_before_it_is(compression):
    body = stream(pa.table({"x": np.zeros(LARGE, np.int64)}), compression)
    assert len(body) < 4 << 20
    before = pa.default_memory_pool().bytes_allocated()
    with pytest.raises(DataError, match=r"536,870,9\d\d bytes when"):
        RequestReader(SCHEMA, LARGE).read_arrow(body)
    assert pa.default_memory_pool().bytes_allocated() == before
    few = stream(pa.table({"x": np.arange(100)}), compression)
    assert RequestReader(SCHEMA, 100).read_arrow(few).rows == 100
    with pytest.raises(DataError, match=r"expected at most 500"):
        RequestReader(SCHEMA, 100, max_bytes=500).read_arrow(few)


def of_views(values):
    return bytearray(stream(pa.table({"x": pa.array(values, pa.string_view())}), None))


@pytest.mark.parametrize("length", [-1, -(1 << 31)])
def test_the_view_of_a_null_has_no_negative_length(length):
    """Arrow does not validate it, and adds it up where texts are converted."""
    body = of_views(["a" * 30, None])
    place = body.index(b"\x1e\0\0\0aaaa") + 16
    body[place : place + 4] = length.to_bytes(4, "little", signed=True)
    with pytest.raises(DataError, match="a text has a negative length"):
        RequestReader(pa.schema([("x", pa.string())]), 100).read_arrow(body)


@pytest.mark.parametrize("size", [1, 16_000, 16_017, 1 << 31, 1 << 40, (1 << 63) - 8, (1 << 64) - 16])
def test_declared_sizes_of_buffers(size):
    """Of 1,001 views: it is in the metadata of the batch, and memory is taken for what is there."""
    body = of_views(["a" * 30] * 1001)
    place = body.index((16_016).to_bytes(8, "little"))
    body[place : place + 8] = size.to_bytes(8, "little")
    reader, before = RequestReader(pa.schema([("x", pa.string())]), 2000), pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        if size == 16_017:
            assert reader.read_arrow(body).rows == 1001
        else:
            with pytest.raises(DataError, match="invalid Arrow IPC stream"):
                reader.read_arrow(body)
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 1 << 20


def big_endian(body):
    """The stream, said to be of a machine of the other byte order."""
    (size,) = struct.unpack_from("<I", body, 4)
    schema = memoryview(body)[8 : 8 + size]
    (message,) = struct.unpack_from("<I", schema, 0)
    (table,) = struct.unpack_from("<H", schema, message - struct.unpack_from("<i", schema, message)[0] + 4 + 2 * 2)
    table += message + struct.unpack_from("<I", schema, message + table)[0]
    one = next(place for place in range(table, size, 2) if schema[place : place + 2] == b"\1\0")
    struct.pack_into("<H", schema, table - struct.unpack_from("<i", schema, table)[0] + 4, one - table)
    return body


def test_the_other_byte_order_is_turned():
    table = pa.table({"x": [7, 8 << 56], "list": [[1], [2, 3]]})
    body = big_endian(bytearray(stream(table.select(["x"]), None)))
    assert RequestReader(SCHEMA, 100).read_arrow(body).arrays["x"].to_pylist() == [7 << 56, 8]
    lists = RequestReader(pa.schema([("list", pa.list_(pa.int64()))]), 100)
    with pytest.raises(DataError, match="invalid Arrow IPC stream"):
        lists.read_arrow(big_endian(bytearray(stream(table.select(["list"]), None))))


@pytest.mark.parametrize("table", [pa.table({}), pa.table({"x": pa.array([], pa.int64())}), pa.table({"y": [1]})])
def test_bodies_without_rows(table):
    with pytest.raises(DataError, match=r"request: (no column 'x'|0 rows)"):
        RequestReader(SCHEMA, 100).read_arrow(stream(table, None))


@given(place=st.integers(0, 2000), byte=st.integers(0, 255))
def test_a_body_with_another_byte_is_read_or_refused(place, byte):
    body = bytearray(stream(table_of(40), "zstd"))
    body[place % len(body)] = byte
    with suppress(DataError, pa.ArrowException, OSError):
        assert decompressed_bytes(pa.py_buffer(bytes(body))) >= 0
