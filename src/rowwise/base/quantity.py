"""Formats numbers with units: 1.23 M, 3.40 GB, 2 h 05 min, 0.8123; a dash for None, NaN and infinity.

A GB is 1e9 bytes. Functions of `float | None` are for HTML pages: three digits, and a narrow space before the unit.
Functions from `format_bytes` on are for terminals and messages: a plain space.
"""

import math
from collections.abc import Iterable
from typing import TypeGuard

SPACE = "\u202f"  # narrow no-break space
DASH = "\u2013"
PREFIXES = ("", "k", "M", "G", "T", "P", "E")
MAX_RANGES = 3  # ranges of ranks that are listed
LARGEST = 1e300  # larger values count as infinite, as differences of them overflow


def is_finite(value: float | None) -> TypeGuard[float]:
    """Whether a value is a number that a chart can draw."""
    return value is not None and abs(value) < LARGEST


def round_digits(value: float) -> float:
    """The number rounded to four significant digits, as measurements are stored."""
    return float(f"{value:.4g}")


def si_prefix(value: float) -> tuple[float, str]:
    """The power of 1,000 that leaves one to three digits before the point, and its SI prefix."""
    if not is_finite(value) or abs(value) < 1000:
        return 1.0, ""
    power = min(int(math.log10(abs(value) * (1 + 1e-12)) // 3), len(PREFIXES) - 1)
    return 1000.0**power, PREFIXES[power]


def pluralise(count: float, noun: str) -> str:
    return f"{count:,.0f} {noun}{'s' * (count != 1)}"


def format_count(value: float | None) -> str:
    """A count in whole numbers, from 100,000 on with an SI prefix."""
    if not is_finite(value):
        return DASH
    if abs(value) < 99_999.5:
        return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"
    return _format_scaled(value, "")


def format_size(value: float | None) -> str:
    if not is_finite(value):
        return DASH
    return f"{value:.3g}{SPACE}B" if abs(value) < 999.5 else _format_scaled(value, "B")


def _format_scaled(value: float, unit: str) -> str:
    scale, letter = si_prefix(float(f"{value:.3g}"))
    scaled = value / scale
    if abs(scaled) >= 999.5:  # beyond the last prefix
        return f"{scaled:.3g}{SPACE}{letter}{unit}"
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f}{SPACE}{letter}{unit}"


def format_duration(seconds: float | None) -> str:
    """A time in its two largest units: 2 h 05 min."""
    if not is_finite(seconds) or seconds < 0:
        return DASH
    if seconds < 1:
        return f"{seconds * 1000:.3g}{SPACE}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}{SPACE}s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes}{SPACE}min {round(seconds) % 60:02}{SPACE}s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60}{SPACE}h {minutes % 60:02}{SPACE}min"
    hours = round(seconds / 3600)
    return f"{format_count(hours // 24)}{SPACE}d {hours % 24:02}{SPACE}h"


def format_percent(value: float | None) -> str:
    """A fraction as percent: 0.125 is 12.5 %."""
    if not is_finite(value):
        return DASH
    return f"{100 * value:.1f}{SPACE}%"


def format_metric(value: float | None) -> str:
    """A metric, with four decimals below 10 and fewer above."""
    if not is_finite(value):
        return DASH
    if abs(value) >= 1e5:
        return format_count(value)
    if abs(value) >= 10:
        return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.1f}"
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"


def format_short(value: float | None) -> str:
    """Four significant digits without trailing zeros, such as 0.001 for a learning rate."""
    if not is_finite(value):
        return DASH
    return f"{value:.4g}"


def format_bytes(size: float) -> str:
    scale, letter = si_prefix(round_digits(size))
    return f"{size / scale:,.1f} {letter}B" if letter else f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """The time of a step, in s or ms."""
    if abs(seconds) >= 1:
        return f"{seconds:,.2f} s"
    value = seconds * 1000
    return f"{value:.{3 if abs(value) < 0.1 else 2 if abs(value) < 9.995 else 1}f} ms"


def format_change(seconds: float) -> str:
    """A difference of times with its sign; 'no change' if it rounds to 0."""
    text = format_seconds(abs(seconds))
    if not any(digit in text for digit in "123456789"):
        return "no change"
    return f"{'-' if seconds < 0 else '+'}{text}"


def format_rows(rows: float) -> str:
    """A number of rows in whole numbers, from 10 million on with an SI prefix."""
    scale, letter = si_prefix(rows / 10)
    return f"{rows / scale:,.0f} {letter}" if scale >= 1e6 else f"{rows:,.0f}"


def format_ranks(ranks: Iterable[int]) -> str:
    """A list of ranks with ranges: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    left = sum(b - a + 1 for a, b in runs[MAX_RANGES:])
    return ", ".join(texts[:MAX_RANGES]) + (f" and {left} more" if left else "")
