"""What the ranks of a step tell each other, in two small gathers: how many samples each has, and how it went.

With the first travels what a rank has to say besides (`Notice`): whether it has more batches, whether it was asked to
stop, and what it met since the last step. So the ranks of a run go on and end together, and no step has a gather more.
Its own file because it is all of a step that knows of other ranks; alone, a rank tells nobody. Gives up: an error that
a rank meets inside a forward; it leaves the step there, and the others learn of it by a collective that it misses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from rowwise.batch import Batch
from rowwise.comm.agree import agree
from rowwise.comm.seam import Comm
from rowwise.errors import BatchError, GradientError, PeerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What a rank tells the others beside its samples."""

    following: int = 0  # batches that it has for the step after this one
    stop: bool = False  # somebody wants the run to end after this step
    trouble: Exception | None = None  # why it cannot go on; ends the step on all ranks, before anything changes
    width: tuple[int, int] | None = None  # dense numbers and labels of a sample, where it has batches

    def about(self, batches: Sequence[Batch]) -> "Notice":
        """The same, of these batches: if they cannot be used, that is its trouble. See [Note: Malformed batches]."""
        widths = {(_columns(batch.dense_BF), _columns(batch.labels_BK)) for batch in batches}
        if len(widths) > 1:
            got = " and ".join(f"{dense} dense numbers and {labels} labels" for dense, labels in sorted(widths))
            error = BatchError(f"batches of one step have {got} for each sample: want the same in all of them")
            return replace(self, trouble=self.trouble or error)
        return replace(self, width=next(iter(widths), None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the ranks said, together."""

    following_W: tuple[int, ...] = (0,)
    stop: bool = False

    @property
    def following(self) -> int:
        """Batches of the next step on every rank, some without samples maybe; 0: no rank has one."""
        return max(self.following_W)


def hear(comm: Comm, notice: Notice, where: str) -> Heard:
    """The same outside of a step."""
    told_WN = _tell(comm, _numbers(notice))()
    _end_if_troubled(comm, notice, told_WN, where)
    return _heard(told_WN)


@final
class Counted:
    """How many samples each rank has; told at once, and heard when it is first asked for.

    Args:
        comm: the ranks.
        samples: of this rank.
        facts: what has to be the same on all ranks, by name.
        notice: what else there is to say.
    """

    def __init__(self, comm: Comm, samples: int, facts: Mapping[str, int], notice: Notice) -> None:
        """Tell the others."""
        self._comm, self._names, self._notice = comm, tuple(facts), notice
        self._where = f"before step {facts['number of the step']}"
        self._hear = _tell(comm, [*_numbers(notice), samples, *facts.values()])
        self._told_WN: list[list[float]] = []

    def check(self) -> None:
        """Raise on all ranks if any cannot take the step."""
        self._told()

    @property
    def samples_W(self) -> list[int]:
        """By rank; at least one in all."""
        samples_W = [int(told_N[SAID]) for told_N in self._told()]
        if not any(samples_W):
            raise BatchError("a step without a sample on any rank: want at least one")
        return samples_W

    @property
    def samples(self) -> int:
        """Of all ranks."""
        return sum(self.samples_W)

    @property
    def heard(self) -> Heard:
        """What else was said."""
        return _heard(self._told())

    def _told(self) -> list[list[float]]:
        # Not a cached_property: up to Python 3.11 all of a process wait for one that is computed, and ranks may be
        # threads that talk meanwhile.
        if self._told_WN:
            return self._told_WN
        told_WN, ranks = self._hear(), self._comm.ranks
        _end_if_troubled(self._comm, self._notice, told_WN, self._where)
        for rank, told_N in zip(ranks, told_WN, strict=True):
            for name, here, there in zip(self._names, told_WN[0][SAID + 1 :], told_N[SAID + 1 :], strict=True):
                if here != there:
                    both = f"rank {ranks[0]} has {here:.0f} and rank {rank} has {there:.0f}"
                    raise PeerError(f"ranks do not agree on the {name}: {both}; want the same step on all of them")
        self._told_WN = told_WN
        return told_WN


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


SAID = 5  # numbers that a notice is told in
NO_BATCH = -1


def _numbers(notice: Notice) -> list[float]:
    dense, labels = (NO_BATCH, NO_BATCH) if notice.width is None else notice.width
    return [notice.following, notice.stop, notice.trouble is not None, dense, labels]


def _columns(matrix: Tensor) -> int:
    """Of one with a row for each sample; none, where it is something else."""
    return matrix.shape[1] if matrix.dim() == 2 else 0


def _end_if_troubled(comm: Comm, notice: Notice, told_WN: Sequence[Sequence[float]], where: str) -> None:
    """On all ranks alike: a rank that has trouble raises its own, the others an error that names it."""
    if any(told_N[2] for told_N in told_WN):
        agree(comm, notice.trouble, where)
    with_batch = [(rank, told_N) for rank, told_N in zip(comm.ranks, told_WN, strict=True) if told_N[3] != NO_BATCH]
    for rank, told_N in with_batch:
        for place, name in ((3, "dense numbers"), (4, "labels")):
            here, there = with_batch[0][1][place], told_N[place]
            if here != there:
                both = f"rank {with_batch[0][0]} has {here:.0f} {name} for each sample and rank {rank} has {there:.0f}"
                raise PeerError(f"{where}: batches differ: {both}; want the same on all ranks")


def _heard(told_WN: Sequence[Sequence[float]]) -> Heard:
    return Heard(following_W=tuple(int(told_N[0]) for told_N in told_WN), stop=any(told_N[1] for told_N in told_WN))


def _tell(comm: Comm, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
    """Tell all ranks equally many numbers, whole ones below 2**53; what is returned waits for those of all."""
    if len(comm.ranks) == 1:  # a gather that moves nothing takes a tenth of a millisecond in a step
        return lambda: [list(numbers)]
    handle = comm.all_gather(torch.tensor(numbers, dtype=torch.float64), [len(numbers)] * len(comm.ranks), "step")
    return lambda: handle.wait().view(len(comm.ranks), -1).tolist()
