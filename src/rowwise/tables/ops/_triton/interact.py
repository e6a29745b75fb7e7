"""Kernels of DLRM's interaction: the dots of every two vectors of a sample, and their gradients.

A program has one sample, whose vectors and dots stay in registers. Sums round as the products of the device do, see
[Note: Contracted sums] in `_cpp/interact.h`."""

import triton
import triton.language as tl


@triton.jit
def read_vectors(dense, pooled, sample, vectors, dim: tl.constexpr, begin, VECTORS: tl.constexpr, PART: tl.constexpr):
    """Columns of the dense vector, and of the pooled vectors below it; 0 beyond them."""
    t = tl.arange(0, VECTORS)[:, None]
    d = begin + tl.arange(0, PART)[None, :]
    place = tl.where(t == 0, dense + sample * dim, pooled + (sample * (vectors - 1) + t - 1) * dim)
    return tl.load(place + d, mask=(t < vectors) & (d < dim), other=0.0)


@triton.jit
def interact(
    dense,
    pooled,
    out,
    vectors,
    dim: tl.constexpr,
    VECTORS: tl.constexpr,
    PART: tl.constexpr,  # columns of one matrix product
    PRECISION: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = out + sample * (dim + vectors * (vectors - 1) // 2)
    t = tl.arange(0, VECTORS)[:, None]
    dots = tl.zeros((VECTORS, VECTORS), tl.float32)
    for begin in tl.range(0, dim, PART):
        x = read_vectors(dense, pooled, sample, vectors, dim, begin, VECTORS, PART)
        dots = tl.dot(x, tl.trans(x), dots, input_precision=PRECISION)
        d = begin + tl.arange(0, PART)[None, :]
        tl.store(row + d + t * 0, x, mask=(t == 0) & (d < dim))
    u = tl.arange(0, VECTORS)[None, :]
    tl.store(row + dim + t * (t - 1) // 2 + u, dots, mask=(u < t) & (t < vectors))


@triton.jit
def interact_grad(
    dense,
    pooled,
    grad,
    dense_grad,
    pooled_grad,
    vectors,
    dim: tl.constexpr,
    VECTORS: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = grad + sample * (dim + vectors * (vectors - 1) // 2)
    t = tl.arange(0, VECTORS)[:, None]
    u = tl.arange(0, VECTORS)[None, :]
    higher, lower = tl.maximum(t, u), tl.minimum(t, u)
    of_dot = row + dim + higher * (higher - 1) // 2 + lower
    weights = tl.load(of_dot, mask=(t != u) & (higher < vectors), other=0.0)
    for begin in tl.range(0, dim, PART):
        d = begin + tl.arange(0, PART)[None, :]
        x = read_vectors(dense, pooled, sample, vectors, dim, begin, VECTORS, PART)
        own = tl.load(row + d + t * 0, mask=(t == 0) & (d < dim), other=0.0)
        found = tl.dot(weights, x, own, input_precision=PRECISION)
        tl.store(dense_grad + sample * dim + d + t * 0, found, mask=(t == 0) & (d < dim))
        place = pooled_grad + sample * (vectors - 1) * dim + (t - 1) * dim + d
        tl.store(place, found, mask=(t > 0) & (t < vectors) & (d < dim))
