"""What the ranks of a step tell each other, in two small gathers: how many samples each has, and how it went.

Its own file because it is all of a step that knows of other ranks; alone, a rank tells nobody. Gives up: an error that
a rank meets inside a forward; it leaves the step there, and the others learn of it by a collective that it misses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch

from rowwise.comm.agree import agree
from rowwise.comm.seam import Comm
from rowwise.errors import BatchError, GradientError, PeerError


@final
class Counted:
    """How many samples each rank has; told at once, and heard when it is first asked for, as a forward may run first.

    Args:
        comm: the ranks.
        samples: of this rank.
        facts: what has to be the same on all ranks, by name.
    """

    def __init__(self, comm: Comm, samples: int, facts: Mapping[str, int]) -> None:
        """Tell the others."""
        self._ranks, self._names = comm.ranks, tuple(facts)
        self._hear = _tell(comm, [samples, *facts.values()])

    @cached_property
    def samples_W(self) -> list[int]:
        """By rank; at least one in all."""
        told_WN = self._hear()
        for rank, told_N in zip(self._ranks, told_WN, strict=True):
            for name, here, there in zip(self._names, told_WN[0][1:], told_N[1:], strict=True):
                if here != there:
                    ranks = f"rank {self._ranks[0]} has {here:.0f} and rank {rank} has {there:.0f}"
                    raise PeerError(f"ranks do not agree on the {name}: {ranks}; want the same step on all of them")
        samples_W = [int(told_N[0]) for told_N in told_WN]
        if not any(samples_W):
            raise BatchError("a step without a sample on any rank: want at least one")
        return samples_W

    @cached_property
    def samples(self) -> int:
        """Of all ranks."""
        return sum(self.samples_W)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a step cannot be finished. Of several the first kind is told: a bad loss makes bad gradients everywhere."""

    kind: int  # 1: the loss; 2: dense gradients; 3: those of rows
    error: GradientError


def settle(comm: Comm, parts: Sequence[float], trouble: Trouble | None, number: int) -> float:
    """The loss of all ranks, from each one's equally many parts; raises on all of them if any has trouble."""
    told_WN = _tell(comm, [0 if trouble is None else trouble.kind, *parts])()
    kinds = [told_N[0] for told_N in told_WN if told_N[0]]
    if kinds:
        agree(comm, trouble.error if trouble is not None and trouble.kind == min(kinds) else None, f"step {number}")
    return math.fsum(part for told_N in told_WN for part in told_N[1:])  # exact, so in any order the same


def _tell(comm: Comm, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
    """Tell all ranks equally many numbers, whole ones below 2**53; what is returned waits for those of all."""
    if len(comm.ranks) == 1:  # a gather that moves nothing takes a tenth of a millisecond in a step
        return lambda: [list(numbers)]
    handle = comm.all_gather(torch.tensor(numbers, dtype=torch.float64), [len(numbers)] * len(comm.ranks), "step")
    return lambda: handle.wait().view(len(comm.ranks), -1).tolist()
