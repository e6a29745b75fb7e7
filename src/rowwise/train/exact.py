"""Sums of floats with the same bits in any order and over any number of ranks (fixed-point accumulation).

Each number is split into three parts: multiples of 2^-12, 2^-44 and 2^-76. Parts add exactly, for up to two million
numbers; then `carry` moves what is 2^32 or more to the next larger part, so that equal sums have equal parts. Known
limits: bits below 2^-76 are dropped, and sums above 2^41 depend on the order.
"""

import torch
from torch import Tensor

PARTS = 3
UNITS = (2.0**-12, 2.0**-44, 2.0**-76)
CARRY = 2.0**32


def parts_of(numbers: Tensor) -> Tensor:
    """The parts [3, ...] of float64 numbers."""
    parts: list[Tensor] = []
    rest = numbers
    for unit in UNITS:
        whole = (rest * (1 / unit)).floor_()
        parts.append(whole)
        rest = torch.nan_to_num_(rest - whole * unit)  # infinity less infinity is NaN; its rest is 0
    return torch.stack(parts)


def carry(parts: Tensor) -> Tensor:
    """The same sum with the second and third part below 2^32, which makes the parts unique."""
    first, second, third = parts.unbind()
    more = (third / CARRY).floor()
    third, second = third - more * CARRY, second + more
    more = (second / CARRY).floor()
    return torch.stack([first + more, second - more * CARRY, third])


def to_float64(parts: Tensor) -> Tensor:
    """The sum as float64."""
    first, second, third = (part * unit for part, unit in zip(parts.unbind(), UNITS, strict=True))
    return first + (second + third)
