"""Operators on batches on a GPU beside those of the CPU: the same results, errors at once or one step later."""

import numpy as np
import pytest
import torch
from conformance_idmap import arguments
from rearranged import INT32, INT64, calls_on, deduplications, ids_of, newer, on_device_of

from rowwise.base.errors import DeviceError, IdError
from rowwise.tables.ids import arrays, rules
from rowwise.tables.ops.faults import check_faults

pytestmark = pytest.mark.gpu
ops = torch.ops.rowwise


def same(got, want) -> bool:
    if isinstance(want, torch.Tensor):
        return got.dtype == want.dtype and torch.equal(got.cpu(), want)
    if isinstance(want, tuple | list):
        return all(same(*both) for both in zip(got, want, strict=True))
    return got == want


@pytest.mark.parametrize("batch", [0, 3, 8192])
@pytest.mark.parametrize("types", [(INT32, INT32), (INT64, INT32)])
def test_batches_are_rearranged_as_on_the_cpu(batch, types):
    batches = [ids_of(batch, 20, 0, types), ids_of(batch, 1, 1)]
    for name, args in (*calls_on(batches), *deduplications(1000)):
        operator = getattr(ops, name)
        assert same(operator(*on_device_of(name, args, "cuda")), operator(*args)), name
    check_faults(torch.device("cuda"))


def test_ids_outside_their_table_are_refused():
    one = ids_of(300, 3, 2)
    outside = one._replace(values=torch.where(one.values == 16, -5, one.values))
    slices, messages = torch.tensor([[0, 17]]), torch.tensor([[1, 0, 0]])
    packed = outside.values, outside.lengths, None, slices, messages, 300
    with pytest.raises(IdError, match="id is outside"):
        ops.pack_ids(*on_device_of("pack_ids", packed, "cuda"))
    found = ops.find_newer(*on_device_of("find_newer", newer(outside), "cuda"))
    with pytest.raises(DeviceError, match="outside its table"):
        check_faults(found.device)
    assert int(found.min()) == -1


def test_ids_are_mapped_as_on_the_cpu():
    dense, rows_N = np.arange(50, 60_000), np.arange(100_000) % 700
    maps = (
        arrays.ranked_map(100_000, [dense], 0),
        arrays.ranked_map(100_000, [dense[::7]], "own"),
        arrays.entry_map(100_000, np.where(rows_N > 600, rows_N, -1), 700),
        arrays.entry_map(100_000, rows_N, 700),
        rules.double_hash_map(100_000, 1000),
        rules.quotient_remainder_map(100_000, 1000),
    )
    for one in maps:
        args = torch.arange(-5, 100_005), *arguments(one)
        assert same(ops.map_ids(*on_device_of("map_ids", args, "cuda")), ops.map_ids(*args))


@pytest.mark.parametrize("dim", [1, 7, 16, 100, 128, 1100])
def test_rows_of_four_bits_are_packed_as_on_the_cpu(dim):
    rows = torch.randn(500, dim) * torch.logspace(-30, 30, 500).unsqueeze(1)
    packed = ops.pack4(rows)
    assert same(ops.pack4(rows.cuda()), packed)
    assert same(ops.unpack4(packed.cuda(), dim), ops.unpack4(packed, dim))
