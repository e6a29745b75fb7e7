"""Times on the clock of calls, one after the other or in turns."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

K = TypeVar("K")


def timed_s(call: Callable[[], object]) -> float:
    """Without the time that freeing the result takes."""
    begin_s = time.perf_counter()
    _ = call()
    return time.perf_counter() - begin_s


def least_s(call: Callable[[], object], times: int) -> float:
    return min(timed_s(call) for _ in range(times))


def in_turns(calls: Mapping[K, Callable[[], object]], rounds: int) -> dict[K, list[float]]:
    """Seconds of each call, A B A B."""
    found: dict[K, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(timed_s(call))
    return found


def beside(ours: Callable[[], object], peer: Callable[[], object], most: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of two sides in turns: five rounds or more, at most so many, and no more after so many seconds."""
    found: dict[str, list[float]] = {"ours": [], "peer": []}
    until_s = time.perf_counter() + seconds
    while len(found["ours"]) < 5 or (len(found["ours"]) < most and time.perf_counter() < until_s):
        found["ours"].append(timed_s(ours))
        found["peer"].append(timed_s(peer))
    return found
