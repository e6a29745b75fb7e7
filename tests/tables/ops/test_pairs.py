"""The sum of pairs: kernel == reference bit for bit on every instruction set and any number of threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import BatchError
from rowwise.tables.ops import reference
from rowwise.tables.ops.interact import pair_sums

ops = torch.ops.rowwise


def make(batch: int, features: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, dim), (batch, features * dim), (batch,)
    return tuple(torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)


@pytest.mark.usefixtures("isa")
@given(st.integers(0, 80), st.integers(1, 20), st.one_of(st.integers(1, 70), st.sampled_from([1023, 1025, 2500])))
def test_the_bits_of_the_reference(batch, features, dim):
    offset_BD, pooled_BS, grad_B = make(batch, features, dim)
    native = ops.pair_sums(offset_BD, pooled_BS), *ops.pair_sums_grad(offset_BD, pooled_BS, grad_B)
    wanted = reference.pair_sums(offset_BD, pooled_BS), *reference.pair_sums_grad(offset_BD, pooled_BS, grad_B)
    assert all(map(torch.equal, native, wanted))


def test_it_is_the_sum_of_all_dots():
    offset_BD, pooled_BS, _ = make(5, 4, 3, torch.float64)
    vectors_BTD = pooled_BS.view(5, 4, 3)
    dots_BTT = vectors_BTD @ vectors_BTD.transpose(1, 2)
    wanted_B = dots_BTT.triu(1).sum((1, 2))
    torch.testing.assert_close(pair_sums(torch.zeros_like(offset_BD), pooled_BS), wanted_B)
    # An offset is a vector more, whose own square counts, too.
    more_B = (vectors_BTD.sum(1) * offset_BD).sum(1) + offset_BD.square().sum(1) / 2
    torch.testing.assert_close(pair_sums(offset_BD, pooled_BS), wanted_B + more_B)


def test_gradients():
    inputs = [t.requires_grad_() for t in make(3, 4, 5, torch.float64)[:2]]
    assert torch.autograd.gradcheck(pair_sums, inputs)
    grad_B = make(3, 4, 5)[2].double()
    wanted = torch.autograd.grad(pair_sums(*inputs), inputs, grad_B)
    for by_formula, by_autograd in zip(reference.pair_sums_grad(*inputs, grad_B), wanted, strict=True):
        torch.testing.assert_close(by_formula, by_autograd)
    floats = [t.detach().float().requires_grad_() for t in inputs]
    pair_sums(*floats).sum().backward()  # an expanded scalar has no memory of its own
    for leaf, wide in zip(floats, torch.autograd.grad(pair_sums(*inputs).sum(), inputs), strict=True):
        torch.testing.assert_close(leaf.grad, wide.float())


@pytest.mark.usefixtures("isa")
def test_the_same_bits_for_any_number_of_threads(threads):
    offset_BD, pooled_BS, grad_B = make(700, 10, 16)
    threads(1)
    out, grads = ops.pair_sums(offset_BD, pooled_BS), ops.pair_sums_grad(offset_BD, pooled_BS, grad_B)
    for n in (2, 5):
        threads(n)
        assert torch.equal(ops.pair_sums(offset_BD, pooled_BS), out)
        assert all(map(torch.equal, ops.pair_sums_grad(offset_BD, pooled_BS, grad_B), grads))


@pytest.mark.slow
def test_shapes_under_the_compiler():
    offset_BD, pooled_BS, grad_B = make(4, 3, 8)
    inputs = (offset_BD.requires_grad_(), pooled_BS.requires_grad_())
    torch.library.opcheck(ops.pair_sums.default, inputs)
    torch.library.opcheck(ops.pair_sums_grad.default, (offset_BD.detach(), pooled_BS.detach(), grad_B))


@pytest.mark.parametrize(("offset", "pooled"), [((4,), (4, 8)), ((4, 8), (5, 24)), ((4, 8), (4, 20)), ((4, 0), (4, 8))])
def test_bad_shapes(offset, pooled):
    with pytest.raises(BatchError, match="pair_sums got dense"):
        pair_sums(torch.zeros(offset), torch.zeros(pooled))
    with pytest.raises(RuntimeError, match="pair_sums wants dense"):
        ops.pair_sums(torch.zeros(offset), torch.zeros(pooled))
