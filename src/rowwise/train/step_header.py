"""The header of a step: two small all-gathers of each rank's samples and status.

With the first travels what else all have to know (`StepHeader`): whether a rank has more batches, whether it was asked
to stop, and why it cannot go on. So the ranks of a run go on and end together ([Note: rank status] in
`comm/status.py`), and no step has a gather more; alone, a rank tells nobody.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowwise.batch import Batch
from rowwise.comm.seam import Comm
from rowwise.comm.status import RankStatus, raise_if_any_failed
from rowwise.errors import BatchError, GradientError, PeerError

NO_BATCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """The status that a rank sends to the others before a step."""

    following: int = 0  # batches that it has for the step after this one
    stop: bool = False  # somebody wants the run to end after this step
    error: Exception | None = None  # why it cannot go on; ends the step on all ranks, before anything changes
    width: tuple[int, int] = (NO_BATCH, NO_BATCH)  # dense numbers and labels of a sample, where it has batches

    def with_batches(self, batches: Sequence[Batch]) -> "StepHeader":
        """The same, of these batches: if they cannot be used, that is its error. See [Note: Malformed batches]."""
        widths = {(_columns(batch.dense_BF), _columns(batch.labels_BK)) for batch in batches}
        if len(widths) > 1:
            got = " and ".join(f"{dense} dense numbers and {labels} labels" for dense, labels in sorted(widths))
            error = BatchError(f"batches of one step have {got} for each sample: want the same in all of them")
            return replace(self, error=self.error or error)
        return replace(self, width=next(iter(widths), self.width))


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalStatus:
    """The headers of all ranks."""

    following_W: tuple[int, ...] = (0,)
    samples_W: tuple[int, ...] = (0,)
    stop: bool = False

    @property
    def following(self) -> int:
        """Batches of the next step on every rank, some without samples maybe; 0: no rank has one."""
        return max(self.following_W)

    @property
    def samples(self) -> int:
        return sum(self.samples_W)


def exchange_step_header(
    comm: Comm, header: StepHeader, *, during: str, samples: int = 0, alike: Mapping[str, int] | None = None
) -> GlobalStatus:
    """Called by all ranks, and raises on all if one cannot go on. `alike`: what has to be the same on all, by name."""
    alike = alike or {}
    status = RankStatus(count=header.following, failed=int(header.error is not None), stop=header.stop)
    told_WN = _all_gather_numbers(comm, [status.pack(), *header.width, samples, *alike.values()])
    statuses_W = [RankStatus.unpack(told_N[0]) for told_N in told_WN]
    raise_if_any_failed(comm, statuses_W, header.error, during=during)
    _check_widths(comm, told_WN, during)
    for rank, told_N in zip(comm.ranks, told_WN, strict=True):
        for name, here, there in zip(alike, told_WN[0][4:], told_N[4:], strict=True):
            if here != there:
                both = f"rank {comm.ranks[0]} has {here:.0f} and rank {rank} has {there:.0f}"
                raise PeerError(f"ranks do not agree on the {name}: {both}; want the same step on all of them")
    return GlobalStatus(
        following_W=tuple(status.count for status in statuses_W),
        samples_W=tuple(int(told_N[3]) for told_N in told_WN),
        stop=any(status.stop for status in statuses_W),
    )


@dataclass(frozen=True, slots=True)
class StepFailure:
    """An error that ends a step. Of several the first kind is raised: a bad loss makes bad gradients everywhere."""

    kind: int  # 1: the loss; 2: dense gradients; 3: those of rows
    error: GradientError


def reduce_loss_or_raise(
    comm: Comm, parts: Sequence[float], bound: float, failure: StepFailure | None, *, during: str
) -> tuple[float, bool]:
    """The loss of all ranks, from each one's equally many parts; raises on all of them if any has failed.

    `bound`: for the gradients that this rank adds up for a row. Also returns whether sums of all ranks may overflow.
    """
    status = RankStatus() if failure is None else RankStatus(failed=failure.kind)
    told_WN = _all_gather_numbers(comm, [status.pack(), bound, *parts])
    statuses_W = [RankStatus.unpack(told_N[0]) for told_N in told_WN]
    raise_if_any_failed(comm, statuses_W, None if failure is None else failure.error, during=during)
    loss = math.fsum(part for told_N in told_WN for part in told_N[2:])  # exact, so in any order the same
    # A bound may be NaN. Half: the kernels round, and so may a sum come out larger than it is.
    return loss, not sum(told_N[1] for told_N in told_WN) < torch.finfo(torch.float32).max / 2


def _columns(matrix: Tensor) -> int:
    """The columns of a tensor with a row per sample; 0 for others."""
    return matrix.shape[1] if matrix.dim() == 2 else 0


def _check_widths(comm: Comm, told_WN: Sequence[Sequence[float]], during: str) -> None:
    """Raise on all ranks alike if their batches differ."""
    widths = [(rank, told_N[1:3]) for rank, told_N in zip(comm.ranks, told_WN, strict=True) if told_N[1] != NO_BATCH]
    for rank, width in widths:
        first, expected = widths[0]
        for name, here, there in zip(("dense numbers", "labels"), expected, width, strict=True):
            if here != there:
                both = f"rank {first} has {here:.0f} {name} for each sample and rank {rank} has {there:.0f}"
                raise PeerError(f"{during}: batches differ: {both}; want the same on all ranks")


def _all_gather_numbers(comm: Comm, numbers: Sequence[float]) -> list[list[float]]:
    """Equally many of each rank, on all; whole ones are below 2**53."""
    if len(comm.ranks) == 1:  # a gather that moves nothing takes a tenth of a millisecond in a step
        return [list(numbers)]
    told = comm.all_gather(torch.tensor(numbers, dtype=torch.float64), [len(numbers)] * len(comm.ranks), "step").wait()
    return told.view(len(comm.ranks), -1).tolist()
