"""Frequencies of a table's ids: exact counts for a bounded sample of its ids.

[Note: A sample of ids] An id belongs to the sample of level k if k bits of its hash are 0; as soon as more than `MOST`
different ids are in it, the level rises, and half of them leave. Each id of the sample has been counted from the
beginning, so the sample tells how many ids come once, twice, ... in all that was looked at, and from that how many
different ids a batch of any size has. Samples of several ranks are one by adding counts: which ids are in it depends
on all of them together, and not on who saw what first.

Known limits: which ids come together; the ids of a batch are taken for a draw from all that was looked at.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST = 1 << 11  # different ids that are kept: a count of all different ones is off by two or three percent
MULTIPLIERS = -0x61C8864680B583EB, -0x4498517A7B3558C5  # odd, with bits all over: they scatter ids that are alike


@final
@dataclass(slots=True)
class IdSample:
    """Counts of a sample of ids. See [Note: A sample of ids]."""

    looked_at: int = 0  # ids, repeats and all
    level: int = 0
    ids_D: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    counts_D: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def add(self, ids_N: Tensor) -> None:
        """Look at some ids."""
        here_N = ids_N.detach().to("cpu", torch.int64)
        self.looked_at += len(here_N)
        ids_D, counts_D = here_N[_in_sample(here_N, self.level)].unique(return_counts=True)
        self._join(ids_D, counts_D)

    def merge(self, other: "IdSample") -> None:
        """Add what somebody else has looked at."""
        self.looked_at += other.looked_at
        self.level = max(self.level, other.level)
        self._join(other.ids_D, other.counts_D)

    def different(self, drawn_P: NDArray[np.float64]) -> NDArray[np.float64]:
        """The expected number of distinct ids among so many draws, at most the observed number."""
        counts_D = self.counts_D.numpy().astype(np.float64)
        part_P = np.minimum(drawn_P / max(self.looked_at, 1), 1.0)
        with np.errstate(divide="ignore"):  # of all of them, none is missing
            missing_P = np.log1p(-part_P)
        return float(1 << self.level) * -np.expm1(counts_D[None] * missing_P[:, None]).sum(1)

    def _join(self, ids_D: Tensor, counts_D: Tensor) -> None:
        every_M, more_M = torch.cat((self.ids_D, ids_D)), torch.cat((self.counts_D, counts_D))
        self.ids_D, place_M = every_M.unique(return_inverse=True)
        self.counts_D = torch.zeros(len(self.ids_D), dtype=torch.int64).index_add_(0, place_M, more_M)
        self._drop()
        while len(self.ids_D) > MOST:
            self.level += 1
            self._drop()

    def _drop(self) -> None:
        kept_D = _in_sample(self.ids_D, self.level)
        self.ids_D, self.counts_D = self.ids_D[kept_D], self.counts_D[kept_D]


def _in_sample(ids_N: Tensor, level: int) -> Tensor:
    hash_N = ids_N
    for multiplier in MULTIPLIERS:
        hash_N = hash_N * multiplier
        hash_N = hash_N ^ (hash_N >> 32)
    return (hash_N & ((1 << level) - 1)) == 0
