"""Progress of long work made of parts of about equal length, reported as one share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

Tell = Callable[[str, float], None]  # takes the current part's text, and the share of all work done


@final
class WorkQueue:
    """Parts of work, done one after another."""

    def __init__(self, tell: Tell, parts: int) -> None:
        self._tell, self._parts, self._done = tell, parts, 0

    @contextmanager
    def part(self, text: str) -> Iterator[Callable[[float], None]]:
        """Run a part; yields a function that takes the share of the part that is done."""
        self._tell(text, self._share(0.0))
        yield lambda share: self._tell(text, self._share(share))
        self._done += 1
        self._tell(text, self._share(0.0))

    def _share(self, current: float) -> float:
        return min(1.0, (self._done + current) / self._parts)
