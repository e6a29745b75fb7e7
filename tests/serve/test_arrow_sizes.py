"""Bodies of Arrow are bounded before they are decompressed."""

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


@given(place=st.integers(0, 2000), byte=st.integers(0, 255))
def test_a_body_with_another_byte_is_read_or_refused(place, byte):
    body = bytearray(stream(table_of(40), "zstd"))
    body[place % len(body)] = byte
    with suppress(DataError, pa.ArrowException, OSError):
        assert decompressed_bytes(pa.py_buffer(bytes(body))) >= 0
