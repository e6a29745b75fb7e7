"""Ranking metrics of retrieval: recall@k, NDCG@k and MRR over lists of scored candidates.

    recall@k   positives among the first k / positives
    NDCG@k     sum over positives among the first k of 1 / log2(1 + rank), over the largest possible sum
    MRR        1 / rank of the first positive

A broken model gives equal scores, so the rank of ties decides whether it looks good. Each metric is the expectation
over random orders of tied candidates. Lists without a positive, or of weight 0, are left out of the means; a mean over
no lists is NaN.

Letters: B lists, C candidates, P positives of a list, T totals.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, SpecError
from rowwise.train.state import State, check_equal, check_positive, read_tensor


@dataclass(frozen=True, slots=True)
class RankingValues:
    """Means over lists; recall and NDCG for each k."""

    lists: int  # with a positive and of a weight above 0
    recall: dict[int, float]
    ndcg: dict[int, float]
    mrr: float


class Ranking:
    """The ranking metrics over all lists."""

    __slots__ = ("_ks", "_totals_T")

    def __init__(self, ks: Sequence[int] = (10, 50)) -> None:
        self._ks = tuple(check_positive("k", k) for k in ks)
        if len(set(self._ks)) != len(self._ks):
            raise SpecError(f"ks={self._ks}", "each k once")
        # T: number of lists, sum of weights, reciprocal ranks, recall for each k, NDCG for each k.
        self._totals_T = torch.zeros(3 + 2 * len(self._ks), dtype=torch.float64)

    def update(self, scores: Tensor, positives: Tensor, weights: Tensor | None = None) -> None:
        """Count lists: scores [B, C], indices of positives [B] or [B, P] padded with -1, weights [B]."""
        positives_BP = positives.unsqueeze(1) if positives.dim() == 1 else positives
        _check(scores, positives_BP, weights)
        if not positives_BP.shape[1] or not len(scores):
            return
        valid_BP = positives_BP >= 0
        above_BP, tied_BP = _count_above_and_tied(scores, positives_BP.long().clamp(min=0))
        weights_B = torch.ones(len(scores), device=scores.device) if weights is None else weights
        weights_B1 = weights_B.double().unsqueeze(1)
        counted_B1 = valid_BP.any(1, keepdim=True) & (weights_B1 > 0)
        values_B = [torch.ones_like(weights_B1[:, 0]), _reciprocal(above_BP, tied_BP, valid_BP)]
        values_B += [_recall(above_BP, tied_BP, valid_BP, k) for k in self._ks]
        values_B += [_ndcg(above_BP, tied_BP, valid_BP, k) for k in self._ks]
        # `where`, as the values of a list without positives are NaN, also after multiplying by 0.
        values_BT = torch.where(counted_B1, torch.stack(values_B, 1) * weights_B1, 0.0)
        totals_T = torch.cat([counted_B1.double(), values_BT], 1).sum(0)
        self._totals_T = self._totals_T.to(scores.device) + totals_T

    def merge(self, other: "Ranking") -> None:
        check_equal("ks", self._ks, other._ks)
        self._totals_T = self._totals_T + other._totals_T.to(self._totals_T.device)

    def value(self) -> RankingValues:
        lists, weight, *sums = self._totals_T.tolist()
        mrr, *at_k = (total / weight if weight else math.nan for total in sums)
        half = len(self._ks)
        recall, ndcg = (dict(zip(self._ks, part, strict=True)) for part in (at_k[:half], at_k[half:]))
        return RankingValues(round(lists), recall, ndcg, mrr)

    def state(self) -> State:
        return {"ks": torch.tensor(self._ks, dtype=torch.int64), "totals": self._totals_T}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metric that `state` saved, bit-exactly."""
        metric = cls(read_tensor(state, "ks", (None,), torch.int64).tolist())
        metric._totals_T = read_tensor(state, "totals", metric._totals_T.shape)
        return metric


def _count_above_and_tied(scores_BC: Tensor, positives_BP: Tensor) -> tuple[Tensor, Tensor]:
    """For each positive, the numbers of candidates that score higher and that score the same, itself included."""
    # Lists have few positives, so a pass over the candidates for each positive is cheaper than sorting.
    columns = scores_BC.gather(1, positives_BP).split(1, dim=1)
    above_BP = torch.stack([(scores_BC > score_B1).sum(1) for score_B1 in columns], 1)
    return above_BP, torch.stack([(scores_BC == score_B1).sum(1) for score_B1 in columns], 1)


