"""`CollectiveChain`: a chain of collectives, each on the result of the previous one, which the caller advances.

The collectives of a chain are a generator: it yields each collective that it has started, and is sent the received
tensor. `advance` waits for the collective in flight and starts the next, so computation between two calls overlaps with
the transfer. All ranks have to advance their chains at the same places, as collectives must be called in one order.
"""

from collections.abc import Generator
from typing import Generic, TypeVar, final

from torch import Tensor

from rowwise.parallel.comm.interface import Work

T = TypeVar("T")
CollectiveSteps = Generator[Work, Tensor, T]


@final
class CollectiveChain(Generic[T]):
    """Runs the steps of a chain; an error of a step is raised by `finish`."""

    def __init__(self, steps: CollectiveSteps[T]) -> None:
        """Start the first collective."""
        self._steps = steps
        self._work: Work | None = None
        self._results: list[T] = []
        self._error: Exception | None = None
        self._run(None)

    @property
    def is_done(self) -> bool:
        """Whether no collective is in flight."""
        return self._work is None

    def advance(self) -> None:
        """Wait for the collective in flight, if any, and start the next."""
        if self._work is not None:
            self._run(self._work)

    def wait(self) -> Exception | None:
        """Run all collectives; returns the error of a step, if there was one."""
        while self._work is not None:
            self._run(self._work)
        return self._error

    def finish(self) -> T:
        """The result, after all collectives."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self, work: Work | None) -> None:
        self._work = None
        try:
            self._work = next(self._steps) if work is None else self._steps.send(work.wait())
        except StopIteration as end:
            self._results.append(end.value)
        except Exception as error:  # raised by `finish`
            self._error = error
