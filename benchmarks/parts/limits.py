"""What this machine could do at best: matrix products at their peak, rows that are read, rows that are rewritten.

A step's limit is the time that this machine takes, in the same run on as many threads, for

- its matrix products (multiplications and additions of linear layers and of pairs of vectors, forward and backward), at
  the speed of a large square fp32 product, by whichever of torch's two libraries is faster;
- reading the rows that it looks up, in the order of the batch's ids and as often as they come, and doing nothing else;
- reading and writing back each distinct row that it updates, ascending, as it is.

The share is the limit over the time of the step. Not counted: activations and their gradients, optimizer state, the
dense layers' optimizer, ids, gradients on their way to rows, and bytes between ranks: so no step has a share of 1, and
a share compares between machines as times do not.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from parts.report import at_least
from parts.timer import least_s, timed_s
from rowwise import Embeddings, Jagged
from rowwise.tables.ops import jagged as ids
from rowwise.tables.ops import linear

FLOOR, GOAL = 0.75, 0.85  # of the limit
PEAK_SIZE, SMOKE_SIZE, PEAK_TIMES = 2048, 128, 5


def peak_flops_s(size: int = PEAK_SIZE) -> float:
    """Floating-point operations a second of a square fp32 product, on torch's threads."""
    a_NN, b_NN = torch.randn(size, size), torch.randn(size, size)
    ways: tuple[Callable[[], object], ...] = (lambda: a_NN @ b_NN, lambda: linear.linear(a_NN, b_NN))
    with torch.no_grad():
        return 2 * size**3 / min(least_s(way, PEAK_TIMES) for way in ways)


def dlrm_flops(batch: int, bottom: Sequence[int], top: Sequence[int], vectors: int) -> int:
    """Of a step; `bottom` and `top` begin with their inputs, and `vectors` are multiplied in pairs.

    Three products a layer, but two in the first, as what it reads has no gradient.
    """
    layers = [fan_in * fan_out for sizes in (bottom, top) for fan_in, fan_out in pairwise(sizes)]
    pairs = vectors * (vectors - 1) // 2 * bottom[-1]
    return 2 * batch * (3 * (sum(layers) + pairs) - layers[0])


class Rows:
    """The rows that a batch asks of the tables of a module, to be read and written as fast as it goes."""

    def __init__(self, module: Embeddings, sparse: Jagged) -> None:
        out_BS = module(sparse).matrix_BS
        out_BS.backward(torch.zeros_like(out_BS))
        (staged,) = module.staged
        module.discard()
        call, self._arena = staged.call, module.arena.rows
        lookups = call.jagged
        self._features, self._batch, self._values_N = call.features_FC, lookups.batch_size, lookups.values_N
        self._offsets = call.offsets
        bounds_F1 = call.offsets[:: lookups.batch_size].contiguous()
        distinct = ids.deduplicate(lookups.values_N, bounds_F1)
        self._distinct_U = distinct.values_U
        # As one bag of each feature holds them all.
        lengths_FB = torch.zeros(len(bounds_F1) - 1, self._batch, dtype=torch.int64)
        lengths_FB[:, 0] = distinct.bounds_S1.diff()
        self._distinct_offsets = torch.ops.rowwise.offsets(lengths_FB.flatten())

    def gather_s(self) -> float:
        """Seconds to read the rows in the order of the ids."""
        where = (self._arena, self._features, self._values_N, self._offsets, self._batch)
        return timed_s(lambda: torch.ops.rowwise.touch(*where))

    def rewrite_s(self) -> float:
        """Seconds to read and write back each distinct row."""
        where = (self._arena, self._features, self._distinct_U, self._distinct_offsets, self._batch)
        return timed_s(lambda: torch.ops.rowwise.rewrite(*where))


def rows_s(batches: Sequence[Rows], times: int) -> float:
    """Seconds to read and then write the rows of a batch: 20 % quantile of so many rounds, batch after batch."""
    rounds = range(times)
    read = [rows.gather_s() for _ in rounds for rows in batches]
    write = [rows.rewrite_s() for _ in rounds for rows in batches]
    return float(np.quantile(read, 0.2) + np.quantile(write, 0.2))


def limit_of(flops: int, flops_s: float, rows_s: float) -> dict[str, float]:
    """What a row of results says of the limit."""
    products_s = flops / flops_s
    return {
        "limit_ms": (products_s + rows_s) * 1e3,
        "limit_products_ms": products_s * 1e3,
        "limit_rows_ms": rows_s * 1e3,
        "peak_gflops": flops_s / 1e9,
    }


def share_floor(of: str, share: float) -> dict:
    """The floor that every step is held to, and what it should come to."""
    return at_least(f"share of this machine's limit, {of}", share, FLOOR) | {"goal": GOAL}
