"""Reference of 4-bit rows, see [Note: Four bits] in `_cpp/quantise.h`, and of the largest numbers of rows."""

import torch
from torch import Tensor

from rowwise.tables.ops.layout import RowFormat
from rowwise.tables.ops.reference.rowtype import MAX_INT8, read_rows
from rowwise.tables.ops.reference.sums import column_sum
from rowwise.tables.spec import RowType

LARGEST = 15.0
MOVES, IDLE = 12, 2


def pack4(rows: Tensor) -> Tensor:
    """Rows as 4-bit codes, rounded to nearest in the best range found; a row that is not finite gets a NaN step."""
    finite_N = (rows * 0 == 0).all(1)
    w_ND = torch.where(finite_N.unsqueeze(1), rows, 0.0)
    low_N, high_N = _best_range(w_ND)
    step_N, codes_ND = _codes(w_ND, low_N, high_N)
    header_NC = torch.stack([torch.where(finite_N, step_N, torch.nan), torch.where(finite_N, low_N, 0.0)], 1)
    wide_NP = torch.nn.functional.pad(codes_ND.to(torch.uint8), (0, -rows.shape[1] % 8))
    return torch.cat([header_NC.view(torch.uint8), wide_NP[:, 0::2] | wide_NP[:, 1::2] << 4], 1)


def unpack4(packed: Tensor, dim: int) -> Tensor:
    """Packed 4-bit rows as floats."""
    return read_rows(packed, RowFormat(RowType.INT4, dim, 0))


def keep_largest(rows: Tensor, kept: int) -> Tensor:
    """The numbers of each row that are largest in magnitude, then their columns in a byte each, in their order.

    Of equal numbers the first columns are kept; a NaN is larger than all numbers.
    """
    magnitude_ND = rows.view(torch.int32) & 0x7FFFFFFF
    columns_NK = magnitude_ND.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(dim=1).values
    return torch.cat([rows.gather(1, columns_NK).view(torch.uint8), columns_NK.to(torch.uint8)], 1)


def _best_range(w_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy search: move the end that leaves the smaller error inwards, until `IDLE` moves in a row do not help."""
    # Plus zero: either of -0 and +0 could be the minimum, and their bits differ.
    low_N, high_N = (x.clamp(-MAX_INT8, MAX_INT8) + 0.0 for x in w_ND.aminmax(dim=1))
    best = [low_N, high_N, _error(w_ND, low_N, high_N)]
    move_N = (high_N - low_N) * (torch.tensor(1.0, device=w_ND.device) / 50.0)
    idle_N = torch.where(_step(low_N, high_N) == 0, IDLE, 0)
    for _ in range(MOVES):
        above_N, below_N = _error(w_ND, low_N + move_N, high_N), _error(w_ND, low_N, high_N - move_N)
        up_N = above_N <= below_N
        low_N, high_N = torch.where(up_N, low_N + move_N, low_N), torch.where(up_N, high_N, high_N - move_N)
        candidate = low_N, high_N, torch.where(up_N, above_N, below_N)
        better_N = (idle_N < IDLE) & (candidate[2] < best[2])
        best = [torch.where(better_N, x, old) for x, old in zip(candidate, best, strict=True)]
        idle_N = torch.where(idle_N < IDLE, torch.where(better_N, 0, idle_N + 1), idle_N)
    return best[0], best[1]


def _error(w_ND: Tensor, low_N: Tensor, high_N: Tensor) -> Tensor:
    step_N, codes_ND = _codes(w_ND, low_N, high_N)
    return column_sum((codes_ND * step_N.unsqueeze(1) + low_N.unsqueeze(1) - w_ND) ** 2)


def _codes(w_ND: Tensor, low_N: Tensor, high_N: Tensor) -> tuple[Tensor, Tensor]:
    step_N = _step(low_N, high_N)
    inverse_N = torch.where(step_N == 0, 0.0, 1.0 / step_N)
    nearest_ND = ((w_ND - low_N.unsqueeze(1)) * inverse_N.unsqueeze(1)).clamp(0.0, LARGEST) + 0.5
    return step_N, nearest_ND.floor()


def _step(low_N: Tensor, high_N: Tensor) -> Tensor:
    step_N = (high_N - low_N) * (torch.tensor(1.0, device=low_N.device) / LARGEST)
    return torch.where(step_N >= 2.0**-126, step_N, 0.0)  # else all weights are (nearly) equal
