"""Exact counts of a hash-selected sample of a table's ids, in bounded memory (adaptive sampling).

[Note: A sample of ids] An id belongs to the sample of level k if the lowest k bits of its hash are 0. When the sample
has more than `MAX_SAMPLED` distinct ids, the level rises by one and about half of them are dropped. Each id of the
sample was counted from its first occurrence, so the sample estimates how many ids occur once, twice, ... in all counted
ids, and from that how many distinct ids a batch of any size has. Samples of several ranks merge by adding counts: which
ids remain depends on the hash only, not on the order of ranks.

Known limits: co-occurrence is not modelled; a batch counts as a random draw from all counted ids.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_SAMPLED = 1 << 11  # distinct ids in a sample: estimates of all distinct ids are off by two or three percent
MULTIPLIERS = -0x61C8864680B583EB, -0x4498517A7B3558C5  # odd, with random bits: consecutive ids hash far apart


@final
@dataclass(slots=True)
class IdSample:
    """Counts of a sample of ids. See [Note: A sample of ids]."""

    looked_at: int = 0  # all counted ids, with repetitions, in the sample or not
    level: int = 0
    ids_D: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    counts_D: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def add(self, ids_N: Tensor) -> None:
        """Count ids, and keep those of the sample."""
        host_ids_N = ids_N.detach().to("cpu", torch.int64)
        self.looked_at += len(host_ids_N)
        ids_D, counts_D = host_ids_N[_in_sample(host_ids_N, self.level)].unique(return_counts=True)
        self._join(ids_D, counts_D)

    def merge(self, other: "IdSample") -> None:
        """Add the counts of another sample."""
        self.looked_at += other.looked_at
        self.level = max(self.level, other.level)
        self._join(other.ids_D, other.counts_D)

    def expected_distinct(self, drawn_P: NDArray[np.float64]) -> NDArray[np.float64]:
        """The expected number of distinct ids among `drawn_P` ids, at most the number of counted ids."""
        # An id that occurs c times of N is missing from a draw of a share p with probability (1 - p)^c.
        counts_D = self.counts_D.numpy().astype(np.float64)
        part_P = np.minimum(drawn_P / max(self.looked_at, 1), 1.0)
        with np.errstate(divide="ignore"):  # p = 1: log(0) is -inf, and no id is missing
            missing_P = np.log1p(-part_P)
        return float(1 << self.level) * -np.expm1(counts_D[None] * missing_P[:, None]).sum(1)

    def _join(self, ids_D: Tensor, counts_D: Tensor) -> None:
        ids_M, counts_M = torch.cat((self.ids_D, ids_D)), torch.cat((self.counts_D, counts_D))
        self.ids_D, index_M = ids_M.unique(return_inverse=True)
        self.counts_D = torch.zeros(len(self.ids_D), dtype=torch.int64).index_add_(0, index_M, counts_M)
        self._drop()
        while len(self.ids_D) > MAX_SAMPLED:
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
