"""Kernels with a known flaw, which the budget of machine code has to find."""

import triton
import triton.language as tl

from parts.gpu_variants import Variant
from rowwise.tables.spec import RowType

FLAWS = ("divides", "roots", "exponent", "atomic", "sums", "unaligned")


@triton.jit
def flawed(x, out, n, BLOCK: tl.constexpr, DIVISOR: tl.constexpr, FLAW: tl.constexpr):
    d = tl.arange(0, BLOCK)
    n = tl.multiple_of(n, DIVISOR)
    a = tl.load(x + tl.program_id(0).to(tl.int64) * n + d, mask=d < n)
    if FLAW == 0:
        a = a / n
    elif FLAW == 1:
        a = tl.sqrt(a)
    elif FLAW == 2:
        a = tl.exp(a)
    elif FLAW == 3:
        tl.atomic_add(out + d, a)
    elif FLAW == 4:
        a = a * 0 + tl.sum(a, 0)
    tl.store(out + d, a)


def variant(flaw: str) -> Variant:
    constants = {"BLOCK": 128, "DIVISOR": 1 if flaw == "unaligned" else 16, "FLAW": FLAWS.index(flaw)}
    return Variant(flaw, flawed, constants | {"num_warps": 1, "enable_fp_fusion": False}, RowType.FP32, 128)
