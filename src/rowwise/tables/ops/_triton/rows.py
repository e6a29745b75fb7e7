"""Parts of kernels: stored rows as floats, and floats as stored rows with stochastic rounding.

See [Note: Row formats] in `_cpp/tables.h` and [Note: Stochastic rounding] in `_cpp/rowtype.h`.
"""

import triton
import triton.language as tl

from rowwise.tables.ops.layout import TYPES
from rowwise.tables.spec import RowType

FP32, FP16, BF16, INT8, INT4 = (
    tl.constexpr(TYPES.index(RowType(name))) for name in ("fp32", "fp16", "bf16", "int8", "int4")
)


@triton.jit
def header_bytes(dim, TYPE: tl.constexpr, GROUP: tl.constexpr):
    """Bytes of scales and offsets before the columns of a row."""
    if TYPE == INT8:
        if GROUP == 0:
            return dim * 0 + 8
        else:
            return (dim + (GROUP - 1)) // GROUP * 8
    elif TYPE == INT4:
        return dim * 0 + 8
    else:
        return dim * 0


@triton.jit
def row_bytes(dim, TYPE: tl.constexpr, GROUP: tl.constexpr):
    if TYPE == INT8:
        return header_bytes(dim, TYPE, GROUP) + (dim + 3) // 4 * 4
    elif TYPE == INT4:
        return header_bytes(dim, TYPE, GROUP) + (dim + 7) // 8 * 4
    elif TYPE == FP32:
        return dim * 4
    else:
        tl.static_assert(TYPE == FP16 or TYPE == BF16, "a row type without kernels")
        return dim * 2


@triton.jit
def read_row(row, columns, mask, dim, TYPE: tl.constexpr, GROUP: tl.constexpr):
    """The row at a byte address, or one row for each address, as floats."""
    if TYPE == FP32:
        return tl.load(row.to(tl.pointer_type(tl.float32)) + columns, mask=mask)
    elif TYPE == FP16:
        return tl.load(row.to(tl.pointer_type(tl.float16)) + columns, mask=mask).to(tl.float32)
    elif TYPE == BF16:
        return tl.load(row.to(tl.pointer_type(tl.bfloat16)) + columns, mask=mask).to(tl.float32)
    else:
        if TYPE == INT4:
            both = tl.load(row + (columns // 2 + header_bytes(dim, TYPE, GROUP)), mask=mask)
            codes = (both >> (columns % 2 * 4).to(tl.uint8) & 15).to(tl.float32)
        else:
            codes = tl.load(row + (columns + header_bytes(dim, TYPE, GROUP)), mask=mask).to(tl.float32)
        scales = row.to(tl.pointer_type(tl.float32))
        if GROUP != 0:
            scales = scales + columns // GROUP * 2
            return codes * tl.load(scales, mask=mask) + tl.load(scales + 1, mask=mask)
        else:
            return codes * tl.load(scales) + tl.load(scales + 1)


@triton.jit
def mix(x):
    """The finalizer of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_bits(key, row, columns):
    """32 random bits for each column of a row of the whole table."""
    word = mix(key.to(tl.uint64, bitcast=True) + mix(row.to(tl.uint64)))
    x = columns.to(tl.uint32) * 0x9E3779B9 + word.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ (word >> 32).to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def write_codes(row, d, w, mask, noise, dim, GROUP: tl.constexpr, usable):
    """A row of int8: scale and offset of each group, then codes; NaN scales unless `usable`."""
    largest: tl.constexpr = 1e38
    scales = row.to(tl.pointer_type(tl.float32))
    first = dim * 0
    while first < dim:
        if GROUP != 0:
            here = mask & (d // GROUP == first // GROUP)
        else:
            here = mask
        # Plus zero: either of -0 and +0 could be the minimum, and their bits differ.
        low = tl.maximum(tl.minimum(tl.min(tl.where(here, w, float("inf")), 0), largest), -largest) + 0.0
        high = tl.maximum(tl.minimum(tl.max(tl.where(here, w, float("-inf")), 0), largest), -largest) + 0.0
        scale = (high - low) * 0.003921568859368563
        flat = scale < 1.1754943508222875e-38
        inverse = tl.where(flat, 0.0, tl.div_rn(1.0, tl.where(flat, 1.0, scale)))
        code = tl.minimum(tl.maximum((w - low) * inverse, 0.0), 255.0)
        fixed = (code * 4194304.0).to(tl.int32) + noise
        tl.store(row + (header_bytes(dim, INT8, GROUP) + d), (fixed >> 22).to(tl.uint8), mask=here)
        if GROUP != 0:
            group = first // GROUP
            first += GROUP
        else:
            group = first
            first += dim
        tl.store(scales + group * 2, tl.where(usable, tl.where(flat, 0.0, scale), float("nan")))
        tl.store(scales + group * 2 + 1, low)


@triton.jit
def write_row(row, d, w, mask, bits, dim, TYPE: tl.constexpr, GROUP: tl.constexpr):
    """Store a row, rounded by the random bits of its columns."""
    if TYPE == FP32:
        tl.store(row.to(tl.pointer_type(tl.float32)) + d, w, mask=mask)
    elif TYPE == FP16:
        w = tl.minimum(tl.maximum(w, -65504.0), 65504.0)
        noise = bits >> 19
        pattern = w.to(tl.uint32, bitcast=True)
        magnitude = pattern & 0x7FFFFFFF
        normal = ((magnitude + noise) >> 13) - (112 << 10)
        # Below 2^-14 halves are multiples of 2^-24.
        small = ((tl.abs(w) + noise.to(tl.float32) * 2.0**-37) * 2.0**24).to(tl.uint32)
        half = (pattern >> 16 & 0x8000) | tl.where(magnitude < 0x38800000, small, normal)
        tl.store(row.to(tl.pointer_type(tl.uint16)) + d, half.to(tl.uint16), mask=mask)
    elif TYPE == BF16:
        largest: tl.constexpr = 3.3895313892515355e38
        pattern = tl.minimum(tl.maximum(w, -largest), largest).to(tl.uint32, bitcast=True)
        tl.store(row.to(tl.pointer_type(tl.uint16)) + d, ((pattern + (bits >> 16)) >> 16).to(tl.uint16), mask=mask)
    else:
        write_codes(row, d, w, mask, (bits >> 10).to(tl.int32), dim, GROUP, True)
