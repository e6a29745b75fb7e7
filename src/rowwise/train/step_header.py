"""The two small gathers of a step: that of the `StepHeader` before the forward, that of the losses after it.

The header carries each rank's number of samples, whether it has more batches, whether it was asked to stop, and whether
it failed. So the ranks of a run continue and end together ([Note: Rank status] in `parallel/comm/status.py`) without a
further gather. A single rank gathers nothing. Both gathers can be started before their result is needed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, GradientError, PeerError
from rowwise.parallel.comm.chain import CollectiveChain, CollectiveSteps
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import RankStatus, raise_if_any_failed
from rowwise.tables.batch import Batch

NO_BATCH = -1
LOSS, DENSE, ROWS = 1, 2, 3  # kinds of a `StepFailure`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """The status that a rank sends to the others before a step."""

    following: int = 0  # batches that the rank has read for the next step
    following_samples: int = 0  # samples in these batches
    stop: bool = False  # a request to end the run after this step
    error: Exception | None = None  # of this rank; ends the step on all ranks, before anything changes
    width: tuple[int, int] = (NO_BATCH, NO_BATCH)  # dense numbers and labels per sample

    def with_batches(self, batches: Sequence[Batch]) -> "StepHeader":
        """The header with the width of these batches, or an error if widths differ. See [Note: Malformed batches]."""
        widths = {(_columns(batch.dense_BF), _columns(batch.labels_BK)) for batch in batches}
        if len(widths) > 1:
            counts = " and ".join(f"{dense} dense numbers and {labels} labels" for dense, labels in sorted(widths))
            error = BatchError(f"batches of one step have {counts} for each sample", "the same numbers in all batches")
            return replace(self, error=self.error or error)
        return replace(self, width=next(iter(widths), self.width))


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalStatus:
    """The headers of all ranks."""

    following_W: tuple[int, ...] = (0,)
    following_samples_W: tuple[int, ...] = (0,)
    samples_W: tuple[int, ...] = (0,)
    stop: bool = False

    @property
    def following(self) -> int:
        """Batches of the next step, the maximum over ranks: ranks with fewer add empty ones. 0 ends the epoch."""
        return max(self.following_W)

    @property
    def samples(self) -> int:
        return sum(self.samples_W)


def exchange_step_header(comm: Comm, header: StepHeader, *, during: str) -> GlobalStatus:
    """Gather the headers of all ranks; raises on all if one has an error."""
    return start_step_header(comm, header, during=during, samples=0, equal={}).finish()


def start_step_header(
    comm: Comm, header: StepHeader, *, during: str, samples: int, equal: Mapping[str, int]
) -> CollectiveChain[GlobalStatus]:
    """Start an `exchange_step_header`, which raises also if a number in `equal` differs between ranks."""
    return CollectiveChain(_exchange_header(comm, header, during, samples, equal))


def _exchange_header(
    comm: Comm, header: StepHeader, during: str, samples: int, equal: Mapping[str, int]
) -> CollectiveSteps[GlobalStatus]:
    status = RankStatus(count=header.following, failed=int(header.error is not None), stop=header.stop)
    # Layout of a rank's numbers: [status, dense width, label width, samples, following samples, *equal].
    numbers = [status.pack(), *header.width, samples, header.following_samples, *equal.values()]
    numbers_WN = yield from _all_gather_numbers(comm, numbers)
    statuses_W = [RankStatus.unpack(numbers_N[0]) for numbers_N in numbers_WN]
    raise_if_any_failed(comm, statuses_W, header.error, during=during)
    _check_widths(comm, numbers_WN, during)
    for rank, numbers_N in zip(comm.ranks, numbers_WN, strict=True):
        for name, expected, number in zip(equal, numbers_WN[0][5:], numbers_N[5:], strict=True):
            if number != expected:
                both = f"rank {comm.ranks[0]} has {expected:.0f} and rank {rank} has {number:.0f}"
                raise PeerError(f"the {name} differs: {both}", "the same on all ranks")
    return GlobalStatus(
        following_W=tuple(status.count for status in statuses_W),
        following_samples_W=tuple(int(numbers_N[4]) for numbers_N in numbers_WN),
        samples_W=tuple(int(numbers_N[3]) for numbers_N in numbers_WN),
        stop=any(status.stop for status in statuses_W),
    )


@dataclass(frozen=True, slots=True)
class StepFailure:
    """An error that ends a step. The lowest kind is raised: a bad loss makes bad gradients everywhere."""

    kind: int  # LOSS, DENSE or ROWS
    error: GradientError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredLosses:
    """The losses of all ranks, and whether any rank failed."""

    loss: float
    may_overflow: bool  # the gradients of a row may add up past the range of float32
    statuses_W: Sequence[RankStatus]


def start_losses(
    comm: Comm, parts: Sequence[float], bound: float, failure: StepFailure | None
) -> CollectiveChain[GatheredLosses]:
    """Start to gather the parts of the loss, n from each rank, and the ranks' failures.

    `bound`: an upper bound of this rank's contribution to the gradient of any row.
    """
    return CollectiveChain(_gather_losses(comm, parts, bound, failure))


def _gather_losses(
    comm: Comm, parts: Sequence[float], bound: float, failure: StepFailure | None
) -> CollectiveSteps[GatheredLosses]:
    status = RankStatus() if failure is None else RankStatus(failed=failure.kind)
    numbers_WN = yield from _all_gather_numbers(comm, [status.pack(), bound, *parts])
    loss = math.fsum(
        part for numbers_N in numbers_WN for part in numbers_N[2:]
    )  # exact, so independent of the order of ranks
    # `not <`, as a bound may be NaN. Half the range, as rounding in the kernels may make a sum larger than its bound.
    may_overflow = not sum(numbers_N[1] for numbers_N in numbers_WN) < torch.finfo(torch.float32).max / 2
    statuses_W = [RankStatus.unpack(numbers_N[0]) for numbers_N in numbers_WN]
    return GatheredLosses(loss=loss, may_overflow=may_overflow, statuses_W=statuses_W)


def raise_if_step_failed(comm: Comm, gathered: GatheredLosses, failures: Sequence[StepFailure], *, during: str) -> None:
    """Raise the lowest kind of failure on all ranks; collective. `failures`: of this rank, sorted by kind.

    Dense gradients are summed over ranks, so their failures occur on all ranks and are not gathered.
    """
    first = min((status.failed for status in gathered.statuses_W if status.failed), default=0)
    dense = [failure.error for failure in failures if failure.kind == DENSE]
    if dense and first != LOSS:
        raise dense[0]
    error = next((failure.error for failure in failures if failure.kind == first), None)
    raise_if_any_failed(comm, gathered.statuses_W, error, during=during)


def _columns(matrix: Tensor) -> int:
    """Columns of a matrix; 0 for a tensor that is not 2-D, which the model rejects."""
    return matrix.shape[1] if matrix.dim() == 2 else 0


def _check_widths(comm: Comm, numbers_WN: Sequence[Sequence[float]], during: str) -> None:
    """Raise the same error on all ranks if the widths of their batches differ."""
    widths = [
        (rank, numbers_N[1:3])
        for rank, numbers_N in zip(comm.ranks, numbers_WN, strict=True)
        if numbers_N[1] != NO_BATCH
    ]
    for rank, width in widths:
        first_rank, first_width = widths[0]
        for name, expected, number in zip(("dense numbers", "labels"), first_width, width, strict=True):
            if number != expected:
                both = f"rank {first_rank} has {expected:.0f} {name} for each sample and rank {rank} has {number:.0f}"
                raise PeerError(f"{during}: batches differ: {both}", "the same on all ranks")


def _all_gather_numbers(comm: Comm, numbers: Sequence[float]) -> CollectiveSteps[list[list[float]]]:
    """All-gather n numbers per rank as float64, which holds integers exactly below 2**53."""
    if len(comm.ranks) == 1:  # a gather of one rank would take a tenth of a millisecond per step
        return [list(numbers)]
    packed = torch.tensor(numbers, dtype=torch.float64)
    gathered = yield comm.all_gather(packed, [len(numbers)] * len(comm.ranks), "step")
    return gathered.view(len(comm.ranks), -1).tolist()
