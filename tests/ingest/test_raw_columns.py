"""Columns in blocks are those of Arrow: alone, cut and joined, also with columns that came another way."""

import ctypes

import numpy as np
import pyarrow as pa
import pytest

from rowwise.ingest.raw_columns import NumberBlock, RawColumns

NAMES = ("a", "x", "b", "text", "y")


def make(begin, rows, *, nulls=False):
    a_R = np.arange(begin, begin + rows)
    whole, floats = np.stack([a_R, a_R + 100]), np.stack([a_R / 2, a_R / 4]).astype(np.float32)
    arrays = {"text": pa.array([str(a) for a in a_R]), "unread": pa.array(a_R)}
    blocks = [NumberBlock(pa.int64(), ("a", "b"), whole)]
    if nulls:
        arrays |= {"x": pa.array([None, *floats[0, 1:]], pa.float32()), "y": pa.array(floats[1])}
    else:
        blocks.append(NumberBlock(pa.float32(), ("x", "y"), floats))
    return RawColumns(NAMES, rows, blocks, arrays)


def plain(columns):
    return pa.table(dict(columns))


@pytest.mark.parametrize("nulls", [False, True])
def test_cut_and_joined_columns_are_those_of_arrow(nulls):
    first, second = make(0, 5), make(5, 4, nulls=nulls)
    assert list(first) == list(NAMES) == plain(first).column_names
    assert first["x"].type == pa.float32()
    assert plain(first.slice(1, 3)) == plain(first).slice(1, 2)
    joined = RawColumns.join([first.slice(0, 4), second.slice(1, 4)])
    wanted = pa.concat_tables([plain(first).slice(0, 4), plain(second).slice(1, 3)])
    assert (joined.rows, plain(joined)) == (7, wanted.combine_chunks())
    assert joined == RawColumns.of(dict(joined))
    assert not joined.has("unread")
    assert first.has("unread")
    assert not first.has("z")


def test_addresses_are_those_of_the_columns_in_blocks():
    columns = make(0, 6).slice(2, 5)
    addresses = columns.addresses()
    assert addresses.keys() == {"a", "b", "x", "y"}
    for name, kind in (("b", ctypes.c_int64), ("y", ctypes.c_float)):
        assert list((kind * 3).from_address(addresses[name])) == columns[name].to_pylist()
    replaced = columns.replace({"b": pa.array([7, 8, 9])})
    assert replaced.addresses().keys() == {"a", "x", "y"}
    assert replaced["b"].to_pylist() == [7, 8, 9]
