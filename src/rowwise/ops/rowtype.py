"""Rows as they are stored and as they are sent: float32 rows packed into a row type, to the nearest, and back.

Updates do not come through here: they round stochastically, inside the kernels. See [Note: Row formats] in
`_cpp/tables.h`.
"""

import torch
from torch import Tensor

from rowwise.spec import RowType


def dtype_of(row_type: RowType) -> torch.dtype:
    """What the numbers of a row are."""
    return getattr(torch, row_type.facts.numbers)


def pack(rows_ND: Tensor, row_type: RowType, column_group: int | None = None) -> Tensor:
    """Rows in another type: [N, D], or for int8 the bytes of each row, its scales first.

    Weights past the range of fp16 become infinite, as everywhere in torch; an int8 row with a weight that is not
    finite comes back as NaN. Neither passes in silence where a loss is computed.
    """
    if row_type is RowType.INT8:
        return torch.ops.rowwise.pack(rows_ND.float().contiguous(), column_group or 0)
    assert not row_type.facts.scaled, row_type
    return rows_ND.to(dtype_of(row_type))


def unpack(packed_NP: Tensor, dim: int, row_type: RowType, column_group: int | None = None) -> Tensor:
    """What `pack` made, as float32 [N, dim]."""
    if row_type is RowType.INT8:
        return torch.ops.rowwise.unpack(packed_NP.contiguous(), dim, column_group or 0)
    assert not row_type.facts.scaled, row_type
    return packed_NP.float()
