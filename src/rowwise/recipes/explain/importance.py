"""Importance of features by permutation, effects of ids, and partial dependence on numbers.

[Note: Permutation] A feature's importance is the rise of the loss when its values are permuted among rows: they keep
their distribution and lose their relation to the label. Correlated features share importance, as permuting one leaves
the other. Each repeat has another permutation; the spread over repeats is the noise of the estimate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.records import Dependence, IdEffect, Importance
from rowwise.models.inference import autocast, evaluation_mode
from rowwise.recipes.explain.rows import HeldRows, pieces
from rowwise.tables.batch import Batch
from rowwise.train.evaluate import NONE as NO_ID
from rowwise.train.evaluate import ids_or_none
from rowwise.train.on_device import to_device
from rowwise.train.settings import Training

GRID = 11  # points of a dependence: minimum, deciles and maximum
MIN_ROWS_OF_ID = 20


@dataclass(kw_only=True)
class Scorer:
    """Logits and losses of one task of a model."""

    model: nn.Module
    task: int
    batch: int
    training: Training

    def logits(self, batch: Batch) -> Tensor:
        """Logits [N] of the rows of a batch."""
        logits: list[Tensor] = []
        with evaluation_mode(self.model), autocast(self.training.device, self.training.precision):
            for piece in pieces(batch, self.batch):
                outputs_NK = self.model(to_device(piece, self.model, self.training.device))
                logits.append(outputs_NK[:, self.task].float().cpu())
        return torch.cat(logits)

    def loss(self, rows: HeldRows, logits_N: Tensor) -> float:
        """The mean log loss, by the weights of the rows."""
        labels_N, weights_N = rows.batch.labels_BK[:, self.task], rows.batch.weights_B
        losses_N = F.binary_cross_entropy_with_logits(logits_N.double(), labels_N.double(), reduction="none")
        weights_N = torch.ones_like(losses_N) if weights_N is None else weights_N.double()
        return float((losses_N * weights_N).sum() / weights_N.sum().clamp(min=1e-300))


@dataclass
class Permuted:
    """Results of the permutations of a feature so far."""

    losses: list[float] = field(default_factory=list)
    change_N: Tensor | None = None  # change of the logits, summed over repeats


class Permutations(NamedTuple):
    """The permutations of each feature: `repeats`, but none after the first one begins after `until_s`."""

    repeats: int
    until_s: float  # of time.monotonic
    seed: int


def permute_features(
    scorer: Scorer,
    rows: HeldRows,
    base_N: Tensor,
    features: Sequence[tuple[str, int | None]],
    permutations: Permutations,
    report: Callable[[int, int], None],
) -> dict[str, Permuted]:
    """Score the rows with each feature permuted.

    Args:
        scorer: scorer of the model.
        rows: rows to score.
        base_N: logits of the unchanged rows.
        features: names, with the column of dense features.
        permutations: number of repeats, and their deadline.
        report: called with the number of finished permutations and the total.
    """
    permuted = {name: Permuted() for name, _ in features}
    base, total = scorer.loss(rows, base_N), permutations.repeats * len(features)
    for repeat in range(permutations.repeats):
        if repeat and monotonic() > permutations.until_s:
            break
        order_N = torch.randperm(len(rows), generator=torch.Generator().manual_seed(permutations.seed + repeat))
        for number, (name, column) in enumerate(features, 1):
            if column is None:
                batch = rows.with_bags_of(name, order_N)
            else:
                batch = rows.with_numbers_of(column, rows.batch.dense_BF[order_N, column])
            logits_N = scorer.logits(batch)
            result = permuted[name]
            result.losses.append(scorer.loss(rows, logits_N) - base)
            result.change_N = base_N - logits_N if result.change_N is None else result.change_N + base_N - logits_N
            report(repeat * len(features) + number, total)
    return permuted


def importances(permuted: dict[str, Permuted]) -> tuple[Importance, ...]:
    """The most important feature first."""
    ranking = [
        Importance(
            feature=name,
            loss=fmean(result.losses),
            spread=stdev(result.losses) if len(result.losses) > 1 else 0.0,
            repeats=len(result.losses),
        )
        for name, result in permuted.items()
        if result.losses
    ]
    return tuple(sorted(ranking, key=lambda importance: -importance.loss))


def id_effects(rows: HeldRows, permuted: dict[str, Permuted], features: Sequence[str], max_ids: int) -> list[IdEffect]:
    """The ids with the largest effects beyond their error, in rows with one id; at most `max_ids` per feature."""
    effects: list[IdEffect] = []
    for name in features:
        result = permuted[name]
        if result.change_N is None:
            continue
        ids_N = ids_or_none(rows.batch, name)
        ids_M, changes_M = ids_N[ids_N != NO_ID], result.change_N[ids_N != NO_ID].double() / len(result.losses)
        ids_U, inverse_M, counts_U = torch.unique(ids_M, return_inverse=True, return_counts=True)
        means_U = torch.zeros(len(ids_U), dtype=torch.float64).index_add_(0, inverse_M, changes_M) / counts_U
        squares_U = torch.zeros_like(means_U).index_add_(0, inverse_M, (changes_M - means_U[inverse_M]) ** 2)
        errors_U = (squares_U / (counts_U - 1).clamp(min=1) / counts_U).sqrt()
        strength_U = torch.where(counts_U >= MIN_ROWS_OF_ID, means_U.abs() - errors_U, -1.0)
        for index in strength_U.argsort(descending=True)[:max_ids].tolist():
            if strength_U[index] > 0:
                values = {"logit": float(means_U[index]), "error": float(errors_U[index]), "rows": int(counts_U[index])}
                effects.append(IdEffect(feature=name, id=int(ids_U[index]), **values))
    return effects


def dependence(scorer: Scorer, rows: HeldRows, feature: str, column: int) -> Dependence:
    """The mean probability at the quantiles of a dense feature."""
    numbers_N = rows.batch.dense_BF[:, column]
    values = torch.quantile(numbers_N, torch.linspace(0, 1, GRID)).unique()
    scored = (scorer.logits(rows.with_numbers_of(column, value)) for value in values)
    means = [float(logits_N.double().sigmoid().mean()) for logits_N in scored]
    return Dependence(feature=feature, values=tuple(values.tolist()), probability=tuple(means))
