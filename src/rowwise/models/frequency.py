"""Frequencies of items, updated batch by batch: an item of every 20th batch has probability 1/20 of being in one.

The estimator of Yi et al. 2019 (see `two_tower.py`). For each item it keeps the step A of its last occurrence and the
smoothed gap B between its occurrences, in steps:

    B <- (1 - alpha) B + alpha (step - A),   A <- step,   probability = 1 / B

Items share the slots of hashed arrays, so memory is fixed and new items need no allocation. Two items in one slot occur
more often than either, so the longest gap over several arrays is the best estimate. Unlike the paper, which smooths
from an initial B, B begins with the first gap: there is no initial value to choose.

The probability is that of being in a batch at all: for rare items the expected number of times, but never more than 1.
"""

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError


class ItemFrequency(nn.Module):
    """The log-probability that an item is in a batch; in training mode each call counts as one step.

    Args:
        bits: each array has 2**bits slots, of 12 bytes; choose several times the number of items.
        arrays: number of arrays, each with its own hash.
        alpha: weight of the newest gap; larger follows changes faster, smaller is more precise.
        seed: of the hashes.
    """

    factors_H1: Tensor
    step: Tensor
    last_S: Tensor
    gap_S: Tensor

    def __init__(self, *, bits: int = 20, arrays: int = 2, alpha: float = 0.01, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= bits <= 40 or arrays < 1:
            raise SpecError(f"bits={bits} and arrays={arrays}", "1 to 40 bits and at least one array")
        if not 0 < alpha <= 1:
            raise SpecError(f"alpha={alpha}", "more than 0 and at most 1")
        self.bits, self.alpha = bits, alpha
        generator = torch.Generator().manual_seed(seed)
        factors_H1 = torch.randint(-(1 << 63), (1 << 63) - 1, (arrays, 1), generator=generator) | 1
        # Buffers, so that a checkpoint holds the counts and their hashes.
        self.register_buffer("factors_H1", factors_H1)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last_S", torch.zeros(arrays << bits, dtype=torch.int64))  # 0 if never
        self.register_buffer("gap_S", torch.zeros(arrays << bits))

    @torch.no_grad()
    def forward(self, items_B: Tensor) -> Tensor:
        """The log-probability [B] of each item; in training mode after counting them."""
        slots_HB = self._slots(items_B)
        if self.training:
            self._count(slots_HB.unique())  # an item counts once per batch
        gap_B = self.gap_S[slots_HB].amax(0)
        # The gap of an unseen item is the number of steps so far.
        return gap_B.where(gap_B > 0, self.step.clamp(min=1)).reciprocal().log()

    def _count(self, slots_N: Tensor) -> None:
        self.step += 1
        last_N, gap_N = self.last_S[slots_N], self.gap_S[slots_N]
        newest_N = (self.step - last_N).to(gap_N.dtype)
        self.gap_S[slots_N] = torch.where(last_N > 0, gap_N.lerp(newest_N, self.alpha), newest_N)
        self.last_S[slots_N] = self.step

    def _slots(self, items_B: Tensor) -> Tensor:
        """Multiply-shift hashing: the top bits of an odd factor times the id, modulo 2**64."""
        hashed_HB = (self.factors_H1 * items_B.long() >> (64 - self.bits)) & ((1 << self.bits) - 1)
        return hashed_HB + (torch.arange(len(self.factors_H1), device=items_B.device).unsqueeze(1) << self.bits)
