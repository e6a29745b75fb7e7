"""How far a long command is: so many pieces of work of about the same size, told as one share of all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

Tell = Callable[[str, float], None]  # what is done now, and the share of all that is


@final
class WorkQueue:
    """Pieces of work, one after another."""

    def __init__(self, tell: Tell, pieces: int) -> None:
        self._tell, self._pieces, self._done = tell, pieces, 0

    @contextmanager
    def piece(self, text: str) -> Iterator[Callable[[float], None]]:
        """One piece; what it gives takes the share of the piece that is done."""
        self._tell(text, self._share(0.0))
        yield lambda part: self._tell(text, self._share(part))
        self._done += 1
        self._tell(text, self._share(0.0))

    def _share(self, part: float) -> float:
        return min(1.0, (self._done + part) / self._pieces)
