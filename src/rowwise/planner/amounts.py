"""Seconds, bytes and ranks in words, as explanations and errors of planning say them.

Its own file because a plan and the lack of one are told in the same units. Decimal, as memory is sold: a GB is 1e9.
"""

from collections.abc import Iterable

SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SHOWN = 3  # runs of ranks that are written out


def of_bytes(size: float) -> str:
    """Bytes."""
    for unit, name in SIZES:
        if abs(size) >= unit * 0.9995:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} B"


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
    """How many of something large."""
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if count >= unit * 10:
            return f"{count / unit:,.0f}{name}"
    return f"{count:,.0f}"


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
