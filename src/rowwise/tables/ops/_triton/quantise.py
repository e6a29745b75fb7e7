"""Kernels of rows as int8 and int4 on the wire and in checkpoints: rounded to nearest. A program has a row."""

import triton
import triton.language as tl

from rowwise.tables.ops._triton.rows import INT4, INT8, header_bytes, read_row, row_bytes, write_codes
from rowwise.tables.ops._triton.sums import column_sum
from rowwise.tables.ops.reference import quantise as reference

MOVES, IDLE = tl.constexpr(reference.MOVES), tl.constexpr(reference.IDLE)


@triton.jit
def pack(rows, packed, dim, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A row that is not finite gets NaN scales."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < dim
    w = tl.load(rows + n * dim + d, mask=mask, other=0.0)
    finite = tl.sum(tl.where(w * 0.0 == 0.0, 0, 1), 0) == 0
    row = packed + n * row_bytes(dim, INT8, GROUP)
    header = header_bytes(dim, INT8, GROUP)
    # Noise of half a code, so that truncating the fraction rounds to nearest.
    w = tl.where(finite, w, 0.0)
    write_codes(row, d, w, mask, d * 0 + (1 << 21), dim, GROUP, finite)
    tl.store(row + header + d, tl.zeros((BLOCK,), tl.uint8), mask=(d >= dim) & (d < (dim + 3) // 4 * 4))


@triton.jit
def unpack(packed, rows, dim, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    row = packed + n * row_bytes(dim, INT8, GROUP)
    tl.store(rows + n * dim + d, read_row(row, d, d < dim, dim, INT8, GROUP), mask=d < dim)


@triton.jit
def step_of(low, high):
    step = (high - low) * 0.06666667014360428
    return tl.where(step >= 1.1754943508222875e-38, step, 0.0)  # else all weights are (nearly) equal


@triton.jit
def codes_of(w, low, step):
    """The nearest of 15 steps, as a float."""
    inverse = tl.where(step == 0.0, 0.0, tl.div_rn(1.0, tl.where(step == 0.0, 1.0, step)))
    return (tl.minimum(tl.maximum((w - low) * inverse, 0.0), 15.0) + 0.5).to(tl.int32).to(tl.float32)


@triton.jit
def error_of(w, low, high, mask, BLOCK: tl.constexpr):
    """The squared error of a range."""
    step = step_of(low, high)
    away = codes_of(w, low, step) * step + low - w
    return column_sum(tl.where(mask, away * away, 0.0), BLOCK)


@triton.jit
def pack4(rows, packed, dim, BLOCK: tl.constexpr):
    """Codes in the best range found by [Note: Four bits]; a row that is not finite gets a NaN step."""
    largest: tl.constexpr = 1e38
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < dim
    w = tl.load(rows + n * dim + d, mask=mask, other=0.0)
    finite = tl.sum(tl.where(w * 0.0 == 0.0, 0, 1), 0) == 0
    w = tl.where(finite, w, 0.0)
    # Plus zero: either of -0 and +0 could be the minimum, and their bits differ.
    low = tl.maximum(tl.minimum(tl.min(tl.where(mask, w, float("inf")), 0), largest), -largest) + 0.0
    high = tl.maximum(tl.minimum(tl.max(tl.where(mask, w, float("-inf")), 0), largest), -largest) + 0.0
    best_low, best_high, best = low, high, error_of(w, low, high, mask, BLOCK)
    move = (high - low) * 0.019999999552965164
    idle = tl.where(step_of(low, high) == 0.0, IDLE, 0)
    moves = idle * 0
    while (moves < MOVES) & (idle < IDLE):
        above = error_of(w, low + move, high, mask, BLOCK)
        below = error_of(w, low, high - move, mask, BLOCK)
        up = above <= below
        low, high = tl.where(up, low + move, low), tl.where(up, high, high - move)
        found = tl.where(up, above, below)
        better = found < best
        best_low, best_high = tl.where(better, low, best_low), tl.where(better, high, best_high)
        best, idle = tl.where(better, found, best), tl.where(better, 0, idle + 1)
        moves += 1
    step = step_of(best_low, best_high)
    codes = tl.where(mask, codes_of(w, best_low, step).to(tl.int32), 0)
    pairs = tl.sum(tl.reshape(codes, (BLOCK // 2, 2)) * (tl.arange(0, 2) * 15 + 1)[None, :], 1)
    row = packed + n * row_bytes(dim, INT4, 0)
    header = row.to(tl.pointer_type(tl.float32))
    tl.store(header, tl.where(finite, step, float("nan")))
    tl.store(header + 1, tl.where(finite, best_low, 0.0))
    b = tl.arange(0, BLOCK // 2)
    tl.store(row + header_bytes(dim, INT4, 0) + b, pairs.to(tl.uint8), mask=b < (dim + 7) // 8 * 4)


@triton.jit
def unpack4(packed, rows, dim, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    row = packed + n * row_bytes(dim, INT4, 0)
    tl.store(rows + n * dim + d, read_row(row, d, d < dim, dim, INT4, 0), mask=d < dim)
