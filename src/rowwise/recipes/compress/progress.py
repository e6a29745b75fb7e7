"""Progress of long work in steps of about equal length, reported as one fraction."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

Tell = Callable[[str, float], None]  # (text of the current step, completed fraction of all work)


@final
class WorkProgress:
    """Counts completed steps, and reports the completed fraction of all work."""

    def __init__(self, report: Tell, steps: int) -> None:
        self._report, self._steps, self._done = report, steps, 0

    @contextmanager
    def step(self, text: str) -> Iterator[Callable[[float], None]]:
        """Count the block as one step; yields a function that takes the completed fraction of the step."""
        self._report(text, self._fraction(0.0))
        yield lambda fraction: self._report(text, self._fraction(fraction))
        self._done += 1
        self._report(text, self._fraction(0.0))

    def _fraction(self, current_step: float) -> float:
        return min(1.0, (self._done + current_step) / self._steps)
