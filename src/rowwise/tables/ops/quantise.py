"""Quantises weights to 8 or 4 bits per column for checkpoints; tables in training never are.

Each row has uniform steps between two float32 ends that it begins with. Rows are those of `rowtype`; at 4 bits the ends
are searched for ([Note: Four bits] in `_cpp/quantise.h`). 16-bit ends would save four bytes per row, cost up to 7 % of
squared error at 8 bits (rows far from zero), and could not represent very small or large weights. A row that is not
finite has no range, so it raises. Optimizer state is never quantised: a second moment that is rounded to its row's
least value, often zero, makes the next step of its weight enormous.
"""

from torch import Tensor

from rowwise.base.errors import StateError
from rowwise.tables.ops import rowtype
from rowwise.tables.spec import Bits, RowType

TYPE_OF_BITS: dict[Bits, RowType] = {8: RowType.INT8, 4: RowType.INT4}
LARGEST = 1e38  # high - low of larger weights overflows float32


def quantise(rows_ND: Tensor, bits: Bits, what: str, numbers_N: Tensor | range) -> Tensor:
    """Rows as bytes [N, P]; `what` names the tensor and `numbers_N` its rows in error messages."""
    rows_ND = rows_ND.float().contiguous()
    _check(rows_ND, what, numbers_N)
    return rowtype.pack(rows_ND, TYPE_OF_BITS[bits])


def dequantise(packed_NP: Tensor, dim: int, bits: Bits) -> Tensor:
    """Quantised rows as float32 [N, dim]."""
    return rowtype.unpack(packed_NP, dim, TYPE_OF_BITS[bits])


def _check(rows_ND: Tensor, what: str, numbers_N: Tensor | range) -> None:
    if not rows_ND.numel():
        return
    low, high = (float(x) for x in rows_ND.aminmax())
    if low >= -LARGEST and high <= LARGEST:
        return
    bad = int((~(rows_ND.abs() <= LARGEST)).any(1).nonzero()[0])
    got = next(x for x in rows_ND[bad].tolist() if not abs(x) <= LARGEST)
    raise StateError(
        f"{what}: row {int(numbers_N[bad])} holds {got}, which cannot be quantised",
        hint="save with 32 bits, and find out where it came from",
    )
