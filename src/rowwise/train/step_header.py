"""The two small gathers of a step: `exchange_step_header` before the forward, `reduce_loss_or_raise` after it.

The header carries each rank's number of samples, whether it has more batches, whether it was asked to stop, and whether
it failed. So the ranks of a run continue and end together ([Note: Rank status] in `comm/status.py`) without a further
gather. A single rank gathers nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowwise.batch import Batch
from rowwise.comm.interface import Comm
from rowwise.comm.status import RankStatus, raise_if_any_failed
from rowwise.errors import BatchError, GradientError, PeerError

NO_BATCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """The status that a rank sends to the others before a step."""

    following: int = 0  # batches that the rank has read for the next step
    stop: bool = False  # a request to end the run after this step
    error: Exception | None = None  # of this rank; ends the step on all ranks, before anything changes
    width: tuple[int, int] = (NO_BATCH, NO_BATCH)  # dense numbers and labels of a sample

    def with_batches(self, batches: Sequence[Batch]) -> "StepHeader":
        """The header with the width of these batches, or their fault as its error. See [Note: Malformed batches]."""
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
        """Batches of the next step: the most of any rank; others add batches without samples. 0: the epoch ends."""
        return max(self.following_W)

    @property
    def samples(self) -> int:
        return sum(self.samples_W)


def exchange_step_header(
    comm: Comm, header: StepHeader, *, during: str, samples: int = 0, alike: Mapping[str, int] | None = None
) -> GlobalStatus:
    """Gather the headers of all ranks; raises on all if one has an error, or if a number in `alike` differs."""
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
                raise PeerError(f"the {name} differs: {both}; want the same on all ranks")
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
    """The sum of all ranks' parts of the loss, and whether gradients of a row may overflow; raises if any rank failed.

    All ranks have equally many `parts`. `bound`: an upper bound of what this rank adds to the gradient of any row.
    """
    status = RankStatus() if failure is None else RankStatus(failed=failure.kind)
    told_WN = _all_gather_numbers(comm, [status.pack(), bound, *parts])
    statuses_W = [RankStatus.unpack(told_N[0]) for told_N in told_WN]
    raise_if_any_failed(comm, statuses_W, None if failure is None else failure.error, during=during)
    loss = math.fsum(part for told_N in told_WN for part in told_N[2:])  # exact, so independent of the order of ranks
    # `not <`, as a bound may be NaN. Half the range, as rounding in the kernels may make a sum larger than its bound.
    return loss, not sum(told_N[1] for told_N in told_WN) < torch.finfo(torch.float32).max / 2


def _columns(matrix: Tensor) -> int:
    """Columns of a matrix; 0 for a tensor that is not 2-D, which the model refuses with its own error."""
    return matrix.shape[1] if matrix.dim() == 2 else 0


def _check_widths(comm: Comm, told_WN: Sequence[Sequence[float]], during: str) -> None:
    """Raise the same error on all ranks if the widths of their batches differ."""
    widths = [(rank, told_N[1:3]) for rank, told_N in zip(comm.ranks, told_WN, strict=True) if told_N[1] != NO_BATCH]
    for rank, width in widths:
        first, expected = widths[0]
        for name, here, there in zip(("dense numbers", "labels"), expected, width, strict=True):
            if here != there:
                both = f"rank {first} has {here:.0f} {name} for each sample and rank {rank} has {there:.0f}"
                raise PeerError(f"{during}: batches differ: {both}; want the same on all ranks")


def _all_gather_numbers(comm: Comm, numbers: Sequence[float]) -> list[list[float]]:
    """All-gather equally many numbers of each rank, as float64: integers are exact below 2**53."""
    if len(comm.ranks) == 1:  # a gather of one rank would take a tenth of a millisecond per step
        return [list(numbers)]
    told = comm.all_gather(torch.tensor(numbers, dtype=torch.float64), [len(numbers)] * len(comm.ranks), "step").wait()
    return told.view(len(comm.ranks), -1).tolist()
