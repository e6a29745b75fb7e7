"""Allocates one budget of bytes to tables: chooses a method and size for each, so that the sum of losses is least.

This is a multiple-choice knapsack, solved exactly table by table: the Pareto frontier of (bytes, loss) of the tables so
far is combined with the options of the next one. A frontier that grows too large is thinned; `Allocation.error`
bounds the loss that this adds. A larger size may have a larger measured loss; then the smaller size is chosen.

Known limit: losses are added, although each was measured with the other tables uncompressed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.base.value import Value

FULL = ""  # the method of an uncompressed table
STEPS_BETWEEN = 15  # interpolated sizes between two measured ones
MAX_POINTS = 4096  # points of a frontier


class SizeOption(Value, frozen=True):
    """A method and size for a table, and the increase of the model's loss."""

    method: str
    size_bytes: int
    loss: float
    measured: bool = True  # False: interpolated between two measured sizes


class Allocation(Value, frozen=True):
    """The method and size of each table."""

    chosen: dict[str, SizeOption]
    size_bytes: int  # of all tables
    loss: float
    error: float  # an upper bound on the loss above the best choice's; 0: this is the best choice


Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Frontier:
    """The Pareto frontier of several tables: points of rising total bytes and falling total loss."""

    bytes_S: Ints
    loss_S: Doubles
    previous_S: Ints  # index of the point of the tables before the last one
    option_S: Ints  # index of the last table's option


def interpolate_sizes(points: Sequence[SizeOption], count: int = STEPS_BETWEEN) -> tuple[SizeOption, ...]:
    """The measured sizes of one method, and sizes between them whose loss is linear in the logarithm of bytes."""
    options = list(points[:1])
    for low, high in pairwise(points):
        for step in range(1, count + 1):
            fraction = step / (count + 1)
            size_bytes = int(low.size_bytes ** (1 - fraction) * high.size_bytes**fraction)
            if options[-1].size_bytes < size_bytes < high.size_bytes:
                fraction = math.log(size_bytes / low.size_bytes) / math.log(high.size_bytes / low.size_bytes)
                loss = low.loss + fraction * (high.loss - low.loss)
                options.append(SizeOption(method=low.method, size_bytes=size_bytes, loss=loss, measured=False))
        options.append(high)
    return tuple(options)


def list_options(measured: Sequence[SizeOption], full_bytes: int) -> tuple[SizeOption, ...]:
    """All options of a table: uncompressed without loss, and each method at measured and interpolated sizes."""
    options = [SizeOption(method=FULL, size_bytes=full_bytes, loss=0.0)]
    for _, points in groupby(sorted(measured, key=lambda point: point.method), key=lambda point: point.method):
        options += interpolate_sizes(sorted(points, key=lambda point: point.size_bytes))
    return tuple(option for option in options if option.size_bytes < full_bytes or option.method == FULL)


def allocate(
    tables: Mapping[str, Sequence[SizeOption]], budget_bytes: int, kept_bytes: int = 0, max_points: int = MAX_POINTS
) -> Allocation:
    """The options of least total loss that fit the budget, one for each table.

    Args:
        tables: the options of each table; of options with equal bytes and loss the first is chosen.
        budget_bytes: bytes of all tables, `kept_bytes` included.
        kept_bytes: the bytes of tables that are not compressed.
        max_points: the size to which each frontier is thinned.
    """
    min_bytes = kept_bytes + sum(min(option.size_bytes for option in options) for options in tables.values())
    if min_bytes > budget_bytes:
        raise SpecError(
            f"a budget of {budget_bytes:,} bytes for tables that take at least {min_bytes:,}, {kept_bytes:,} of them "
            "in tables that are not compressed",
            f"at least {min_bytes:,}",
        )
    zero = np.zeros(1, np.int64)
    frontiers = [_Frontier(zero + kept_bytes, np.zeros(1), zero, zero)]
    error = 0.0
    for options in tables.values():
        frontier, thinning_error = _thin(_add_table(frontiers[-1], options, budget_bytes), max_points)
        frontiers.append(frontier)
        error += thinning_error
    # The last point has the least loss; follow its choices back from the last table to the first.
    point = len(frontiers[-1].loss_S) - 1
    chosen: dict[str, SizeOption] = {}
    for frontier, (name, options) in zip(reversed(frontiers[1:]), reversed(list(tables.items())), strict=True):
        chosen[name] = options[int(frontier.option_S[point])]
        point = int(frontier.previous_S[point])
    chosen = {name: chosen[name] for name in tables}
    return Allocation(
        chosen=chosen,
        size_bytes=kept_bytes + sum(option.size_bytes for option in chosen.values()),
        loss=sum(option.loss for option in chosen.values()),
        error=error,
    )


def _add_table(frontier: _Frontier, options: Sequence[SizeOption], budget_bytes: int) -> _Frontier:
    """The frontier of all pairs of a point and an option that fit the budget."""
    size_O = np.array([option.size_bytes for option in options], np.int64)
    loss_O = np.array([option.loss for option in options])
    bytes_SO, loss_SO = frontier.bytes_S[:, None] + size_O, frontier.loss_S[:, None] + loss_O
    point_P, option_P = np.nonzero(bytes_SO <= budget_bytes)
    bytes_P, loss_P = bytes_SO[point_P, option_P], loss_SO[point_P, option_P]
    by_bytes_P = np.lexsort((option_P, loss_P, bytes_P))
    loss_P = loss_P[by_bytes_P]
    # A pair is on the frontier if its loss is below that of all pairs with fewer bytes.
    lowest_P = np.minimum.accumulate(loss_P)
    is_best_P = np.ones(len(loss_P), np.bool_)
    is_best_P[1:] = loss_P[1:] < lowest_P[:-1]
    pair_S = by_bytes_P[is_best_P]
    return _Frontier(bytes_P[pair_S], loss_P[is_best_P], point_P[pair_S], option_P[pair_S])


def _thin(frontier: _Frontier, max_points: int) -> tuple[_Frontier, float]:
    """The frontier with about `max_points` points, and a bound on the loss that this adds."""
    loss_S = frontier.loss_S
    if len(loss_S) <= max_points:
        return frontier, 0.0
    # The range of losses is cut into steps, and the point of fewest bytes in each is kept: each dropped point has a
    # kept one with fewer bytes and at most one step more loss.
    step = float(loss_S[0] - loss_S[-1]) / (max_points - 1)
    level_S = np.floor((loss_S[0] - loss_S) / step)
    is_first_S = np.ones(len(loss_S), np.bool_)
    is_first_S[1:] = level_S[1:] > level_S[:-1]
    kept = np.flatnonzero(is_first_S)
    bytes_S, loss_S, previous_S = frontier.bytes_S[kept], loss_S[kept], frontier.previous_S[kept]
    return _Frontier(bytes_S, loss_S, previous_S, frontier.option_S[kept]), step
