"""Bytes of a piece on the disk tier, as the formula has them."""

import pytest

from rowwise import Adam, RowType, RowWiseAdagrad
from rowwise.tables.spec import Table
from rowwise.tables.store.sizes import cache_bytes, disk_bytes


def piece(dim, optimizer, rows=1_000_000, row_type=RowType.FP32):
    return Table(name="t", rows=rows, dim=dim, optimizer=optimizer, row_type=row_type)


@pytest.mark.parametrize(
    ("table", "cached", "expected"),
    [
        (piece(64, RowWiseAdagrad()), 100_000, (100_000 + 12_500) * (256 + 4 + 16) + 6_000_000),
        (piece(64, RowWiseAdagrad()), 99_990, (100_000 + 12_500) * (256 + 4 + 16) + 6_000_000),
        (piece(16, Adam(), row_type=RowType.FP16), 33, (64 + 1_024) * (32 + 128 + 16) + 6_000_000),
        (piece(16, Adam()), 0, (32 + 1_024) * (64 + 128 + 16) + 6_000_000),
    ],
)
def test_a_cache_takes_slots_overflow_and_an_index(table, cached, expected):
    assert cache_bytes(table, cached) == expected


def test_records_do_not_cross_blocks():
    assert disk_bytes(piece(64, RowWiseAdagrad(), rows=14_000)) == 2 * 1_000 * 4096  # 14 records of 276 bytes a block
    assert disk_bytes(piece(2_000, RowWiseAdagrad(), rows=10)) == 2 * 10 * 8192  # 8,020 bytes
