"""Seconds by phase: every moment of a run is charged to exactly one phase, so the phases add up to the whole.

Entering a phase pauses the phase around it: a lookup inside a forward counts as `lookup` only. A phase reads the clock
twice, about a microsecond, so every run is measured.

[Note: Stages of sharded tables] `ShardedEmbeddings` calls `phase` for its stages: sending ids (`route`), `lookup`,
sending vectors, and in the backward sending their gradients back. The last two are charged to `exchange`.

[Note: Waiting] A rank that is early waits for the others in every phase with a collective. Shared memory and threads
count that time (`Comm.waited`), and it is charged to `wait` instead of the phase around it. Transports between hosts
cannot tell waiting from sending, and it stays part of that phase.

Known limits: on a GPU, kernels that were only queued are charged to the phase that first synchronises.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Protocol, final

from torch import nn

from rowwise.comm.interface import WaitTime
from rowwise.shard.embeddings import AnyEmbeddings, ShardedEmbeddings
from rowwise.shard.exchange import no_timing

# `update` is the update of rows; the update of dense parameters is part of `backward`.
PHASES = ("data", "route", "lookup", "exchange", "wait", "forward", "backward", "update", "other")
PAUSED = "paused"  # evaluations and checkpoints; phases entered inside are charged to it, too


class Watch(Protocol):
    """A hook on a module; `remove` ends it."""

    def remove(self) -> None: ...


@final
class Breakdown:
    """Seconds by phase; `other` is the time outside all phases."""

    __slots__ = ("_now", "_seconds", "_since", "_stack", "_waited", "_waited_s")

    def __init__(self, now: Callable[[], float] = perf_counter, waited: WaitTime | None = None) -> None:
        """The clock starts at once. `waited`: see [Note: Waiting]."""
        self._now, self._waited = now, waited or WaitTime()
        self._waited_s = self._waited.seconds
        self._seconds = dict.fromkeys((*PHASES, PAUSED), 0.0)
        self._stack = ["other"]
        self._since = now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the seconds of the with block to a phase."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Begin a phase inside the current one."""
        self._charge()
        self._stack.append(PAUSED if self._stack[-1] == PAUSED else name)

    def leave(self) -> None:
        """End the innermost phase."""
        self._charge()
        self._stack.pop()

    def seconds(self) -> dict[str, float]:
        self._charge()
        return dict(self._seconds)

    def training_s(self) -> float:
        return sum(seconds for phase, seconds in self.seconds().items() if phase != PAUSED)

    def watch(self, tables: Sequence[AnyEmbeddings]) -> list[Watch]:
        """Hook these tables so that their lookups are charged to phases. See [Note: Stages of sharded tables]."""
        watches: list[Watch] = []
        for module in tables:
            watches.append(module.register_forward_pre_hook(self._enter_lookup))
            # `always_call`: a lookup that raises must leave its phase, too, or the stack of phases would be wrong.
            watches.append(module.register_forward_hook(self._leave_lookup, always_call=True))
            if isinstance(module, ShardedEmbeddings):
                module.phase = self._stage
                watches.append(_StageHook(module))
        return watches

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self.phase("exchange" if name == "return" else name)

    def _enter_lookup(self, _module: nn.Module, _args: object) -> None:
        self.enter("lookup")

    def _leave_lookup(self, _module: nn.Module, _args: object, _output: object) -> None:
        self.leave()

    def _charge(self) -> None:
        now, waited_s, phase = self._now(), self._waited.seconds, self._stack[-1]
        spent_s = now - self._since
        wait_s = 0.0 if phase == PAUSED else min(waited_s - self._waited_s, spent_s)
        self._seconds[phase] += spent_s - wait_s
        self._seconds["wait"] += wait_s
        self._since, self._waited_s = now, waited_s


@final
class _StageHook:
    """The `phase` callback of sharded tables."""

    def __init__(self, module: ShardedEmbeddings) -> None:
        self._module = module

    def remove(self) -> None:
        self._module.phase = no_timing
