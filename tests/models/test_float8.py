"""Products in 8 bits: exact for numbers that have so few bits, near otherwise, and GPUs' operator gives the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from rowwise import SpecError
from rowwise.tables.ops.float8 import GRADIENTS, VALUES, float8_products, product_float8, round_float8, scaled_product
from rowwise.tables.ops.linear import linear
from rowwise.train.settings import Training

CPU = torch.device("cpu")
widths = st.integers(1, 4).map(lambda n: 16 * n)
batches = st.integers(1, 40)
STEP = {VALUES: 2.0**-4, GRADIENTS: 2.0**-3}  # half a step between numbers, relative


def tensors_of(seed, *shapes, whole=False):
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return [torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(function, tensors, grad):
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


@given(batches, widths, widths, st.integers(-20, 20), st.booleans())
def test_exact_where_numbers_have_few_bits(batch, fan_in, fan_out, power, relu):
    x, weight, bias, grad = tensors_of(
        batch, (batch, fan_in), (fan_out, fan_in), (fan_out,), (batch, fan_out), whole=True
    )
    x, bias, grad = x * 2.0**power, bias * 2.0**power, grad.sign()

    def plain(*tensors):
        return F.linear(*tensors).relu() if relu else F.linear(*tensors)

    with float8_products(CPU):
        mine = gradients(lambda *t: linear(*t, relu=relu), (x, weight, bias), grad)
    for a, b in zip(mine, gradients(plain, (x, weight, bias), grad), strict=True):
        assert torch.equal(a, b)


@given(batches, widths, widths, st.sampled_from([VALUES, GRADIENTS]), st.floats(1e-12, 1e12))
def test_near(batch, fan_in, fan_out, kind, factor):
    a, b = tensors_of(batch, (batch, fan_in), (fan_out, fan_in))
    got = product_float8(a * factor, b, torch.float32, a=kind)
    bound = factor * 1.1 * (STEP[kind] + STEP[VALUES]) * F.linear(a.abs(), b.abs()) + factor * 1e-3
    assert ((got - factor * F.linear(a, b)).abs() <= bound).all()


@given(batches, widths, widths)
def test_gpus_operator_gives_the_same(batch, inner, columns):
    a, b = tensors_of(batch, (batch, inner), (columns, inner))
    (rounded_a, scale_a), (rounded_b, scale_b) = round_float8(a, VALUES), round_float8(b, VALUES)
    theirs = scaled_product(rounded_a, scale_a, rounded_b, scale_b, torch.float32)
    assert torch.allclose(theirs, product_float8(a, b, torch.float32), rtol=1e-5, atol=1e-5)


@given(st.integers(1, 60), st.integers(1, 60))
def test_other_widths_keep_their_precision(fan_in, fan_out):
    x, weight = tensors_of(3, (5, fan_in), (fan_out, fan_in))
    with float8_products(CPU):
        rounded = not torch.allclose(linear(x, weight), F.linear(x, weight), rtol=1e-4, atol=1e-5)
    assert not rounded or (fan_in % 16 == 0 and fan_out % 16 == 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_visible(number):
    x, weight = tensors_of(4, (3, 16), (16, 16))
    x[1, 2] = number
    with float8_products(CPU):
        assert linear(x, weight).isnan().all()
    assert linear(x, weight)[0].isfinite().all()


def test_zeros_and_empty_batches():
    weight = torch.ones(16, 16)
    with float8_products(CPU):
        assert torch.equal(linear(torch.zeros(3, 16), weight), torch.zeros(3, 16))
        assert linear(torch.zeros(0, 16), weight).shape == (0, 16)
        assert linear(torch.zeros(2, 3, 16), weight).shape == (2, 3, 16)
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(torch.zeros(3, 16), weight).dtype == torch.bfloat16


def test_the_compiler_is_refused():
    with pytest.raises(SpecError, match="precision=fp8"):
        Training(compile=True, precision="fp8")
