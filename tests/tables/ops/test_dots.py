"""Dot products of a vector with rows: kernel == reference bit for bit, whatever is computed beside a row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.tables.ops import reference

ops = torch.ops.rowwise


def make(rows: int, dim: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator), torch.randn(rows, dim, generator=generator)


@pytest.mark.usefixtures("isa")
@given(st.integers(0, 80), st.one_of(st.integers(1, 70), st.sampled_from([64, 128, 1023, 1025, 2500])), st.data())
def test_the_bits_of_the_reference(rows, dim, data):
    query_D, rows_RD = make(rows, dim)
    wanted_R = reference.dots(query_D, rows_RD)
    assert torch.equal(ops.dots(query_D, rows_RD), wanted_R)
    places = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), max_size=30)) if rows else [], dtype=torch.int64)
    assert torch.equal(ops.dots(query_D, rows_RD, places), wanted_R[places])
    torch.testing.assert_close(wanted_R, rows_RD @ query_D, rtol=1e-4, atol=1e-4)
    places_QN, query_QD = places.expand(2, -1).contiguous(), torch.stack((query_D, -query_D))
    expected_QN = torch.stack((wanted_R[places], -wanted_R[places]))
    assert torch.equal(ops.dots(query_QD, rows_RD, places_QN), expected_QN)
    assert torch.equal(reference.dots(query_QD, rows_RD, places_QN), expected_QN)


@pytest.mark.usefixtures("isa")
def test_the_same_bits_for_any_number_of_threads(threads):
    query_D, rows_RD = make(20_000, 64)
    threads(1)
    wanted_R = ops.dots(query_D, rows_RD)
    for n in (2, 5):
        threads(n)
        assert torch.equal(ops.dots(query_D, rows_RD), wanted_R)


@pytest.mark.slow
def test_operators_behave():
    query_D, rows_RD = make(9, 8)
    torch.library.opcheck(ops.dots.default, (query_D, rows_RD))
    torch.library.opcheck(ops.dots.default, (query_D, rows_RD, torch.tensor([3, 3, 8])))
    places_QN = torch.tensor([[3, 3, 8], [0, 1, 2]])
    torch.library.opcheck(ops.dots.default, (query_D.expand(2, -1).contiguous(), rows_RD, places_QN))


def test_bad_arguments():
    query_D, rows_RD = make(9, 8)
    with pytest.raises(RuntimeError, match="dots expects vectors of one dim"):
        ops.dots(query_D[:7], rows_RD)
    with pytest.raises(RuntimeError, match="dots expects query"):
        ops.dots(query_D[None], rows_RD)
    for place in (-1, 9):
        with pytest.raises(RuntimeError, match=f"place {place} of 9 rows"):
            ops.dots(query_D, rows_RD, torch.tensor([0, place]))
