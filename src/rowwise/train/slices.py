"""Metrics of parts of the data: a slice for each chosen id of a feature, and "other" for the rest.

The ids are chosen before the first sample. So memory is bounded to sums and histograms, every sample is in exactly one
slice, and merging is an addition. `most_common` chooses ids from a sample of the data; `value(top=...)` returns the
largest slices and adds the others to "other", exactly.

Letters: N samples, K tasks, S slices ("other" comes last), M bins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, SpecError
from rowwise.train.auc import AucValue, BinnedAuc, binned_areas
from rowwise.train.entropy import SUMS, EntropyValue, add_rows, fits, read_sums, sums_state
from rowwise.train.exact import PARTS, carry, to_float64
from rowwise.train.samples import Samples
from rowwise.train.state import State, check_equal, check_positive, join, part, read_int, read_tensor


@dataclass(frozen=True, slots=True)
class SliceMetrics:
    """The id of a slice (None for "other") and the metrics of each task."""

    id: int | None
    fits: tuple[EntropyValue, ...]
    areas: tuple[AucValue, ...]

    @property
    def count(self) -> int:
        """Samples of a weight above 0, of all tasks together."""
        return sum(fit.count for fit in self.fits)


class Slices:
    """Sums and histogram of each slice, of fewer `bins` than that of all data."""

    __slots__ = ("_auc", "_ids_S", "_parts_35R", "_tasks")

    def __init__(self, ids: Sequence[int], tasks: int = 1, bins: int = 1 << 11) -> None:
        invalid = [i for i in ids if type(i) is not int or not -(1 << 63) <= i < 1 << 63]
        if invalid:
            raise SpecError(f"slice id {invalid[0]!r}", "a whole number of 64 bits", hint="hash strings first")
        if len(set(ids)) != len(ids):
            raise SpecError(f"{len(ids)} slice ids, of which {len(set(ids))} are distinct", "each id once")
        self._tasks = check_positive("tasks", tasks)
        self._ids_S = torch.tensor(sorted(ids), dtype=torch.int64)
        rows = (len(ids) + 1) * tasks
        self._parts_35R = torch.zeros(PARTS, SUMS, rows, dtype=torch.float64)
        self._auc = BinnedAuc(rows, bins)

    @property
    def ids(self) -> list[int]:
        """The chosen ids, ascending."""
        return self._ids_S.tolist()

    def add(self, samples: Samples, ids_N: Tensor) -> None:
        """Count samples, which were checked when they were made; `ids_N` has the id of each."""
        samples.check_tasks(self._tasks)
        if ids_N.dtype not in (torch.int32, torch.int64) or ids_N.shape != samples.logits_NK.shape[:1]:
            raise BatchError(
                f"slice ids: got {ids_N.dtype} {tuple(ids_N.shape)}",
                f"int32 or int64 of shape ({len(samples.logits_NK)},)",
            )
        row_NK = self._slice_of(ids_N).unsqueeze(1) * self._tasks + torch.arange(self._tasks, device=ids_N.device)
        self._parts_35R = add_rows(self._parts_35R, samples, row_NK)
        self._auc.add(samples, row_NK)

    def merge(self, other: "Slices") -> None:
        check_equal("tasks", self._tasks, other._tasks)
        check_equal("ids", self._ids_S.tolist(), other._ids_S.tolist())
        self._auc.merge(other._auc)  # first, as it raises for other bins
        self._parts_35R = carry(self._parts_35R + other._parts_35R.to(self._parts_35R.device))

    def value(self, top: int | None = None) -> list[SliceMetrics]:
        """The slices with samples, or the `top` largest of them, in descending size; then "other", of id None."""
        parts_35SK = self._parts_35R.unflatten(2, (-1, self._tasks))
        counts_SK2M = self._auc.counts().unflatten(0, (-1, self._tasks))
        chosen, rest = self._split(to_float64(parts_35SK)[0].sum(1).tolist(), top)
        ids = self._ids_S.tolist()
        slices = [SliceMetrics(ids[s], fits(parts_35SK[:, :, s]), binned_areas(counts_SK2M[s])) for s in chosen]
        other = SliceMetrics(None, fits(carry(parts_35SK[:, :, rest].sum(2))), binned_areas(counts_SK2M[rest].sum(0)))
        return [*slices, other]

    def state(self) -> State:
        parts = {"entropy": sums_state(self._parts_35R), "auc": self._auc.state()}
        return {"tasks": self._tasks, "ids": self._ids_S, **join(parts)}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Self:
        """The metric that `state` saved, bit-exactly."""
        ids = read_tensor(state, "ids", (None,), torch.int64).tolist()
        metric = cls(ids, read_int(state, "tasks"), bins=1)
        rows = (len(ids) + 1) * metric._tasks
        metric._parts_35R = read_sums(part(state, "entropy"), (SUMS, rows))
        metric._auc = BinnedAuc.from_state({**part(state, "auc"), "tasks": rows})
        return metric

    def _slice_of(self, ids_N: Tensor) -> Tensor:
        self._ids_S = self._ids_S.to(ids_N.device)
        last = len(self._ids_S)
        if not last:
            return torch.zeros_like(ids_N, dtype=torch.int64)
        index_N = torch.searchsorted(self._ids_S, ids_N.long())
        return torch.where(self._ids_S[index_N.clamp(max=last - 1)] == ids_N, index_N, last)

    def _split(self, sizes: list[float], top: int | None) -> tuple[list[int], list[int]]:
        """The slices to return, largest first (ties by id), and the slices to add to "other"."""
        last = len(sizes) - 1
        filled = sorted((s for s in range(last) if sizes[s]), key=lambda s: -sizes[s])
        count = len(filled) if top is None else check_positive("top", top)
        return filled[:count], [*filled[count:], last]


def most_common(ids_N: Tensor, most: int) -> list[int]:
    """At most `most` ids, the most common first; ties by id."""
    ids_U, counts_U = ids_N.unique(return_counts=True)
    return ids_U[(-counts_U).argsort(stable=True)[: check_positive("most", most)]].tolist()
