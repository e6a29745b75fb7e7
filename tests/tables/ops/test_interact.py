"""The interaction: kernel == reference within rounding on every instruction set, the same bits for any threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import BatchError, interact
from rowwise.tables.ops import reference

ops = torch.ops.rowwise


def make(batch: int, features: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    dense_BD = torch.randn(batch, dim, dtype=dtype, generator=generator)
    pooled_BS = torch.randn(batch, features * dim, dtype=dtype, generator=generator)
    grad = torch.randn(batch, dim + features * (features + 1) // 2, dtype=dtype, generator=generator)
    return dense_BD, pooled_BS, grad


def check(batch: int, features: int, dim: int) -> None:
    """Of small whole numbers every sum is exact, in any order."""
    dense_BD, pooled_BS, grad = ((t * 2).round() for t in make(batch, features, dim))
    mine = ops.interact(dense_BD, pooled_BS), *ops.interact_grad(dense_BD, pooled_BS, grad)
    assert all(t.dtype == torch.float32 for t in mine)
    doubles = dense_BD.double(), pooled_BS.double()
    exact = reference.interact(*doubles), *reference.interact_grad(*doubles, grad.double())
    assert all(map(torch.equal, (t.double() for t in mine), exact))


@pytest.mark.usefixtures("isa")
@given(st.integers(0, 5), st.integers(1, 40), st.integers(1, 70))
def test_every_shape(batch, features, dim):
    check(batch, features, dim)


@pytest.mark.few(60)
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("features", [1, 7, 8, 15, 16, 26, 31, 32, 47, 63, 101, 130])
@pytest.mark.parametrize("dim", [1, 4, 15, 16, 33, 64, 128, 260])
def test_shapes_around_vectors_and_blocks(features, dim):
    check(3, features, dim)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dim", [16, 64, 100])
def test_as_accurate_as_torch(dim):
    dense_BD, pooled_BS, grad = make(50, 26, dim)
    doubles = dense_BD.double(), pooled_BS.double()
    mine = ops.interact(dense_BD, pooled_BS), *ops.interact_grad(dense_BD, pooled_BS, grad)
    theirs = reference.interact(dense_BD, pooled_BS), *reference.interact_grad(dense_BD, pooled_BS, grad)
    exact = reference.interact(*doubles), *reference.interact_grad(*doubles, grad.double())
    for a, b, c in zip(mine, theirs, exact, strict=True):
        assert float((a - c).norm()) <= 3 * float((b - c).norm())


def test_the_definition_spelled_out():
    dense_BD, pooled_BS, _ = make(1, 2, 3)
    v0, v1, v2 = dense_BD[0], pooled_BS[0, :3], pooled_BS[0, 3:]
    wanted = torch.cat([v0, torch.stack([v1 @ v0, v2 @ v0, v2 @ v1])])
    torch.testing.assert_close(interact(dense_BD, pooled_BS), wanted.unsqueeze(0))
    torch.testing.assert_close(reference.interact(dense_BD, pooled_BS), wanted.unsqueeze(0))


def test_gradients_of_the_reference():
    dense_BD, pooled_BS, grad = make(3, 4, 5, torch.float64)
    inputs = (dense_BD.requires_grad_(), pooled_BS.requires_grad_())
    assert torch.autograd.gradcheck(reference.interact, inputs)
    assert torch.autograd.gradcheck(interact, inputs)  # doubles go to the reference
    wanted = torch.autograd.grad(reference.interact(*inputs), inputs, grad)
    for mine, theirs in zip(reference.interact_grad(*inputs, grad), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradients_through_autograd():
    dense_BD, pooled_BS, grad = make(300, 5, 16)
    inputs = (dense_BD.requires_grad_(), pooled_BS.requires_grad_())
    mine = torch.autograd.grad(interact(*inputs), inputs, grad)
    theirs = torch.autograd.grad(reference.interact(*inputs), inputs, grad)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    interact(*inputs).sum().backward()  # an expanded scalar has no memory of its own
    torch.testing.assert_close(dense_BD.grad, 1 + pooled_BS.detach().view(300, 5, 16).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("features", "dim"), [(26, 64), (3, 5), (1, 1)])
def test_the_same_bits_for_any_number_of_threads(features, dim, threads):
    """And for any batch around a sample: 700 samples of dim 64 are enough for streaming stores, 10 are not."""
    dense_BD, pooled_BS, grad = make(700, features, dim)
    threads(1)
    out, grads = ops.interact(dense_BD, pooled_BS), ops.interact_grad(dense_BD, pooled_BS, grad)
    few = slice(100, 110)
    assert torch.equal(ops.interact(dense_BD[few], pooled_BS[few]), out[few])
    assert torch.equal(ops.interact_grad(dense_BD[few], pooled_BS[few], grad[few])[1], grads[1][few])
    for n in (2, 5):
        threads(n)
        assert torch.equal(ops.interact(dense_BD, pooled_BS), out)
        assert all(map(torch.equal, ops.interact_grad(dense_BD, pooled_BS, grad), grads))


def test_autocast_and_mixed_types():
    dense_BD, pooled_BS, grad = make(6, 3, 8)
    narrow = dense_BD.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = interact(narrow, pooled_BS.requires_grad_())
    assert out.dtype == torch.float32
    assert torch.equal(out, interact(narrow.float(), pooled_BS))
    out.backward(grad)
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reference.interact(dense_BD, pooled_BS).dtype == torch.float32
    assert interact(dense_BD, pooled_BS.double()).dtype == torch.float64


def test_views_are_taken_as_they_are():
    dense_BD, pooled_BS, _ = make(6, 3, 8)
    strided = torch.cat([dense_BD, dense_BD], 1)[:, 8:]
    assert torch.equal(interact(strided, pooled_BS), interact(dense_BD, pooled_BS))


@pytest.mark.slow
def test_compiled():
    def loss(dense_BD: torch.Tensor, pooled_BS: torch.Tensor) -> torch.Tensor:
        return interact(dense_BD * 2, pooled_BS).square().sum()

    dense_BD, pooled_BS, _ = make(4, 3, 8)
    inputs = (dense_BD.requires_grad_(), pooled_BS.requires_grad_())
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), loss(*inputs))
    compiled_grads = torch.autograd.grad(compiled(*inputs), inputs)
    assert all(map(torch.equal, compiled_grads, torch.autograd.grad(loss(*inputs), inputs)))


@pytest.mark.slow
def test_what_torch_is_told_is_true():
    dense_BD, pooled_BS, grad = make(4, 3, 8)
    inputs = (dense_BD.requires_grad_(), pooled_BS.requires_grad_())
    torch.library.opcheck(ops.interact.default, inputs)
    torch.library.opcheck(ops.interact_grad.default, (dense_BD.detach(), pooled_BS.detach(), grad))


@pytest.mark.parametrize(
    ("dense", "pooled", "message"),
    [
        ((4,), (4, 8), r"dense vectors \(4,\) and pooled vectors \(4, 8\): expected \[B, D\] and \[B, F \* D\]"),
        ((4, 8), (4, 3, 8), r"expected \[B, D\] and \[B, F \* D\]"),
        ((4, 8), (5, 24), "4 and 5 samples: expected the same number"),
        ((4, 8), (4, 20), "20 columns are not a multiple of dim 8: expected tables and dense vector of the same dim"),
        ((4, 0), (4, 8), "8 columns are not a multiple of dim 0"),
        ((4, 8), (4, 0), "0 columns are not a multiple of dim 8"),
    ],
)
def test_bad_shapes(dense, pooled, message):
    with pytest.raises(BatchError, match=message):
        interact(torch.zeros(dense), torch.zeros(pooled))


def test_bad_types():
    with pytest.raises(BatchError, match=r"torch.int64"):
        interact(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))


def test_the_operators_refuse_what_would_reach_past_memory():
    dense_BD, pooled_BS, grad = make(4, 3, 8)
    for bad in (pooled_BS[:3], pooled_BS[:, :20].contiguous(), pooled_BS[:, :0], pooled_BS.view(4, 3, 8)):
        with pytest.raises(RuntimeError, match=r"\[B, F \* D\]"):
            ops.interact(dense_BD, bad)
    with pytest.raises(RuntimeError, match="interact wants"):
        ops.interact(dense_BD[:, :0], pooled_BS)
    with pytest.raises(RuntimeError, match="must be a contiguous"):
        ops.interact(dense_BD.double(), pooled_BS)
    with pytest.raises(RuntimeError, match="must be a contiguous"):
        ops.interact(dense_BD, pooled_BS.t().contiguous().t())
    for bad in (grad[:3], grad[:, 1:].contiguous(), grad.flatten()):
        with pytest.raises(RuntimeError, match=r"must be \[4, 14\]"):
            ops.interact_grad(dense_BD, pooled_BS, bad)
    with pytest.raises(RuntimeError, match="cannot pair 1073741824 features"):
        ops.interact(torch.empty(0, 1), torch.empty(0, 1 << 30))
    with pytest.raises(RuntimeError, match="cannot pair 1 features"):
        ops.interact(torch.empty(0, 1 << 62), torch.empty(0, 1 << 62))
