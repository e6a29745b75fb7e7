"""Weights rounded to 8 or 4 bits a column for what is written down: a checkpoint, never the tables that are trained.

Uniform steps between the ends of each row, which the row begins with as two floats. 8 bits are the int8 rows of
`rowtype`, so whoever reads those reads these; at 4 bits the ends are searched for, see [Note: Four bits] in
`_cpp/quantise.h`. The two floats stay 32 bits wide: in 16 they would save four bytes a row and cost up to 7 % of
squared error at 8 bits (rows far from zero), and rows of very small or large weights would not fit at all. A row that
is not finite has no range: it raises, as a checkpoint must not invent numbers. Optimizer state does not come through
here: a second moment that is rounded to its row's least, often zero, makes the next step of its weight enormous.
"""

import torch
from torch import Tensor

from rowwise.errors import StateError
from rowwise.ops import rowtype
from rowwise.spec import Bits, RowType

LARGEST = 1e38  # larger weights have no range in 32 bits


def quantise(rows_ND: Tensor, bits: Bits, what: str, numbers_N: Tensor | range) -> Tensor:
    """Floats of any width as bytes [N, P]; `what` they are, and the numbers of the rows, are for the message."""
    rows_ND = rows_ND.float().contiguous()
    _check(rows_ND, what, numbers_N)
    if bits == 8:
        return rowtype.pack(rows_ND, RowType.INT8)
    return torch.ops.rowwise.pack4(rows_ND)


def dequantise(packed_NP: Tensor, dim: int, bits: Bits) -> Tensor:
    """What `quantise` made, as float32 [N, dim]."""
    if bits == 8:
        return rowtype.unpack(packed_NP, dim, RowType.INT8)
    return torch.ops.rowwise.unpack4(packed_NP.contiguous(), dim)


def _check(rows_ND: Tensor, what: str, numbers_N: Tensor | range) -> None:
    if not rows_ND.numel():
        return
    low, high = (float(x) for x in rows_ND.aminmax())
    if low >= -LARGEST and high <= LARGEST:
        return
    bad = int((~(rows_ND.abs() <= LARGEST)).any(1).nonzero()[0])
    got = next(x for x in rows_ND[bad].tolist() if not abs(x) <= LARGEST)
    raise StateError(
        f"{what}: row {int(numbers_N[bad])} holds {got}, which cannot be rounded to fewer bits: "
        f"save with 32 bits, which keeps such rows as they are, and find out where it came from"
    )
