"""Times on the clock of calls, one after the other or in turns."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

K = TypeVar("K")


def timed_s(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
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
