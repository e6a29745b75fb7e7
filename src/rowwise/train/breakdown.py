"""Where the time of a run goes: every moment is charged to exactly one phase, so the parts add up to the whole.

Its own file because it is a clock and knows nothing of training. Entering a phase pauses the one around it: rows looked
up inside a forward count as `lookup`, not twice. Two reads of a clock a phase, about a microsecond: measured in every
run. Gives up: on a GPU, work that was only queued is charged to whoever waits for it first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import final

from torch import nn
from torch.utils.hooks import RemovableHandle

from rowwise.shard.embeddings import AnyEmbeddings

PHASES = ("data", "lookup", "forward", "backward", "update", "other")
PAUSED = "paused"  # no training: whatever is entered inside is charged to it, too


@final
class Breakdown:
    """Seconds by phase; `other` is what no phase was entered for."""

    __slots__ = ("_inside", "_seconds", "_since")

    def __init__(self) -> None:
        """The clock runs from here on."""
        self._seconds = dict.fromkeys((*PHASES, PAUSED), 0.0)
        self._inside = ["other"]
        self._since = perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge what is inside to a phase."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Begin a phase inside the present one."""
        self._charge()
        self._inside.append(PAUSED if self._inside[-1] == PAUSED else name)

    def leave(self) -> None:
        """End the phase that was entered last."""
        self._charge()
        self._inside.pop()

    def seconds(self) -> dict[str, float]:
        """All so far, by phase."""
        self._charge()
        return dict(self._seconds)

    def training_s(self) -> float:
        """All so far but the pauses."""
        return sum(seconds for phase, seconds in self.seconds().items() if phase != PAUSED)

    def watch(self, tables: Sequence[AnyEmbeddings]) -> list[RemovableHandle]:
        """Charge the lookups of these tables, wherever a model makes them, to `lookup`."""
        handles: list[RemovableHandle] = []
        for module in tables:
            handles.append(module.register_forward_pre_hook(self._before))
            # Also after a lookup that raised: the phases around it must stay those that were entered.
            handles.append(module.register_forward_hook(self._after, always_call=True))
        return handles

    def _before(self, _module: nn.Module, _given: object) -> None:
        self.enter("lookup")

    def _after(self, _module: nn.Module, _given: object, _made: object) -> None:
        self.leave()

    def _charge(self) -> None:
        now = perf_counter()
        self._seconds[self._inside[-1]] += now - self._since
        self._since = now
