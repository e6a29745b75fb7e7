"""Area under the ROC curve: exact while scores are few, then from a histogram with a bound on its error.

The area is the probability that a positive scores above a negative, ties counting half, samples by their weight. A
histogram ties all scores of a bin, so its error is at most half of the tied mass:

    |binned - exact| <= 1/2 sum over bins (positives in bin / positives) (negatives in bin / negatives)

The right side is `bound`; it holds for any scores, up to float64 rounding. Bins divide the logit axis, not the
probabilities: a model of rare events has all its probabilities in the lowest hundredth.

    BinnedAuc   a histogram
    Auc         all scores and a histogram, until there are too many scores to keep
    RecentAuc   the scores of the newest batches

With one class only, the area is NaN. Letters: N samples, K tasks, M bins, E distinct scores.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rowwise.tables.ops.threads import one_thread
from rowwise.train.samples import Samples
from rowwise.train.state import (
    State,
    check_equal,
    check_positive,
    join,
    merge_newest,
    narrow,
    part,
    read_int,
    read_tensor,
)

AXIS = 16.0  # logits beyond it share a bin at either end; sigmoid(16) is 1e-7 from 1
KEEP = 1 << 17  # scores; `value` sorts them in about 10 ms


@dataclass(frozen=True, slots=True)
class AucValue:
    """A task's area under the ROC curve, and a bound on its error."""

    auc: float
    bound: float


class BinnedAuc:
    """The area of all samples, from a histogram of 2 * (bins + 2) numbers for each task.

    On a GPU the order of adding fractional weights varies unless torch.use_deterministic_algorithms is on.
    """

    __slots__ = ("_counts_K2M",)

    def __init__(self, tasks: int = 1, bins: int = 1 << 15) -> None:
        check_positive("tasks", tasks)
        # Two more bins: for logits below and above the axis.
        self._counts_K2M = torch.zeros(tasks, 2, check_positive("bins", bins) + 2, dtype=torch.float64)

    def add(self, samples: Samples, row_NK: Tensor | None = None) -> None:
        """Count samples, which were checked when they were made, in the histograms of `row_NK`, or of their tasks."""
        rows, _, bins = self._counts_K2M.shape
        if row_NK is None:
            samples.check_tasks(rows)
            row_NK = torch.arange(rows, device=samples.logits_NK.device)
        # Indices in float64, which holds integers exactly up to 2**53. Rounding keeps the order of logits, which is
        # all that the bound needs.
        bin_NK = (samples.logits_NK * ((bins - 2) / (2 * AXIS)) + bins / 2).floor_().clamp_(0, bins - 1)
        index_NK = bin_NK.add_(samples.labels_NK, alpha=bins).add_(row_NK * (2 * bins)).long()
        index_NK.clamp_(0, self._counts_K2M.numel() - 1)  # unchecked labels must not write out of bounds
        mass_NK = torch.ones_like(samples.logits_NK) if samples.weights_NK is None else samples.weights_NK
        self._counts_K2M = self._counts_K2M.to(mass_NK.device)
        self._counts_K2M.view(-1).index_add_(0, index_NK.view(-1), mass_NK.reshape(-1))

    def merge(self, other: "BinnedAuc") -> None:
        check_equal("(tasks, 2, bins)", tuple(self._counts_K2M.shape), tuple(other._counts_K2M.shape))
        self._counts_K2M = self._counts_K2M + other._counts_K2M.to(self._counts_K2M.device)

    def counts(self) -> Tensor:
        """Weight of negatives and of positives in each bin, [K, 2, M]."""
        return self._counts_K2M

    def value(self) -> tuple[AucValue, ...]:
        """One area for each task, with its bound."""
        return binned_areas(self._counts_K2M)

    def state(self) -> State:
        tasks, _, bins = self._counts_K2M.shape
        return {"tasks": tasks, "bins": bins - 2, "counts": narrow(self._counts_K2M)}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metric that `state` saved, bit-exactly."""
        metric = cls(read_int(state, "tasks"), read_int(state, "bins"))
        metric._counts_K2M = read_tensor(state, "counts", metric._counts_K2M.shape)
        return metric


class Auc:
    """The area of all samples: exact up to `keep` samples, from a histogram above.

    The histogram is filled from the start, so that no single step has to fill it.
    """

    __slots__ = ("_bins", "_keep", "_kept", "_samples", "_tasks")

    def __init__(self, tasks: int = 1, keep: int = KEEP, bins: int = 1 << 15) -> None:
        self._tasks, self._keep = tasks, check_positive("keep", keep)
        self._bins = BinnedAuc(tasks, bins)
        self._kept: list[Tensor] = []  # chunks of `_scores`
        self._samples = 0  # of all batches; above `keep` no scores are kept

    @property
    def _is_exact(self) -> bool:
        return self._samples <= self._keep

    def add(self, samples: Samples) -> None:
        """Count samples that were checked when they were made."""
        self._bins.add(samples)
        self._extend([_scores(samples)] if self._is_exact else [], len(samples))

    def merge(self, other: "Auc") -> None:
        check_equal("keep", self._keep, other._keep)
        self._bins.merge(other._bins)
        self._extend(other._kept, other._samples)

    def counts(self) -> Tensor:
        """The histogram of all samples; see `BinnedAuc.counts`."""
        return self._bins.counts()

    def value(self) -> tuple[AucValue, ...]:
        """One area for each task; the bound is 0 while areas are exact."""
        return exact_areas(_concatenate_chunks(self._kept, self._tasks)) if self._is_exact else self._bins.value()

    def state(self) -> State:
        parts = {"bins": self._bins.state()}
        if self._is_exact:
            parts["exact"] = {"tasks": self._tasks, "most": self._keep, **_scores_state(self._kept, self._tasks)}
        return {"keep": self._keep, **join(parts)}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metric that `state` saved, bit-exactly."""
        bins, exact = BinnedAuc.from_state(part(state, "bins")), part(state, "exact")
        metric = cls(len(bins.counts()), read_int(state, "keep"), bins=1)
        metric._bins, metric._samples = bins, metric._keep + 1
        if exact:
            scores = _read_scores(exact, None, metric._tasks)
            metric._kept, metric._samples = [scores], scores.shape[1]
        return metric

    def _extend(self, chunks: list[Tensor], samples: int) -> None:
        self._samples += samples
        self._kept = [*self._kept, *chunks] if self._is_exact else []


