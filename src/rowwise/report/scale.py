"""Ticks, linear scales, and thinning of long series that keeps extremes.

Ticks are integer multiples of 1, 2 or 5 times a power of ten, so they print exactly.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rowwise.base.quantity import SPACE, is_finite, si_prefix

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A linear map of values low..high to coordinates begin..end."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The coordinate of a value, clamped to the scale."""
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.begin + part * (self.end - self.begin)


def positive(value: float) -> float:
    """The value; 0 if it is negative or not finite."""
    return value if is_finite(value) and value > 0 else 0.0


def widen_range(low: float, high: float) -> tuple[float, float]:
    """The range, widened if it is too small for distinct ticks."""
    size = max(abs(low), abs(high))
    if size < 1e-290:
        return 0.0, 1.0
    if high - low > 1e-9 * size:
        return low, high
    return low - 0.05 * size, high + 0.05 * size


def ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Evenly spaced round numbers that cover low..high, in about `count` steps."""
    low, high = widen_range(low, high)
    mantissa, exponent = _choose_step((high - low) / count)
    # Integer multiples of the step, by integer arithmetic: 0.1 * 3 would print as 0.30000000000000004.
    step = mantissa * 10.0**exponent
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    up, down = 10 ** max(exponent, 0), 10 ** max(-exponent, 0)
    return tuple(k * mantissa * up / down for k in range(first, last + 1))


def _choose_step(least: float) -> tuple[int, int]:
    """The smallest 1, 2 or 5 times a power of ten of at least `least`, as (mantissa, exponent)."""
    exponent = math.floor(math.log10(least))
    for mantissa in (1, 2, 5):
        if mantissa * 10.0**exponent >= least * (1 - 1e-9):
            return mantissa, exponent
    return 1, exponent + 1


def ticks_inside(low: float, high: float, count: int = 7) -> tuple[float, ...]:
    """The ticks of `ticks` that are inside the range."""
    slack = 1e-9 * (high - low)
    return tuple(t for t in ticks(low, high, count) if low - slack <= t <= high + slack)


def tick_labels(values: Sequence[float], unit: str = "") -> tuple[str, ...]:
    """Labels with common decimals and unit prefix."""
    largest = max((abs(v) for v in values), default=0.0)
    scale, letter = si_prefix(largest) if largest >= 10_000 or unit == "B" else (1.0, "")
    step = min((b - a for a, b in itertools.pairwise(values)), default=largest or 1.0) / scale
    ending = f"{SPACE}{letter}{unit}" if letter or unit else ""
    if step < 1e-6 or largest / scale >= 1e6:
        return tuple(f"{v / scale:.4g}{ending if v else ''}" for v in values)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return tuple(f"{v / scale:,.{decimals}f}{ending}" if v or unit == "%" else "0" for v in values)


def thin_points(points: Sequence[Point], limit: int = 480) -> tuple[Point, ...]:
    """At most `limit` points: the ends, and each bin's lowest and highest. A bin of NaNs stays a gap."""
    if len(points) <= limit:
        return tuple(points)
    thinned = [points[0]]
    bins = (limit - 2) // 2
    middle = len(points) - 2
    for k in range(bins):
        part = points[1 + middle * k // bins : 1 + middle * (k + 1) // bins]
        known = [p for p in part if is_finite(p[1])]
        if not known:
            thinned.append(part[0])
            continue
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])}
        thinned.extend(sorted(ends))
    return (*thinned, points[-1])


def bin_means(points: Sequence[Point], limit: int = 120) -> tuple[Point, ...]:
    """The means of up to `limit` bins, at their mean x; a bin of NaNs stays a gap."""
    bins = min(limit, max(1, len(points) // 4))
    means = []
    for k in range(bins):
        part = points[len(points) * k // bins : len(points) * (k + 1) // bins]
        known = [y for _, y in part if is_finite(y)]
        x = sum(x for x, _ in part) / len(part)
        means.append((x, sum(y / len(known) for y in known) if known else math.nan))
    return tuple(means)