def _recall(above_BP: Tensor, tied_BP: Tensor, valid_BP: Tensor, k: int) -> Tensor:
    inside_BP = (k - above_BP).clamp(min=0).minimum(tied_BP).double() / tied_BP
    return (inside_BP * valid_BP).sum(1) / valid_BP.sum(1)


def _ndcg(above_BP: Tensor, tied_BP: Tensor, valid_BP: Tensor, k: int) -> Tensor:
    # gain[n]: the sum of the gains of the first n ranks, for n up to k.
    ranks = torch.arange(1, k + 1, dtype=torch.float64, device=above_BP.device)
    gain = torch.cat([ranks.new_zeros(1), (1 / torch.log2(1 + ranks)).cumsum(0)])
    mean_BP = (gain[(above_BP + tied_BP).clamp(max=k)] - gain[above_BP.clamp(max=k)]) / tied_BP
    return (mean_BP * valid_BP).sum(1) / gain[valid_BP.sum(1).clamp(max=k)]


def _reciprocal(above_BP: Tensor, tied_BP: Tensor, valid_BP: Tensor) -> Tensor:
    """Expected 1 / rank of the first positive: `hits` positives among `tied` candidates, below `above` others."""
    above_B, first_B = torch.where(valid_BP, above_BP, torch.iinfo(above_BP.dtype).max).min(1)
    tied_B = tied_BP.gather(1, first_B.unsqueeze(1)).squeeze(1)
    hits_B = (valid_BP & (above_BP == above_B.unsqueeze(1))).sum(1)
    # missed[n]: the chance that none of the hits is among the first n of a random order, where n = 0 .. tied - hits.
    n = torch.arange(int((tied_B - hits_B).max()) + 1, device=above_BP.device)
    left_BN = tied_B.unsqueeze(1) - n
    missed_BN = ((left_BN - hits_B.unsqueeze(1)).clamp(min=0) / left_BN.clamp(min=1).double()).cumprod(1)
    before_BN = torch.cat([torch.ones_like(missed_BN[:, :1]), missed_BN[:, :-1]], 1)
    return ((before_BN - missed_BN) / (above_B.unsqueeze(1).double() + n + 1)).sum(1)


def _check(scores_BC: Tensor, positives_BP: Tensor, weights_B: Tensor | None) -> None:
    if scores_BC.dim() != 2 or not scores_BC.is_floating_point():
        raise BatchError(f"scores: got {scores_BC.dtype} {tuple(scores_BC.shape)}", "floats [lists, candidates]")
    lists, candidates = scores_BC.shape
    integers = positives_BP.dtype in (torch.int32, torch.int64)
    if not integers or positives_BP.dim() != 2 or len(positives_BP) != lists:
        raise BatchError(
            f"positives: got {positives_BP.dtype} {tuple(positives_BP.shape)}",
            f"int32 or int64 of shape [{lists}] or [{lists}, any], -1 for none",
        )
    if weights_B is not None and weights_B.shape != (lists,):
        raise BatchError(f"weights: got shape {tuple(weights_B.shape)}", f"({lists},), one for each list")
    _raise_if_any(scores_BC, scores_BC.isnan(), "score", "a number")
    outside_BP = (positives_BP < -1) | (positives_BP >= candidates)
    _raise_if_any(positives_BP, outside_BP, "positive", f"-1 for none, or a place among the {candidates} candidates")
    if weights_B is not None:
        wrong_B = ~((weights_B >= 0) & (weights_B < math.inf))
        _raise_if_any(weights_B, wrong_B, "weight", "a finite number that is not negative")
    sorted_BP = positives_BP.sort(1)[0]
    twice_BP = (sorted_BP[:, 1:] == sorted_BP[:, :-1]) & (sorted_BP[:, 1:] >= 0)
    _raise_if_any(sorted_BP[:, 1:], twice_BP, "positive", "each positive once")


def _raise_if_any(values: Tensor, wrong: Tensor, name: str, expected: str) -> None:
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise BatchError(f"{name} of list {first[0]} is {values[first].item()}", expected)
