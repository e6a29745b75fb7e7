"""Streaming evaluation: one pass over the batches, which keeps only sums, histograms and a bounded sample.

An `Evaluator` is a function without arguments that returns scores: `ClickEvaluator` for click models,
`RetrievalEvaluator` (`retrieve.py`) for two towers.

Each rank scores its part of every batch, rank 0 merges the counts, and all ranks get its scores.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.histories import items_of
from rowwise.models.inference import autocast, evaluation_mode
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.status import all_gather_uneven, broadcast_object, gather_object
from rowwise.tables.batch import Batch
from rowwise.train.amounts import AmountMetrics, Values, metric_names
from rowwise.train.loss_settings import AmountLoss, AnyLoss
from rowwise.train.metrics import METRICS, Metrics, named_values
from rowwise.train.on_device import to_device
from rowwise.train.ranks import Lockstep
from rowwise.train.reliability import RateGroup
from rowwise.train.samples import Samples
from rowwise.train.settings import Training
from rowwise.train.slices import Slices, most_common
from rowwise.train.state import State

LabelMetrics = Metrics | AmountMetrics
# Ids by feature -> their names before encoding, by feature and id.
NameIds = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Mapping[int, str]]]


@dataclass(frozen=True, slots=True)
class SliceRow:
    """A line of slices.csv: the samples with one id of a feature; `value` is its name, None for all other ids."""

    feature: str
    value: str | None
    task: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Scores:
    """The metrics of an evaluation."""

    tasks: Mapping[str, Values]
    slices: tuple[SliceRow, ...] = ()
    rates: tuple[RateGroup, ...] = ()


class Evaluator(Protocol):
    """Measures the current state of a model."""

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def __call__(self) -> Scores:
        """The scores, the same on all ranks; a collective."""
        ...


NONE = -(1 << 63)  # in place of an id, for a sample with no id or several


@dataclass(frozen=True, slots=True)
class Slicing:
    """The features whose `ids` most common ids are measured separately."""

    features: tuple[str, ...] = ()
    ids: int = 10

    def __post_init__(self) -> None:
        if len(set(self.features)) < len(self.features):
            raise SpecError(f"slices {', '.join(self.features)}", "each feature once")


@final
class ClickEvaluator:
    """Log loss, NE, AUC and calibration of a model with a logit for each label, or the metrics of amounts.

    Args:
        model: set to evaluation mode during the pass.
        batches: called for each evaluation; returns this rank's batches.
        tasks: names of the labels.
        training: device and precision, as in training.
        slicing: ids whose samples are measured separately.
        comm: the ranks of the model; a single rank by default.
        name_ids: returns the names of the ids that have slices, by feature.
    """

    def __init__(  # noqa: PLR0913 - options
        self,
        model: nn.Module,
        batches: Callable[[], Iterable[Batch]],
        tasks: Sequence[str],
        training: Training,
        slicing: Slicing | None = None,
        comm: Comm | None = None,
        *,
        name_ids: NameIds = lambda chosen: {feature: {i: str(i) for i in ids} for feature, ids in chosen.items()},
    ) -> None:
        self._comm, self._name_ids = comm or solo(), name_ids
        self._loss = training.objective
        self._names: Mapping[str, Mapping[int, str]] = {}  # on rank 0
        self._model, self._batches, self._tasks, self._training = model, batches, tuple(tasks), training
        self._slicing = slicing or Slicing()

    @property
    def metrics(self) -> tuple[str, ...]:
        return metric_names(self._loss) if isinstance(self._loss, AmountLoss) else METRICS

    def __call__(self) -> Scores:
        counted = _CountedSamples(make_metrics(self._tasks, 1, self._loss), {})
        amounts = isinstance(self._loss, AmountLoss)
        steps = Lockstep(self._comm)
        with evaluation_mode(self._model):
            for host_batch in steps.iterate(self._batches):
                batch = to_device(host_batch, self._model, self._training.device)
                if not counted.slices:
                    counted.slices.update(self._choose_slices(batch, steps))
                with steps.deferring_errors():
                    with autocast(self._training.device, self._training.precision):
                        logits_BK = self._model(batch)
                    samples = Samples.of(logits_BK.float(), batch.labels_BK, batch.weights_B, amounts=amounts)
                    counted.metrics.add(samples)
                    for feature, parts in counted.slices.items():
                        parts.add(samples, ids_or_none(batch, feature).to(samples.logits_NK.device))
        return self._gather_scores(counted)

    def _choose_slices(self, batch: Batch, steps: Lockstep) -> dict[str, Slices]:
        """The most common ids of the first batch, of all ranks; the same in every evaluation, as rows are in order."""
        slices: dict[str, Slices] = {}
        for feature in self._slicing.features:
            ids_N = torch.empty(0, dtype=torch.int64)
            with steps.deferring_errors():  # this rank must still take part in the gather below
                ids_B = ids_or_none(batch, feature)
                ids_N = ids_B[ids_B != NONE]
            if len(self._comm.ranks) > 1:
                ids_N = torch.cat(all_gather_uneven(self._comm, ids_N.cpu(), "slices"))
            slices[feature] = Slices(most_common(ids_N, self._slicing.ids), len(self._tasks))
        chosen = {feature: parts.ids for feature, parts in slices.items()}
        if self._comm.rank == 0 and chosen != {feature: sorted(names) for feature, names in self._names.items()}:
            with steps.deferring_errors():
                self._names = self._name_ids(chosen)
        return slices

    def _gather_scores(self, local: "_CountedSamples") -> Scores:
        """The scores over the samples of all ranks; merges their counts into `local` on rank 0."""
        if len(self._comm.ranks) == 1:
            return self._scores(local)
        states = gather_object(self._comm, local.state(), "scores")
        for state in states[1:] if states else ():
            local.merge(state)
        return broadcast_object(self._comm, self._scores(local) if states else None, 0, "scores")

    def _scores(self, counted: "_CountedSamples") -> Scores:
        metrics = counted.metrics.value()
        rows = (
            row
            for feature, parts in counted.slices.items()
            for row in _slice_rows(feature, parts, self._tasks, self._names[feature])
        )
        return Scores({task: metrics[task].all for task in self._tasks}, tuple(rows), counted.metrics.rates())


@dataclass(frozen=True, slots=True)
class _CountedSamples:
    """Metrics and slices of the samples of one pass."""

    metrics: LabelMetrics
    slices: dict[str, Slices]

    def state(self) -> tuple[State, dict[str, State]]:
        return self.metrics.state(), {feature: parts.state() for feature, parts in self.slices.items()}

    def merge(self, state: tuple[State, dict[str, State]]) -> None:
        metrics, slices = state
        self.metrics.merge_state(metrics)
        for feature, parts in slices.items():
            self.slices[feature].merge(Slices.from_state(parts))


def ids_or_none(batch: Batch, feature: str) -> Tensor:
    """The id [B] of a feature in each sample; NONE for a sample with no id or several."""
    ids_N, lengths_B = items_of(batch.sparse, feature)
    begin_B, single_B = lengths_B.cumsum(0) - lengths_B, lengths_B == 1
    ids_B = torch.full_like(begin_B, NONE)
    ids_B[single_B] = ids_N[begin_B[single_B]].long()
    return ids_B


def make_metrics(tasks: Sequence[str], window: int, loss: AnyLoss) -> LabelMetrics:
    """The metrics that are measured of labels with this loss."""
    return AmountMetrics(tasks, window, loss) if isinstance(loss, AmountLoss) else Metrics(tasks, window=window)


def undefined(tasks: Mapping[str, Mapping[str, float | None]], rows: str) -> tuple[str, ...]:
    """A warning for each label that is constant over the measured rows: its AUC, NE and R2 are undefined."""
    lines: list[str] = []
    for task, values in tasks.items():
        score, label = values.get("auc", values.get("r2", 0.0)), values.get("base_rate")
        if (score is None or math.isnan(score)) and label is not None and math.isfinite(label):
            names = "AUC and NE" if "auc" in values else "R2"
            problem = f"the label {task!r} is {label:g} in all {int(values.get('count') or 0):,} {rows} rows"
            lines.append(f"{problem}, so they have no {names}: expected rows with other labels, too")
    return tuple(lines)


def _slice_rows(feature: str, parts: Slices, tasks: Sequence[str], names: Mapping[int, str]) -> Iterable[SliceRow]:
    for part in parts.value():
        if not part.count:  # "other" is empty if every id has a line
            continue
        for task, fit, area in zip(tasks, part.fits, part.areas, strict=True):
            name = None if part.id is None else names[part.id]
            yield SliceRow(feature, name, task, named_values(fit, area))
