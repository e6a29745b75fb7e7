"""Kernels of rows as int8 on the wire: rounded to nearest, with the bits of the reference."""

import triton
import triton.language as tl

from rowwise.ops._triton.rows import INT8, header_bytes, read_row, row_bytes, write_codes


@triton.jit
def pack(rows, packed, dim, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A program a row; a row that is not finite gets scales that are not a number."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < dim
    w = tl.load(rows + n * dim + d, mask=mask, other=0.0)
    finite = tl.sum(tl.where(w * 0.0 == 0.0, 0, 1), 0) == 0
    row = packed + n * row_bytes(dim, INT8, GROUP)
    header = header_bytes(dim, INT8, GROUP)
    # Half of a code's last bit, so that cutting the fraction rounds to nearest.
    w = tl.where(finite, w, 0.0)
    write_codes(row, d, w, mask, d * 0 + (1 << 21), dim, GROUP, finite)
    tl.store(row + header + d, tl.zeros((BLOCK,), tl.uint8), mask=(d >= dim) & (d < (dim + 3) // 4 * 4))


@triton.jit
def unpack(packed, rows, dim, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    row = packed + n * row_bytes(dim, INT8, GROUP)
    tl.store(rows + n * dim + d, read_row(row, d, d < dim, dim, INT8, GROUP), mask=d < dim)
