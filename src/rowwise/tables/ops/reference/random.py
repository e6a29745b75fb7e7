"""Counter-based random numbers: each is a hash of a key and its position only."""

import torch
from torch import Tensor


def fill_uniform(out: Tensor, key: int, start: int, low: float, high: float) -> None:
    """out[i] is low + u * (high - low), u from a hash of (key, start + i) alone."""
    index = torch.arange(start + 1, start + 1 + out.numel(), dtype=torch.int64, device=out.device)
    _fill(out, index, key, low, high)


def fill_uniform_rows(out_UD: Tensor, starts_U: Tensor, key: int, low: float, high: float) -> None:
    """Fill each row as `fill_uniform` does, from its own start."""
    column_D = torch.arange(1, 1 + out_UD.shape[1], dtype=torch.int64, device=out_UD.device)
    _fill(out_UD, starts_U.unsqueeze(1) + column_D, key, low, high)


def _fill(out: Tensor, index: Tensor, key: int, low: float, high: float) -> None:
    # A float holds the upper 24 bits exactly, so the product and the sum of low + u * span round once each.
    bits = _shift(_mix(key + index * _signed(0x9E3779B97F4A7C15)), 40)
    low_, high_ = (torch.tensor(v, dtype=torch.float32, device=out.device) for v in (low, high))
    out.copy_(low_ + bits.float() * 2.0**-24 * (high_ - low_))


def row_bits(key: Tensor, rows_M: Tensor, columns: range) -> Tensor:
    """32 random bits for each row and column, as int64 [M, D]; the key holds table, seed and step."""
    # One strong hash for each row, then a cheap one for each column whose products have 32 bits.
    word_M = _mix(key.to(rows_M.device) + _mix(rows_M)).unsqueeze(1)
    column_D = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=rows_M.device)
    x = _low(column_D * 0x9E3779B9 + word_M)
    x = _low((x ^ (x >> 16)) * 0x7FEB352D)
    x = x ^ _shift(word_M, 32)
    x = _low((x ^ (x >> 15)) * 0x846CA68B)
    return x ^ (x >> 16)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 in int64, whose products wrap around as uint64's do; only the shifts differ."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _low(x: Tensor) -> Tensor:
    return x & 0xFFFFFFFF


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
