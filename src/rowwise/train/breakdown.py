"""Time of a run by phase: every moment belongs to exactly one, so phases add up to the whole.

Entering a phase pauses the one around it: rows looked up inside a forward count as `lookup`, not twice. Two reads of a
clock a phase, about a microsecond: measured in every run.

[Note: Stages of sharded tables] `ShardedEmbeddings` says itself which stage it is at: ids travel (`route`), rows are
looked up, vectors travel, and in the backward their gradients travel back; both of the latter are `exchange`.

[Note: Waiting] Whoever is early waits for the others, in any phase that has a collective: for the header of a step, for
ids, vectors and gradients, for dense gradients. Transports that can tell count that time (`Comm.waited`), and it is
charged to `wait` instead of the phase around it. Between hosts they cannot, and it stays part of that phase.

Known limits: on a GPU, work that was only queued is charged to whoever waits for it first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Protocol, final

from torch import nn

from rowwise.comm.seam import WaitTime
from rowwise.shard.embeddings import AnyEmbeddings, ShardedEmbeddings
from rowwise.shard.exchange import no_timing

# What is done to dense parameters is part of `backward`; `update` is that of rows.
PHASES = ("data", "route", "lookup", "exchange", "wait", "forward", "backward", "update", "other")
PAUSED = "paused"  # no training: whatever is entered inside is charged to it, too


class Watch(Protocol):
    """A step that charges its seconds to phases."""

    def remove(self) -> None: ...


@final
class Breakdown:
    """Seconds by phase; `other` is the time outside all phases."""

    __slots__ = ("_inside", "_now", "_seconds", "_since", "_waited", "_waited_s")

    def __init__(self, now: Callable[[], float] = perf_counter, waited: WaitTime | None = None) -> None:
        """The clock runs from here on. `waited`: of the ranks' `Comm`; see [Note: Waiting]."""
        self._now, self._waited = now, waited or WaitTime()
        self._waited_s = self._waited.seconds
        self._seconds = dict.fromkeys((*PHASES, PAUSED), 0.0)
        self._inside = ["other"]
        self._since = now()

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
        self._charge()
        return dict(self._seconds)

    def training_s(self) -> float:
        return sum(seconds for phase, seconds in self.seconds().items() if phase != PAUSED)

    def watch(self, tables: Sequence[AnyEmbeddings]) -> list[Watch]:
        """Charge the lookups of these tables, wherever a model makes them. See [Note: Stages of sharded tables]."""
        watches: list[Watch] = []
        for module in tables:
            watches.append(module.register_forward_pre_hook(self._before))
            # Also after a lookup that raised: the phases around it must stay those that were entered.
            watches.append(module.register_forward_hook(self._after, always_call=True))
            if isinstance(module, ShardedEmbeddings):
                module.phase = self._stage
                watches.append(_Timed(module))
        return watches

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self.phase("exchange" if name == "return" else name)

    def _before(self, _module: nn.Module, _given: object) -> None:
        self.enter("lookup")

    def _after(self, _module: nn.Module, _given: object, _made: object) -> None:
        self.leave()

    def _charge(self) -> None:
        now, waited_s, phase = self._now(), self._waited.seconds, self._inside[-1]
        spent_s = now - self._since
        wait_s = 0.0 if phase == PAUSED else min(waited_s - self._waited_s, spent_s)
        self._seconds[phase] += spent_s - wait_s
        self._seconds["wait"] += wait_s
        self._since, self._waited_s = now, waited_s


@final
class _Timed:
    """Tables that say which stage they are at."""

    def __init__(self, module: ShardedEmbeddings) -> None:
        self._module = module

    def remove(self) -> None:
        """They say it to nobody from now on."""
        self._module.phase = no_timing