class RecentAuc:
    """The exact area of the newest `batches`, or of fewer batches, to have at most `most` samples.

    The newest batch is always kept. Windows of several ranks merge batch by batch, newest with newest.
    """

    __slots__ = ("_batches", "_kept", "_most", "_samples", "_tasks")

    def __init__(self, batches: int, tasks: int = 1, most: int = 1 << 20) -> None:
        self._tasks, self._most = check_positive("tasks", tasks), check_positive("most", most)
        self._batches = check_positive("batches", batches)
        self._kept: deque[Tensor] = deque()  # `_scores` of each batch
        self._samples = 0

    def add_batches(self, samples: Samples, sizes: Sequence[int]) -> None:
        """Keep the samples of n batches of these sizes, and drop the oldest beyond the limits."""
        samples.check_tasks(self._tasks)
        self._keep(list(_scores(samples).split(list(sizes), 1)))

    def merge(self, other: "RecentAuc") -> None:
        for name in ("tasks", "batches", "most"):
            check_equal(name, getattr(self, f"_{name}"), getattr(other, f"_{name}"))
        merged = merge_newest(list(self._kept), list(other._kept), lambda a, b: torch.cat([a, b.to(a.device)], 1))
        self._kept, self._samples = deque(), 0
        self._keep(merged)

    def value(self) -> tuple[AucValue, ...]:
        """One area for each task; the bound is 0."""
        return exact_areas(_concatenate_chunks(self._kept, self._tasks))

    def state(self) -> State:
        sizes = torch.tensor([scores.shape[1] for scores in self._kept], dtype=torch.int64)
        settings: State = {"tasks": self._tasks, "batches": self._batches, "most": self._most}
        return {**settings, "sizes": sizes, **_scores_state(self._kept, self._tasks)}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metric that `state` saved, bit-exactly."""
        metric = cls(read_int(state, "batches"), read_int(state, "tasks"), read_int(state, "most"))
        sizes = read_tensor(state, "sizes", (None,), torch.int64).tolist()
        scores = _read_scores(state, sum(sizes), metric._tasks)
        # Copies: views would keep the memory of the whole window alive.
        metric._keep([chunk.clone() for chunk in scores.split(sizes, 1)])
        return metric

    def _keep(self, chunks: list[Tensor]) -> None:
        self._kept.extend(chunks)
        self._samples += sum(chunk.shape[1] for chunk in chunks)
        while len(self._kept) > self._batches or (self._samples > self._most and len(self._kept) > 1):
            self._samples -= self._kept.popleft().shape[1]


def exact_areas(scores_3NK: Tensor) -> tuple[AucValue, ...]:
    """The area of each task, from the `_scores` of its samples."""
    with one_thread():
        return tuple(_exact(*_order_ties(scores_3NK[:, :, k])) for k in range(scores_3NK.shape[2]))


def binned_areas(counts_K2M: Tensor) -> tuple[AucValue, ...]:
    """The area of each task with its bound, from histograms."""
    with one_thread():
        shares_K2M = counts_K2M / counts_K2M.sum(2, keepdim=True)
        below_K2M = shares_K2M.cumsum(2)
        negative_KM, positive_KM = shares_K2M.unbind(1)
        # A positive scores above the negatives of lower bins, and ties with those of its own bin.
        auc_K = (positive_KM * (below_K2M[:, 0] - negative_KM / 2)).sum(1)
        bound_K = (positive_KM * negative_KM).sum(1) / 2
    return tuple(_area(auc, bound) for auc, bound in torch.stack([auc_K, bound_K], 1).tolist())


def _order_ties(scores_3N: Tensor) -> Tensor:
    """Sort samples by mass, so that sums over equal logits have the same bits for any order of batches and ranks."""
    if bool((scores_3N[1] + scores_3N[2] == 1).all()):  # counts add exactly in any order
        return scores_3N
    for row in (2, 1):
        scores_3N = scores_3N[:, scores_3N[row].argsort(stable=True)]
    return scores_3N


def _exact(logits_N: Tensor, positive_N: Tensor, negative_N: Tensor) -> AucValue:
    if not len(logits_N):
        return _area(math.nan, math.nan)
    keys_N, order_N = _sort_logits(logits_N)
    # The ROC curve has corners between distinct scores only; a straight line through ties counts them half.
    last_E = torch.cat([keys_N[1:] != keys_N[:-1], keys_N.new_ones(1, dtype=torch.bool)]).nonzero().squeeze(1)
    positive_E, negative_E = (
        mass_N.index_select(0, order_N).cumsum(0).index_select(0, last_E) for mass_N in (positive_N, negative_N)
    )
    # Plus the triangle from the origin to the first corner.
    area = torch.trapezoid(negative_E, positive_E) + negative_E[0] * positive_E[0] / 2
    return _area((area / (negative_E[-1] * positive_E[-1])).item(), 0.0)


def _sort_logits(logits_N: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending sort keys, ordered and tied as the logits are, and the index of each in `logits_N`."""
    narrow_N = logits_N.float()
    if not torch.equal(narrow_N.double(), logits_N):
        return logits_N.sort(stable=True)
    # A model's logits are float32. Read as int32, with all bits but the sign flipped for negative numbers, they have
    # the same order, and torch sorts integers by radix sort, ten times as fast as float64.
    bits_N = (narrow_N + 0.0).view(torch.int32)  # adding 0 makes -0 a 0, as they tie
    return (bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)).sort(stable=True)


