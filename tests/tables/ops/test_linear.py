"""Linear layers: both libraries against float64 and against nn.Linear, and how one of them is chosen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from rowwise import NativeError, SpecError
from rowwise.base.processor import Processor, read_processor
from rowwise.tables.ops import linear as module
from rowwise.tables.ops import reference
from rowwise.tables.ops.linear import current_library, has_onednn, library_for, linear

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this torch was built without oneDNN")


@pytest.fixture(autouse=True, params=["torch", pytest.param("onednn", marks=needs_onednn)])
def library(request):
    """Every test runs with either library; afterwards nothing is chosen."""
    module.choose_library(request.param)
    yield request.param
    module.choose_library(None)


def parts(batch: int, fan_in: int, fan_out: int, bias: bool = True):
    generator = torch.Generator().manual_seed(batch + fan_in)
    x_BI = torch.randn(batch, fan_in, generator=generator)
    weight_OI = torch.randn(fan_out, fan_in, generator=generator) / fan_in**0.5
    bias_O = torch.randn(fan_out, generator=generator) if bias else None
    return x_BI, weight_OI, bias_O


def gradients(function, *tensors):
    """The output, and the gradients of all inputs for a gradient that is not even."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in tensors]
    out = function(*inputs)
    present = [t for t in inputs if t is not None]
    grad = (torch.arange(out.numel(), dtype=out.dtype) % 7 - 3).view(out.shape)
    return out.detach(), *torch.autograd.grad(out, present, grad)


def plain(x, weight, bias, relu):
    out = F.linear(x, weight, bias)
    return out.relu() if relu else out


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.booleans(), st.booleans())
def test_every_shape(batch, fan_in, fan_out, bias, relu):
    """Of small whole numbers every sum is exact, in any order."""
    generator = torch.Generator().manual_seed(batch)
    shapes = (batch, fan_in), (fan_out, fan_in), (fan_out,)
    tensors = [torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes]
    if not bias:
        tensors[2] = None
    mine = gradients(lambda *t: linear(t[0], t[1], t[2], relu=relu), *tensors)
    exact = gradients(lambda *t: plain(*t, relu), *(None if t is None else t.double() for t in tensors))
    for a, b in zip(mine, exact, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a.double(), b)


@pytest.mark.parametrize("shape", [(13, 512), (512, 256), (256, 1), (100, 30)])
def test_as_accurate_as_torch(shape):
    tensors = parts(500, *shape)
    mine, theirs = gradients(linear, *tensors), gradients(F.linear, *tensors)
    exact = gradients(F.linear, *(t.double() for t in tensors))
    for a, b, c in zip(mine, theirs, exact, strict=True):
        assert error(a, c) <= 3 * error(b, c)


def error(a: torch.Tensor, exact: torch.Tensor) -> float:
    return float((a - exact).square().mean().sqrt())


@given(st.integers(0, 70), st.integers(0, 50))
def test_the_gradient_of_a_relu_is_torchs_and_its_transpose(batch, columns):
    generator = torch.Generator().manual_seed(batch)
    grad_BO, out_BO = (torch.randn(batch, columns, generator=generator) for _ in range(2))
    out_BO[out_BO > 1] = torch.nan
    out_BO[(out_BO > -0.5) & (out_BO < 0)] = -0.0
    want_BO = torch.ops.aten.threshold_backward(grad_BO, out_BO, 0)
    for found in (torch.ops.rowwise.relu_grad(grad_BO, out_BO), reference.relu_grad(grad_BO, out_BO)):
        assert torch.equal(found[0], want_BO)
        assert torch.equal(found[1], want_BO.t())


def test_matrices_of_other_shapes_and_types_are_refused():
    a_BO = torch.zeros(4, 6)
    for out in (torch.zeros(4, 5), torch.zeros(24), torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4).t()):
        with pytest.raises(RuntimeError, match="rowwise: "):
            torch.ops.rowwise.relu_grad(a_BO, out)


def test_nan_stays_nan():
    x = torch.tensor([[float("nan"), 1.0], [2.0, -1.0]])
    assert torch.equal(linear(x, torch.eye(2), relu=True)[1], torch.tensor([2.0, 0.0]))
    assert linear(x, torch.eye(2), relu=True)[0].isnan().all()


