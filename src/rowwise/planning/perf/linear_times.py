"""Seconds of linear layers by shape: measured on a grid, and interpolated between its points."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Floats
from rowwise.tables.spec import Value

Grid = tuple[tuple[tuple[float, ...], ...], ...]  # samples x inputs x outputs


class LinearSeconds(NamedTuple):
    """A layer's forward, and its backward by inputs and weights."""

    forward_s: float
    backward_s: float


class LinearTimes(Value, frozen=True):
    """Measured seconds of a linear layer with bias and ReLU, of one rank while all ranks compute."""

    samples: tuple[int, ...]  # sizes on each axis of the grid, ascending
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward_s: Grid
    backward_s: Grid

    def __post_init__(self) -> None:
        axes = (self.samples, self.inputs, self.outputs)
        for name, axis in zip(("samples", "inputs", "outputs"), axes, strict=True):
            _check_sizes(f"linears.{name}", axis)
        for name in ("forward_s", "backward_s"):
            rows = getattr(self, name)
            shape = {(len(rows), len(plane), len(line)) for plane in rows for line in plane}
            if shape != {tuple(map(len, axes))} or min(x for plane in rows for line in plane for x in line) <= 0:
                raise SpecError(f"linears.{name}", "seconds above 0 for each point of the grid")

    @property
    def flops(self) -> float:
        """Operations a second in the forward of the largest layer."""
        return 2.0 * self.samples[-1] * self.inputs[-1] * self.outputs[-1] / self.forward_s[-1][-1][-1]

    def of(self, samples: float, inputs: int, outputs: int) -> LinearSeconds:
        """Between points linear in logarithms; outside of the grid in proportion to the operations."""
        places = ((self.samples, samples), (self.inputs, inputs), (self.outputs, outputs))
        return LinearSeconds(*(_seconds_at(grid, places) for grid in (self.forward_s, self.backward_s)))


class SumTimes(Value, frozen=True):
    """Measured seconds of all-reduces of floats over the ranks of a host."""

    ranks: int
    sizes: tuple[int, ...]  # bytes, ascending
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_sizes("sums.sizes", self.sizes)
        if len(self.seconds) != len(self.sizes) or min(self.seconds) <= 0:
            raise SpecError(f"sums.seconds={self.seconds}", "seconds above 0 for each size")

    def of(self, size_bytes: float) -> float:
        """Between sizes linear in logarithms, beyond the largest in proportion to it."""
        return _seconds_at(self.seconds, ((self.sizes, size_bytes),))


def _check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise SpecError(f"{name}={sizes}", "ascending sizes of at least 1")


def _seconds_at(grid: Grid | tuple[float, ...], places: Iterable[tuple[Sequence[int], float]]) -> float:
    """Seconds at a size on each axis of a grid."""
    logs: Floats = np.log(np.array(grid, dtype=float))
    beyond = 1.0
    for axis, size in places:
        inside = min(max(size, axis[0]), axis[-1])
        beyond *= max(size / inside, 1.0)  # smaller layers take as long as the smallest, whose time is mostly overhead
        logs = _interpolate(logs, axis, inside)
    return float(np.exp(logs)) * beyond


def _interpolate(values: Floats, axis: Sequence[int], size: float) -> Floats:
    """The values at a size on their first axis."""
    if len(axis) == 1:
        return values[0]
    place = min(int(np.searchsorted(axis, size, side="right")) - 1, len(axis) - 2)
    low, high = np.log(axis[place]), np.log(axis[place + 1])
    share = (np.log(size) - low) / (high - low)
    return values[place] * (1 - share) + values[place + 1] * share
