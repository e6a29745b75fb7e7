"""Sums of floats that are the same bits in any order, however many ranks have added up a part.

Each number is cut into three parts on fixed scales, whole multiples of 2^-12, 2^-44 and 2^-76. Sums of parts are exact
up to two million numbers at a time; then what is 2^32 or more is carried, so that equal sums are held by equal parts.
Known limits: what is below 2^-76 in each number, and the order's freedom where a sum passes 2^41.
"""

import torch
from torch import Tensor

PARTS = 3
UNITS = (2.0**-12, 2.0**-44, 2.0**-76)
CARRY = 2.0**32


def parts_of(numbers: Tensor) -> Tensor:
    """Each number of float64 as its parts, [3, ...]."""
    found: list[Tensor] = []
    rest = numbers
    for unit in UNITS:
        whole = (rest * (1 / unit)).floor_()
        found.append(whole)
        rest = torch.nan_to_num_(rest - whole * unit)  # of an infinite number nothing is left
    return torch.stack(found)


def carry(parts: Tensor) -> Tensor:
    """The same sum as limbs, all but the first of them below 2^32."""
    first, second, third = parts.unbind()
    more = (third / CARRY).floor()
    third, second = third - more * CARRY, second + more
    more = (second / CARRY).floor()
    return torch.stack([first + more, second - more * CARRY, third])


def to_float64(parts: Tensor) -> Tensor:
    """The sum as float64."""
    first, second, third = (part * unit for part, unit in zip(parts.unbind(), UNITS, strict=True))
    return first + (second + third)
