"""`BackwardEnd`: what happens at the end of a backward, and after one that raised.

[Note: Updates in the backward] The gradients of a backward are one update, after all nodes of autograd have run: nodes
read rows, for gradients of per-id weights. The gradients of all modules are checked before the first row changes, so a
gradient that is not finite changes no row. Gradients of a backward that raised are dropped by the next forward or
backward. A backward inside another one (a reentrant checkpoint) joins the update of the outer one, if that has reached
the tables already.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

Call = Callable[[], None]


@final
class BackwardEnd:
    """Calls each of `steps` at the end of a backward; `discard` after one that raised.

    The first steps of all objects that joined the backward come before the second ones. It keeps neither, as they are
    mostly methods of its owner.
    """

    def __init__(self) -> None:
        # Held by autograd, which drops it uncalled if the backward raises.
        self._running: weakref.ref[_StepsInTurn] | None = None

    def begin_forward(self, discard: Call) -> None:
        """Discard what a backward that raised has left, if any."""
        if self._running is not None and torch._C._current_graph_task_id() < 0:
            self._running = None
            discard()

    def watch(self, outputs: Iterable[Tensor], steps: Sequence[Call], discard: Call) -> None:
        """Join each backward of these outputs of one function, or several."""
        for node in {output.grad_fn for output in outputs}:
            if node is not None:
                node.register_prehook(partial(self.join, steps, discard))

    def join(self, steps: Sequence[Call], discard: Call, *_: Any) -> None:
        """Join the running backward; called in it."""
        if self._running is not None:
            if self._running() is not None:
                return
            discard()
        in_turn = _StepsInTurn(self, steps)
        self._running = weakref.ref(in_turn)
        in_turn.queue()

    def end(self) -> None:
        self._running = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_running": None}


@final
class _StepsInTurn:
    def __init__(self, end: BackwardEnd, steps: Sequence[Call]) -> None:
        self._end, self._remaining = end, list(steps)

    def queue(self) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self)

    def __call__(self) -> None:
        step = self._remaining.pop(0)
        if not self._remaining:
            self._end.end()  # what joins from now on gets a last step of its own
        step()
        if self._remaining:
            self.queue()
