"""Samples a second over the newest updates.

Its own file because it measures the machine, not the model. There is no clock inside: whoever calls says what time it
is, so a test and a replayed log are as good as a run.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Self

import torch

from rowwise.errors import BatchError
from rowwise.train.state import State, at_least_one, check_alike, merge_newest, read_int, read_tensor


class Throughput:
    """Samples a second between the ends of the newest updates; NaN until there are two of different times."""

    __slots__ = ("_ticks", "_updates")

    def __init__(self, updates: int = 100) -> None:
        self._updates = at_least_one("updates", updates)
        # One more than the updates, as they lie between the times: the oldest says when the next began.
        self._ticks: deque[tuple[float, float]] = deque(maxlen=updates + 1)

    def update(self, samples: int, now_s: float) -> None:
        """So many samples were done between the last update and now."""
        if self._ticks and not now_s >= self._ticks[-1][1]:
            raise BatchError(f"time went from {self._ticks[-1][1]} s to {now_s} s: want a monotonic clock")
        self._ticks.append((float(samples), now_s))

    def merge(self, other: "Throughput") -> None:
        """Add what another rank did in the same steps; a step ends when the last rank ends it."""
        check_alike("updates", self._updates, other._updates)
        merged = merge_newest(list(self._ticks), list(other._ticks), lambda a, b: (a[0] + b[0], max(a[1], b[1])))
        self._ticks = deque(merged, maxlen=self._updates + 1)

    def value(self) -> float:
        """Samples a second."""
        if len(self._ticks) < 2 or self._ticks[-1][1] == self._ticks[0][1]:
            return math.nan
        return sum(samples for samples, _ in list(self._ticks)[1:]) / (self._ticks[-1][1] - self._ticks[0][1])

    def state(self) -> State:
        """All that is kept."""
        ticks = torch.tensor(list(self._ticks), dtype=torch.float64).reshape(-1, 2)
        return {"updates": self._updates, "ticks": ticks}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """What `state` returned, to go on with the same bits."""
        made = cls(read_int(state, "updates"))
        made._ticks.extend((samples, time_s) for samples, time_s in read_tensor(state, "ticks", (None, 2)).tolist())
        return made
