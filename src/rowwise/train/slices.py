"""The same metrics for parts of the data: one slice for each chosen value of an integer feature, the rest as "other".

Slices are chosen when it is made, as then sums and histograms are all it keeps: memory is bounded, every sample is in
exactly one slice from the first, and merging is an addition. `most_common` chooses them from a sample of the data;
`value(top=...)` shows the largest and folds what it leaves out into "other", which is as exact as if they had never
been chosen.

Letters: N samples, K tasks, S slices ("other" comes last), M bins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rowwise.errors import BatchError, SpecError
from rowwise.train.auc import AucValue, BinnedAuc, binned_areas
from rowwise.train.entropy import Entropy, EntropyValue, fits
from rowwise.train.exact import carry, to_float64
from rowwise.train.samples import Samples
from rowwise.train.state import State, check_alike, check_positive, join, part, read_int, read_tensor


@dataclass(frozen=True, slots=True)
class SliceMetrics:
    """The id of a slice, None for all ids that were not chosen, and the metrics of each task."""

    id: int | None
    fits: tuple[EntropyValue, ...]
    areas: tuple[AucValue, ...]

    @property
    def count(self) -> int:
        """Samples of a weight above 0, of all tasks together."""
        return sum(fit.count for fit in self.fits)


class Slices:
    """Fit and binned area of each slice. `bins` are fewer than for a whole data set, as there is one set a slice."""

    __slots__ = ("_auc", "_entropy", "_ids_S", "_tasks")

    def __init__(self, ids: Sequence[int], tasks: int = 1, bins: int = 1 << 11) -> None:
        wrong = [i for i in ids if type(i) is not int or not -(1 << 63) <= i < 1 << 63]
        if wrong:
            raise SpecError(f"slice id {wrong[0]!r}: want a whole number of 64 bits; hash strings first")
        if len(set(ids)) != len(ids):
            raise SpecError(f"{len(ids)} slice ids, of which {len(set(ids))} are different: want each once")
        self._tasks = check_positive("tasks", tasks)
        self._ids_S = torch.tensor(sorted(ids), dtype=torch.int64)
        rows = (len(ids) + 1) * tasks
        self._entropy, self._auc = Entropy(rows), BinnedAuc(rows, bins)

    def update(self, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor | None = None) -> None:
        """Count a batch, with one id for each sample."""
        self.add(Samples.of(logits, labels, weights), ids)

    def add(self, samples: Samples, ids_N: Tensor) -> None:
        """Count a batch that is checked already."""
        samples.check_tasks(self._tasks)
        if ids_N.dtype not in (torch.int32, torch.int64) or ids_N.shape != samples.logits_NK.shape[:1]:
            got = f"{ids_N.dtype} {tuple(ids_N.shape)}"
            raise BatchError(f"slice ids: got {got}; want int32 or int64 of shape ({len(samples.logits_NK)},)")
        row_NK = self._slice_of(ids_N).unsqueeze(1) * self._tasks + torch.arange(self._tasks, device=ids_N.device)
        self._entropy.add_rows(samples, row_NK)
        self._auc.add_rows(samples, row_NK)

    def merge(self, other: "Slices") -> None:
        """Count what another has counted."""
        check_alike("tasks", self._tasks, other._tasks)
        check_alike("ids", self._ids_S.tolist(), other._ids_S.tolist())
        self._auc.merge(other._auc)  # first, as it refuses other bins
        self._entropy.merge(other._entropy)

    def value(self, top: int | None = None) -> list[SliceMetrics]:
        """The slices that hold samples, largest first, and "other" (of id None) last; or the `top` largest of them."""
        parts_35SK = self._entropy.totals().unflatten(2, (-1, self._tasks))
        counts_SK2M = self._auc.counts().unflatten(0, (-1, self._tasks))
        chosen, rest = self._split(to_float64(parts_35SK)[0].sum(1).tolist(), top)
        ids = self._ids_S.tolist()
        shown = [SliceMetrics(ids[s], fits(parts_35SK[:, :, s]), binned_areas(counts_SK2M[s])) for s in chosen]
        other = SliceMetrics(None, fits(carry(parts_35SK[:, :, rest].sum(2))), binned_areas(counts_SK2M[rest].sum(0)))
        return [*shown, other]

    def state(self) -> State:
        return {"tasks": self._tasks, "ids": self._ids_S, **join({"entropy": self._entropy, "auc": self._auc})}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """Restore the metrics from `state`, to the same bits."""
        ids = read_tensor(state, "ids", (None,), torch.int64).tolist()
        made = cls(ids, read_int(state, "tasks"), bins=1)
        rows = (len(ids) + 1) * made._tasks
        made._entropy = Entropy.from_state({**part(state, "entropy"), "tasks": rows})
        made._auc = BinnedAuc.from_state({**part(state, "auc"), "tasks": rows})
        return made

    def _slice_of(self, ids_N: Tensor) -> Tensor:
        self._ids_S = self._ids_S.to(ids_N.device)
        last = len(self._ids_S)
        if not last:
            return torch.zeros_like(ids_N, dtype=torch.int64)
        at_N = torch.searchsorted(self._ids_S, ids_N.long())
        return torch.where(self._ids_S[at_N.clamp(max=last - 1)] == ids_N, at_N, last)

    def _split(self, sizes: list[float], top: int | None) -> tuple[list[int], list[int]]:
        """Slices to show, largest first, and those that make up "other"; equal sizes in the order of their ids."""
        last = len(sizes) - 1
        filled = sorted((s for s in range(last) if sizes[s]), key=lambda s: -sizes[s])
        most = len(filled) if top is None else check_positive("top", top)
        # Those without samples add nothing to "other".
        return filled[:most], [*filled[most:], last]


def most_common(ids_N: Tensor, most: int) -> list[int]:
    """The ids that occur most often, at most so many; of those that occur equally often, the smallest."""
    found, counts = ids_N.unique(return_counts=True)
    return found[(-counts).argsort(stable=True)[: check_positive("most", most)]].tolist()
