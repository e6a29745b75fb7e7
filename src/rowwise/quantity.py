"""Numbers as people write them: 1.23 M, 3.40 GB, 2 h 05 min, 0.8123. What is not a number is a dash.

Decimal, as memory is sold: a GB is 1e9. On pages numbers have three digits and narrow spaces; those in sentences, for
terminals and messages, begin with `of_` and have plain ones.
"""

import math
from collections.abc import Iterable

SPACE = "\u202f"  # narrow, and no line breaks at it
NONE = "\u2013"
PREFIXES = ("", "k", "M", "G", "T", "P", "E")
SHOWN = 3  # runs of ranks that are written out
LARGEST = 1e300  # larger ones are taken for infinite: their differences would be


def usable(value: float | None) -> bool:
    """Whether it can be drawn."""
    return value is not None and abs(value) < LARGEST


def prefix(value: float) -> tuple[float, str]:
    """The power of 1,000 that leaves one to three digits before the point, and its letter."""
    if not usable(value) or abs(value) < 1000:
        return 1.0, ""
    power = min(int(math.log10(abs(value) * (1 + 1e-12)) // 3), len(PREFIXES) - 1)
    return 1000.0**power, PREFIXES[power]


def count(value: float | None) -> str:
    if value is None or not usable(value):
        return NONE
    if abs(value) < 99_999.5:
        return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"
    return _scaled(value, "")


def size(value: float | None) -> str:
    if value is None or not usable(value):
        return NONE
    return f"{value:.3g}{SPACE}B" if abs(value) < 999.5 else _scaled(value, "B")


def _scaled(value: float, unit: str) -> str:
    scale, letter = prefix(float(f"{value:.3g}"))
    scaled = value / scale
    if abs(scaled) >= 999.5:  # beyond the last prefix
        return f"{scaled:.3g}{SPACE}{letter}{unit}"
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f}{SPACE}{letter}{unit}"


def duration(seconds: float | None) -> str:
    """Seconds, as the two largest units of time that they have."""
    if seconds is None or not usable(seconds) or seconds < 0:
        return NONE
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
    return f"{count(hours // 24)}{SPACE}d {hours % 24:02}{SPACE}h"


def share(value: float | None) -> str:
    """A part of one, in percent."""
    if value is None or not usable(value):
        return NONE
    return f"{100 * value:.1f}{SPACE}%"


def number(value: float | None) -> str:
    """A metric: four decimals, or four digits where that says more."""
    if value is None or not usable(value):
        return NONE
    if abs(value) >= 1e5:
        return count(value)
    if abs(value) >= 10:
        return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.1f}"
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"


def short(value: float | None) -> str:
    """A number without the zeros at its end: a level, a learning rate."""
    if value is None or not usable(value):
        return NONE
    return f"{value:.4g}"


def of_bytes(size: float) -> str:
    scale, letter = prefix(float(f"{size:.4g}"))
    return f"{size / scale:,.1f} {letter}B" if letter else f"{size:.0f} B"


def of_seconds(seconds: float) -> str:
    """Seconds of a step."""
    if abs(seconds) >= 1:
        return f"{seconds:,.2f} s"
    value = seconds * 1000
    return f"{value:.{3 if abs(value) < 0.1 else 2 if abs(value) < 9.995 else 1}f} ms"


def of_change(seconds: float) -> str:
    """Seconds more or less; what rounds to nothing has no sign."""
    words = of_seconds(abs(seconds))
    if not any(digit in words for digit in "123456789"):
        return "no change"
    return f"{'-' if seconds < 0 else '+'}{words}"


def of_count(count: float) -> str:
    scale, letter = prefix(count / 10)
    return f"{count / scale:,.0f} {letter}" if scale >= 1e6 else f"{count:,.0f}"


def of_ranks(ranks: Iterable[int]) -> str:
    """Ranks, neighbours as ranges: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    more = sum(b - a + 1 for a, b in runs[SHOWN:])
    return ", ".join(words[:SHOWN]) + (f" and {more} more" if more else "")
