"""A checksum is the one that zlib computes, whatever the length and wherever the bytes begin."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.tables.ops.checksum import crc32


@given(st.integers(0, 400), st.integers(0, 20), st.integers(0, 2**32 - 1), st.integers(0, 99))
def test_it_is_that_of_zlib(count, first, start, seed):
    generator = torch.Generator().manual_seed(seed)
    bytes_N = torch.randint(0, 256, (first + count,), dtype=torch.uint8, generator=generator)[first:]
    assert crc32(bytes_N, start) == zlib.crc32(bytes_N.numpy().data, start)


@given(st.lists(st.integers(0, 300), max_size=5))
def test_it_goes_on_where_it_stopped(counts):
    bytes_N = torch.arange(sum(counts)).to(torch.uint8)
    found = 0
    for part in bytes_N.split(counts):
        found = crc32(part, found)
    assert found == zlib.crc32(bytes_N.numpy().data)


def test_bytes_that_are_not_in_a_row_are_refused():
    with pytest.raises(RuntimeError, match="must be a contiguous"):
        crc32(torch.zeros(10, dtype=torch.uint8)[::2])
