"""One budget of bytes, shared out among tables: for each a size that was measured, so that the sum of losses is least.

Pure: it knows of tables only what each option takes and loses. The choice is exact: all sums of options that no other
beats in both bytes and loss are kept, table by table (a multiple-choice knapsack). Where there are too many sums, those
are dropped that lose hardly less than one with fewer bytes, and the answer says how much that can have cost.

A method may lose more with more bytes, by chance or for good: then a smaller size is the better choice, and is taken.

Known limits: what tables do to each other: a loss was measured with the other tables as they were, and losses are
added.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.value import Value

FULL = ""  # the method of a table that stays as it is
BETWEEN = 15  # sizes between two that were measured
MOST_SUMS = 4096


class SizeOption(Value, frozen=True):
    """A size of a table, and how much worse the model is with it."""

    method: str
    size_bytes: int
    loss: float
    measured: bool = True  # or lies between two that were


class Allocation(Value, frozen=True):
    """The method and size that each table is given."""

    chosen: dict[str, SizeOption]
    size_bytes: int  # of all tables
    loss: float
    error: float  # by which another choice could have less loss at most; 0: none has


Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Frontier:
    """The sizes that some tables can take together, by rising bytes and falling loss, and the choices behind each."""

    bytes_S: Ints
    loss_S: Doubles
    before_S: Ints  # the place among the sums of the tables before
    option_S: Ints  # of the last table


def sums_between(points: Sequence[SizeOption], count: int = BETWEEN) -> tuple[SizeOption, ...]:
    """The options of one method and others between neighbours, on straight lines over the logarithm of bytes."""
    made = list(points[:1])
    for low, high in pairwise(points):
        for step in range(1, count + 1):
            part = step / (count + 1)
            size_bytes = int(low.size_bytes ** (1 - part) * high.size_bytes**part)
            if made[-1].size_bytes < size_bytes < high.size_bytes:
                part = math.log(size_bytes / low.size_bytes) / math.log(high.size_bytes / low.size_bytes)
                loss = low.loss + part * (high.loss - low.loss)
                made.append(SizeOption(method=low.method, size_bytes=size_bytes, loss=loss, measured=False))
        made.append(high)
    return tuple(made)


def options_of(measured: Sequence[SizeOption], full_bytes: int) -> tuple[SizeOption, ...]:
    """All that a table can be: as it is, at no loss, or by any method in any size that is known of."""
    ordered = sorted(measured, key=lambda one: one.method)
    made = [SizeOption(method=FULL, size_bytes=full_bytes, loss=0.0)]
    for _, points in groupby(ordered, key=lambda one: one.method):
        made += sums_between(sorted(points, key=lambda one: one.size_bytes))
    return tuple(one for one in made if one.size_bytes < full_bytes or one.method == FULL)


def allocate(
    tables: Mapping[str, Sequence[SizeOption]], budget_bytes: int, left_bytes: int = 0, most: int = MOST_SUMS
) -> Allocation:
    """The options with the least loss that fit, one for each table.

    Args:
        tables: the options of each; of those that are alike in bytes and loss the first is taken.
        budget_bytes: for all tables together.
        left_bytes: of tables that stay as they are, which count as well.
        most: sums that are kept after each table.
    """
    least = left_bytes + sum(min(option.size_bytes for option in options) for options in tables.values())
    if least > budget_bytes:
        got = f"a budget of {budget_bytes:,} bytes for tables that take at least {least:,}"
        raise SpecError(f"{got}, {left_bytes:,} of them in tables that are not compressed: want at least {least:,}")
    zero = np.zeros(1, np.int64)
    steps = [_Frontier(zero + left_bytes, np.zeros(1), zero, zero)]
    error = 0.0
    for options in tables.values():
        sums, lost = _thin(_merge(steps[-1], options, budget_bytes), most)
        steps.append(sums)
        error += lost
    at = len(steps[-1].loss_S) - 1  # they fall
    chosen: dict[str, SizeOption] = {}
    for sums, (name, options) in zip(reversed(steps[1:]), reversed(list(tables.items())), strict=True):
        chosen[name] = options[int(sums.option_S[at])]
        at = int(sums.before_S[at])
    in_order = {name: chosen[name] for name in tables}
    return Allocation(
        chosen=in_order,
        size_bytes=left_bytes + sum(option.size_bytes for option in in_order.values()),
        loss=sum(option.loss for option in in_order.values()),
        error=error,
    )


def _merge(sums: _Frontier, options: Sequence[SizeOption], budget_bytes: int) -> _Frontier:
    """Every sum with every option that fits, without those that another beats."""
    size_O = np.array([option.size_bytes for option in options], np.int64)
    loss_O = np.array([option.loss for option in options])
    bytes_SO, loss_SO = sums.bytes_S[:, None] + size_O, sums.loss_S[:, None] + loss_O
    before_P, option_P = np.nonzero(bytes_SO <= budget_bytes)
    bytes_P, loss_P = bytes_SO[before_P, option_P], loss_SO[before_P, option_P]
    order_P = np.lexsort((option_P, loss_P, bytes_P))
    loss_P = loss_P[order_P]
    lowest_P = np.minimum.accumulate(loss_P)
    kept_P = np.ones(len(loss_P), np.bool_)
    kept_P[1:] = loss_P[1:] < lowest_P[:-1]
    at_S = order_P[kept_P]
    return _Frontier(bytes_P[at_S], loss_P[kept_P], before_P[at_S], option_P[at_S])


def _thin(sums: _Frontier, most: int) -> tuple[_Frontier, float]:
    """About `count` of the sums, chosen so that each stands for others that lose hardly more."""
    loss_S = sums.loss_S
    if len(loss_S) <= most:
        return sums, 0.0
    # Each that is dropped has one before it, of fewer bytes, that loses at most a step more.
    step = float(loss_S[0] - loss_S[-1]) / (most - 1)
    level_S = np.floor((loss_S[0] - loss_S) / step)
    first_S = np.ones(len(loss_S), np.bool_)
    first_S[1:] = level_S[1:] > level_S[:-1]
    kept = np.flatnonzero(first_S)
    return _Frontier(sums.bytes_S[kept], loss_S[kept], sums.before_S[kept], sums.option_S[kept]), step
