"""From values to places: nice ticks, linear scales, and long series thinned so that their extremes stay.

Pure arithmetic. Ticks step by 1, 2 or 5 times a power of ten, in whole multiples, so they print as they are.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rowwise.quantity import SPACE, prefix, usable

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values from `low` to `high` lie from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The place of a value; what lies outside is at the edge."""
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.begin + part * (self.end - self.begin)


def widen_range(low: float, high: float) -> tuple[float, float]:
    """The range, or one around it in which ticks can be told apart."""
    size = max(abs(low), abs(high))
    if size < 1e-290:
        return 0.0, 1.0
    if high - low > 1e-9 * size:
        return low, high
    return low - 0.05 * size, high + 0.05 * size


def ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Round numbers at equal distances, the first at or below `low`, the last at or above `high`."""
    low, high = widen_range(low, high)
    mantissa, exponent = _step((high - low) / most)
    # Whole multiples of the step, by integers: 0.1 * 3 would print as 0.30000000000000004.
    step = mantissa * 10.0**exponent
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    up, down = 10 ** max(exponent, 0), 10 ** max(-exponent, 0)
    return tuple(k * mantissa * up / down for k in range(first, last + 1))


def _step(least: float) -> tuple[int, int]:
    """The smallest of 1, 2, 5 times a power of ten that is not less, as (mantissa, exponent)."""
    exponent = math.floor(math.log10(least))
    for mantissa in (1, 2, 5):
        if mantissa * 10.0**exponent >= least * (1 - 1e-9):
            return mantissa, exponent
    return 1, exponent + 1


def inside(low: float, high: float, most: int = 7) -> tuple[float, ...]:
    """Those nice numbers that lie in the range."""
    slack = 1e-9 * (high - low)
    return tuple(t for t in ticks(low, high, most) if low - slack <= t <= high + slack)


def tick_labels(values: Sequence[float], unit: str = "") -> tuple[str, ...]:
    """Labels that share their decimals and their prefix."""
    largest = max((abs(v) for v in values), default=0.0)
    scale, letter = prefix(largest) if largest >= 10_000 or unit == "B" else (1.0, "")
    step = min((b - a for a, b in itertools.pairwise(values)), default=largest or 1.0) / scale
    ending = f"{SPACE}{letter}{unit}" if letter or unit else ""
    if step < 1e-6 or largest / scale >= 1e6:
        return tuple(f"{v / scale:.4g}{ending if v else ''}" for v in values)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return tuple(f"{v / scale:,.{decimals}f}{ending}" if v or unit == "%" else "0" for v in values)


def thin_points(points: Sequence[Point], most: int = 480) -> tuple[Point, ...]:
    """At most so many points: the ends, and the lowest and highest of each stretch. A stretch of NaNs stays a gap."""
    if len(points) <= most:
        return tuple(points)
    kept = [points[0]]
    stretches = (most - 2) // 2
    middle = len(points) - 2
    for k in range(stretches):
        part = points[1 + middle * k // stretches : 1 + middle * (k + 1) // stretches]
        known = [p for p in part if usable(p[1])]
        if not known:
            kept.append(part[0])
            continue
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return (*kept, points[-1])


def means(points: Sequence[Point], most: int = 120) -> tuple[Point, ...]:
    """The mean of each of so many stretches, in its middle; a stretch of NaNs stays a gap."""
    stretches = min(most, max(1, len(points) // 4))
    made = []
    for k in range(stretches):
        part = points[len(points) * k // stretches : len(points) * (k + 1) // stretches]
        known = [y for _, y in part if usable(y)]
        x = sum(x for x, _ in part) / len(part)
        made.append((x, sum(y / len(known) for y in known) if known else math.nan))
    return tuple(made)
