"""Converts float32 rows to a row type, rounding to nearest, and back.

Used for initial rows, rows of a state dict and rows sent between ranks. Updates round stochastically, inside the
kernels. See [Note: Row formats] in `_cpp/tables.h`.
"""

import torch
from torch import Tensor

from rowwise.tables.spec import RowType


def dtype_of(row_type: RowType) -> torch.dtype:
    """The torch dtype that rows are stored in; rows with scales are bytes."""
    return getattr(torch, row_type.facts.numbers)


def pack(rows_ND: Tensor, row_type: RowType, column_group: int | None = None) -> Tensor:
    """Rows in another type: [N, D], or for int8 and int4 the bytes of each row, its scales first.

    Weights past the range of fp16 become infinite, as in torch; a row of int8 or int4 with a weight that is not finite
    comes back as NaN.
    """
    if row_type is RowType.INT8:
        return torch.ops.rowwise.pack(rows_ND.float().contiguous(), column_group or 0)
    if row_type is RowType.INT4:
        return torch.ops.rowwise.pack4(rows_ND.float().contiguous())
    assert not row_type.facts.scaled, row_type
    return rows_ND.to(dtype_of(row_type))


def unpack(packed_NP: Tensor, dim: int, row_type: RowType, column_group: int | None = None) -> Tensor:
    """Packed rows as float32 [N, dim]."""
    if row_type is RowType.INT8:
        return torch.ops.rowwise.unpack(packed_NP.contiguous(), dim, column_group or 0)
    if row_type is RowType.INT4:
        return torch.ops.rowwise.unpack4(packed_NP.contiguous(), dim)
    assert not row_type.facts.scaled, row_type
    return packed_NP.float()