def test_the_same_bits_over_again(threads):
    tensors = parts(300, 65, 130)
    for n in (1, 2):
        threads(n)
        first = gradients(lambda *t: linear(*t, relu=True), *tensors)
        for _ in range(3):
            again = gradients(lambda *t: linear(*t, relu=True), *tensors)
            assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (0, 6), (2, 0, 6), (4, 6)])
def test_inputs_of_other_shapes(shape):
    _, weight_OI, bias_O = parts(1, 6, 4)
    x = torch.randn(shape)
    torch.testing.assert_close(linear(x, weight_OI, bias_O, relu=True), plain(x, weight_OI, bias_O, True))


def test_views():
    x_BI, weight_OI, bias_O = parts(8, 6, 4)
    wide = torch.cat([x_BI, x_BI], 1)
    wanted = plain(x_BI, weight_OI, bias_O, False)
    for x in (wide[:, 6:], x_BI.t().contiguous().t()):
        torch.testing.assert_close(linear(x, weight_OI, bias_O), wanted)
    torch.testing.assert_close(linear(x_BI, weight_OI.t().contiguous().t(), bias_O), wanted)
    torch.testing.assert_close(
        linear(x_BI[:1].expand(8, 6), weight_OI), plain(x_BI[:1], weight_OI, None, 0).expand(8, 4)
    )
    weight_OI.requires_grad_()
    linear(x_BI, weight_OI, bias_O).sum().backward()  # the gradient is an expanded scalar
    torch.testing.assert_close(weight_OI.grad, x_BI.sum(0).expand(4, 6))


def test_only_what_is_needed_gets_a_gradient():
    x_BI, weight_OI, bias_O = parts(8, 6, 4)
    bias_O.requires_grad_()
    linear(x_BI, weight_OI, bias_O).sum().backward()
    assert torch.equal(bias_O.grad, torch.full((4,), 8.0))
    assert x_BI.grad is weight_OI.grad is None
    linear(x_BI.requires_grad_(), weight_OI).sum().backward()
    torch.testing.assert_close(x_BI.grad, weight_OI.sum(0).expand(8, 6))
    with torch.no_grad():
        assert not linear(x_BI, weight_OI, bias_O, relu=True).requires_grad


def test_gradients_of_gradients():
    x_BI, weight_OI, bias_O = parts(5, 6, 4)

    def penalty(function) -> torch.Tensor:
        x = x_BI.clone().requires_grad_()
        w = weight_OI.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), w)[0]

    mine = penalty(lambda x, w: linear(x, w, bias_O, relu=True))
    torch.testing.assert_close(mine, penalty(lambda x, w: plain(x, w, bias_O, True)), rtol=1e-4, atol=1e-4)


def test_other_types():
    x_BI, weight_OI, bias_O = (t.double() for t in parts(5, 6, 4))
    assert torch.equal(linear(x_BI, weight_OI, bias_O, relu=True), plain(x_BI, weight_OI, bias_O, True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = gradients(lambda *t: linear(*t, relu=True), *parts(5, 6, 4))
        theirs = gradients(lambda *t: plain(*t, True), *parts(5, 6, 4))
    assert mine[0].dtype == torch.bfloat16
    assert all(map(torch.equal, mine, theirs))


def test_wrong_shapes_are_named_by_torch():
    with pytest.raises(RuntimeError, match=r"5x7 and 6x4"):
        linear(torch.zeros(5, 7), torch.zeros(4, 6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # as torch's compiler does
def test_compiled():
    x_BI, weight_OI, bias_O = parts(5, 6, 4)
    compiled = torch.compile(lambda *t: linear(*t, relu=True), backend="aot_eager", fullgraph=True)
    mine = gradients(compiled, x_BI, weight_OI, bias_O)
    for a, b in zip(mine, gradients(lambda *t: plain(*t, True), x_BI, weight_OI, bias_O), strict=True):
        torch.testing.assert_close(a, b)


def test_the_choice(library):
    assert current_library() == library
    with pytest.raises(SpecError, match="library 'mkl' for matrix"):
        module.choose_library("mkl")
    module.choose_library(None)
    assert current_library() == library_for(read_processor())
    for maker, wanted in (("AuthenticAMD", "onednn"), ("GenuineIntel", "torch"), ("", "torch")):
        assert library_for(Processor(maker=maker)) == (wanted if has_onednn() else "torch")


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(module, "has_onednn", lambda: False)
    with pytest.raises(NativeError, match="'torch', or None"):
        module.choose_library("onednn")
    module.choose_library(None)
    assert current_library() == "torch"