def _area(auc: float, bound: float) -> AucValue:
    return AucValue(math.nan, math.nan) if math.isnan(auc) else AucValue(min(max(auc, 0.0), 1.0), bound)


def _scores(samples: Samples) -> Tensor:
    """Logit, mass as a positive and mass as a negative, [3, N, K]."""
    return torch.stack([samples.logits_NK, *samples.masses()])


def _scores_state(chunks: "list[Tensor] | deque[Tensor]", tasks: int) -> State:
    """The scores of a state, six bytes each for float32 logits without weights."""
    scores = _concatenate_chunks(chunks, tasks)
    return {"logits": narrow(scores[0]), "masses": narrow(scores[1:])}


def _read_scores(state: Mapping[str, object], samples: int | None, tasks: int) -> Tensor:
    if "scores" in state:  # of version 0.1
        return read_tensor(state, "scores", (3, samples, tasks))
    logits = read_tensor(state, "logits", (samples, tasks))
    return torch.cat([logits[None], read_tensor(state, "masses", (2, *logits.shape))])


def _concatenate_chunks(chunks: "list[Tensor] | deque[Tensor]", tasks: int) -> Tensor:
    if not chunks:
        return torch.zeros(3, 0, tasks, dtype=torch.float64)
    device = chunks[-1].device  # scores of a restored metric are on the CPU; the newest batch may be on a GPU
    return torch.cat([chunk.to(device) for chunk in chunks], 1)
