"""Sums of floats with the same bits in any order and over any number of ranks (fixed-point accumulation).

Each number is split into three parts: multiples of 2^-12, 2^-44 and 2^-76. Parts add exactly, for up to two million
numbers; then `carry` moves multiples of 2^32 to the next larger part, so that equal sums have equal parts. Known
limits: bits below 2^-76 are dropped, and sums above 2^41 depend on the order.
"""

from collections import deque

import torch
from torch import Tensor

from rowwise.train.state import check_equal, check_positive, merge_newest

PARTS = 3
UNITS = (2.0**-12, 2.0**-44, 2.0**-76)
CARRY = 2.0**32


def parts_of(numbers: Tensor) -> Tensor:
    """The parts [3, ...] of float64 numbers."""
    parts: list[Tensor] = []
    rest = numbers
    for unit in UNITS:
        multiple = (rest * (1 / unit)).floor_()
        parts.append(multiple)
        rest = torch.nan_to_num_(rest - multiple * unit)  # infinity - infinity is NaN; its rest is 0
    return torch.stack(parts)


def carry(parts: Tensor) -> Tensor:
    """The same sum with the second and third part below 2^32, which makes the parts unique."""
    first, second, third = parts.unbind()
    carried = (third / CARRY).floor()
    third, second = third - carried * CARRY, second + carried
    carried = (second / CARRY).floor()
    return torch.stack([first + carried, second - carried * CARRY, third])


def to_float64(parts: Tensor) -> Tensor:
    """The sum as float64."""
    first, second, third = (part * unit for part, unit in zip(parts.unbind(), UNITS, strict=True))
    return first + (second + third)


class RunSums:
    """Sums [3, S, K] of all batches together, and of each of the newest `window` batches.

    Windows of several ranks merge batch by batch, newest with newest, as these belong to the same step.
    """

    __slots__ = ("_newest", "all_3SK")

    def __init__(self, window: int, sums: int, tasks: int) -> None:
        self.all_3SK = torch.zeros(PARTS, sums, tasks, dtype=torch.float64)
        self._newest: deque[Tensor] = deque(maxlen=check_positive("batches", window))

    @property
    def window(self) -> int:
        return self._newest.maxlen or 0

    def add(self, parts_3SK: Tensor) -> None:
        """Count a batch by its sums."""
        # Not in place: saved states share these tensors.
        self.all_3SK = carry(self.all_3SK.to(parts_3SK.device) + parts_3SK)
        self._newest.append(parts_3SK)

    def merge(self, other: "RunSums") -> None:
        check_equal("batches", self.window, other.window)
        self.all_3SK = carry(self.all_3SK + other.all_3SK.to(self.all_3SK.device))
        merged = merge_newest(list(self._newest), list(other._newest), lambda a, b: carry(a + b.to(a.device)))
        self._newest = deque(merged, maxlen=self.window)

    def restore(self, all_3SK: Tensor, newest_B3SK: Tensor) -> None:
        """Continue from saved sums."""
        self.all_3SK = all_3SK
        self._newest.extend(newest_B3SK)

    def newest(self) -> Tensor:
        """The sums of each of the newest batches, [B, 3, S, K]."""
        if not self._newest:
            return self.all_3SK.new_zeros(0, *self.all_3SK.shape)
        device = self._newest[-1].device  # a resumed window is on the CPU until its first new batch
        return torch.stack([parts_3SK.to(device) for parts_3SK in self._newest])

    def recent(self) -> Tensor:
        """The sums of the newest batches together, [3, S, K]."""
        return carry(self.newest().sum(0))
