"""Reference of sums over sampled edges: all sampled edges are listed, then added up; see [Note: Sampled edges].

The note is in `_cpp/graph.cpp`.
"""

from typing import Any

import torch
from torch import Tensor

from rowwise.tables.ops.layout import STRIDE_PRIME, Choice
from rowwise.tables.ops.reference.sums import sum_segments


def sum_sampled(vectors: Tensor, *args: Any) -> Tensor:
    """Sums of weighted vectors over the sampled edges into each node."""
    ids, starts, weights, width, choice, rescaled = args
    chosen_M, scales_M, counts_N = choose_edges(starts, width, choice, rescaled)
    terms_MD = vectors[ids[chosen_M].long()] * (weights[chosen_M] * scales_M).unsqueeze(1)
    return sum_segments(terms_MD, counts_N.cumsum(0) - counts_N, counts_N)


def choose_edges(starts: Tensor, width: int, choice: int, rescaled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The sampled edges, node after node in the order of choice, their scales, and their number for each node."""
    degrees_N = starts.diff()
    counts_N = degrees_N.clamp(max=width)
    degrees_M = degrees_N.repeat_interleave(counts_N)
    firsts_M = (counts_N.cumsum(0) - counts_N).repeat_interleave(counts_N)
    choice_M = torch.arange(len(degrees_M), device=starts.device) - firsts_M
    places_M = choice_M
    if choice == Choice.SPREAD:
        places_M = choice_M * degrees_M // width
    elif choice == Choice.STRIDE:
        jump_M = choice_M * STRIDE_PRIME
        places_M = (jump_M + torch.where(degrees_M % STRIDE_PRIME == 0, jump_M // degrees_M, 0)) % degrees_M
    places_M = torch.where(degrees_M > width, places_M, choice_M)
    scales_M = (degrees_M.float() / width).clamp(min=1) if rescaled else torch.ones_like(degrees_M.float())
    return starts[:-1].repeat_interleave(counts_N) + places_M, scales_M, counts_N
