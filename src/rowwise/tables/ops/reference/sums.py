"""The summation orders that define the bits of results: segments, contributions to a row, columns of a row."""

import torch
from torch import Tensor

BLOCK = 256  # samples whose contributions to a row are summed one after the other


def merge(rows_N: Tensor, samples_N: Tensor, grads_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Sum contributions by row: in order within blocks of samples, then by a pairwise tree over blocks."""
    # Level 0 sums inside blocks. Each level above adds neighbours: a parent has at most two children, in
    # order, so summing them is left + right, and a child without a sibling passes up unchanged.
    blocks_N = samples_N // BLOCK
    for level in range(int(blocks_N.max()).bit_length() + 1):
        if level:
            blocks_N = blocks_N // 2
        # Equal (row, block) pairs become neighbours and keep their order.
        key_N = rows_N * (int(blocks_N.max()) + 1) + blocks_N
        order = torch.argsort(key_N, stable=True)
        _, counts = torch.unique_consecutive(key_N[order], return_counts=True)
        first = counts.cumsum(0) - counts
        grads_ND = sum_segments(grads_ND[order], first, counts)
        rows_N, blocks_N = rows_N[order][first], blocks_N[order][first]
    return rows_N, grads_ND


def column_sum(x_ND: Tensor) -> Tensor:
    """The sum over columns as a pairwise tree over neighbours; missing columns count as zero."""
    # Halving neighbours until one is left is the tree over blocks of four, and the blocks are its two lowest levels.
    while x_ND.shape[1] > 1:
        if x_ND.shape[1] % 2:
            x_ND = torch.nn.functional.pad(x_ND, (0, 1))
        x_ND = x_ND[:, 0::2] + x_ND[:, 1::2]
    return x_ND[:, 0]


def sum_segments(x_ND: Tensor, first_M: Tensor, counts_M: Tensor) -> Tensor:
    """Sum each segment x[first : first + count], one element after the other; an empty segment gives zeros."""
    sums_MD = x_ND.new_zeros(len(counts_M), x_ND.shape[1])
    # Position by position over all segments at once: each is summed strictly from its first element to its last.
    for position in range(int(counts_M.max()) if len(counts_M) else 0):
        has = counts_M > position
        term = x_ND[first_M[has] + position]
        sums_MD[has] = sums_MD[has] + term if position else term
    return sums_MD
