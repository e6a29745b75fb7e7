"""An exhaustive search in slices of the items, so that other requests are served between slices.

The answer is bitwise that of `nearest_items`: each dot product is summed independently of the slice, and a running top
k loses no item of the total top k.
"""

from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from rowwise.models.retrieval import largest
from rowwise.tables.ops.interact import dots

SLICE_bytes = 4 << 20  # of vectors: some milliseconds, even on a busy memory bus


class ItemFilter(NamedTuple):
    """Allowed items of an answer, by row number."""

    among_A: Tensor | None = None  # sorted and unique; None for all
    without_W: Tensor | None = None  # sorted and unique; None for none

    @property
    def excluded(self) -> int:
        return 0 if self.without_W is None else len(self.without_W)


class NearItems(NamedTuple):
    """Items for a query, best first."""

    places_K: Tensor
    dots_K: Tensor
    exact: bool  # all allowed items were searched


@final
class ItemScan:
    """Top k search over the allowed items; `step` searches the next slice.

    Args:
        query_D: a float32 vector on the CPU.
        items_ID: vectors of items.
        k: at least 1.
        allowed: the filter.
        slice_bytes: size of the vectors of a slice.
    """

    def __init__(
        self, query_D: Tensor, items_ID: Tensor, k: int, allowed: ItemFilter, slice_bytes: int = SLICE_bytes
    ) -> None:
        self._query_D, self._items_ID, self._k, self._allowed = query_D, items_ID, k, allowed
        self._step = max(1, slice_bytes // max(1, 4 * items_ID.shape[1]))
        count = len(items_ID) if allowed.among_A is None else len(allowed.among_A)
        self._count, self.slices = count, max(1, -(-count // self._step))
        self._next = 0
        self._dots_K, self._places_K = np.empty(0, np.float32), np.empty(0, np.int64)

    def fits_at_once(self, searches: int) -> bool:
        """Whether `searches` such searches fit in one slice."""
        return self._count * searches <= self._step

    def step(self) -> bool:
        """Search the next slice; returns whether it was the last."""
        begin = self._next * self._step
        self._next += 1
        among_A, without_W = self._allowed
        end = min(begin + self._step, self._count)
        places_N = np.arange(begin, end) if among_A is None else among_A[begin:end].numpy()
        if without_W is not None and len(places_N):
            # Excluded items are sorted: only those within the slice matter.
            bounds = np.searchsorted(without_W.numpy(), (places_N[0], places_N[-1] + 1))
            places_N = np.setdiff1d(places_N, without_W[bounds[0] : bounds[1]].numpy(), assume_unique=True)
        if among_A is None and len(places_N) == end - begin:
            dots_N = dots(self._query_D, self._items_ID[begin:end])
        else:
            dots_N = dots(self._query_D, self._items_ID, torch.from_numpy(places_N))
        dots_N = np.concatenate((self._dots_K, dots_N.numpy()))
        places_N = np.concatenate((self._places_K, places_N))
        chosen_K = largest(dots_N, self._k)
        self._dots_K, self._places_K = dots_N[chosen_K], places_N[chosen_K]
        return self._next >= self.slices

    def result(self) -> NearItems:
        """The answer, after the last slice."""
        order_K = np.argsort(-self._dots_K, kind="stable")
        sorted_results = (torch.from_numpy(x[order_K]) for x in (self._places_K, self._dots_K))
        return NearItems(*sorted_results, exact=True)
