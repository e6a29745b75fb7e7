"""An exact search among many items, a slice of them at a time, so that other requests pass between two slices.

The answer has the bits of `nearest_items`: each dot is summed in an order of its own, and an item that is not among the
k best of the slices so far is not among those of all.
"""

from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from rowwise.models.retrieval import largest
from rowwise.tables.ops.interact import dots

SLICE_bytes = 4 << 20  # of vectors: some milliseconds, also where they come from memory that is busy


class ItemFilter(NamedTuple):
    """Which items may be in an answer, by their places."""

    among_A: Tensor | None = None  # ascending, each once; None: all
    without_W: Tensor | None = None  # likewise; None: none is left out

    @property
    def left_out(self) -> int:
        return 0 if self.without_W is None else len(self.without_W)


class NearItems(NamedTuple):
    """Items for a query, the best first."""

    places_K: Tensor
    dots_K: Tensor
    exact: bool  # all items were looked at, or all that a filter leaves


@final
class ItemScan:
    """The k items of largest dot with a query that a filter allows; `step` looks at the next slice.

    Args:
        query_D: a vector in 32 bits on the CPU.
        items_ID: vectors of items.
        k: at least 1.
        allowed: the filter.
        slice_bytes: of the vectors of a slice.
    """

    def __init__(
        self, query_D: Tensor, items_ID: Tensor, k: int, allowed: ItemFilter, slice_bytes: int = SLICE_bytes
    ) -> None:
        """Before the first slice."""
        self._query_D, self._items_ID, self._k, self._allowed = query_D, items_ID, k, allowed
        self._step = max(1, slice_bytes // max(1, 4 * items_ID.shape[1]))
        count = len(items_ID) if allowed.among_A is None else len(allowed.among_A)
        self._count, self.slices = count, max(1, -(-count // self._step))
        self._next = 0
        self._dots_K, self._places_K = np.empty(0, np.float32), np.empty(0, np.int64)

    def fits_at_once(self, searches: int) -> bool:
        """Whether so many searches like this one look at no more items than a slice has."""
        return self._count * searches <= self._step

    def step(self) -> bool:
        """Look at the next slice; whether it was the last."""
        begin = self._next * self._step
        self._next += 1
        among_A, without_W = self._allowed
        end = min(begin + self._step, self._count)
        places_N = np.arange(begin, end) if among_A is None else among_A[begin:end].numpy()
        if without_W is not None and len(places_N):
            near = np.searchsorted(without_W.numpy(), (places_N[0], places_N[-1] + 1))
            places_N = np.setdiff1d(places_N, without_W[near[0] : near[1]].numpy(), assume_unique=True)
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
        found = (torch.from_numpy(x[order_K]) for x in (self._places_K, self._dots_K))
        return NearItems(*found, exact=True)
