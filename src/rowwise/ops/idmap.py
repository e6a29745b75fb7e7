"""Rows of ids by an id map: the operator as a function.

What the numbers mean is said in [Note: Id maps] in `hashing/idmap.py`, and in torch in `ops/reference/idmap.py`.
"""

import torch
from torch import Tensor


def map_ids(ids_N: Tensor, sections_S10: Tensor, words_W: Tensor, known: int, columns: int) -> Tensor:
    """The rows of ids as int64 [N, columns], numbered through all parts; -1: no row, or an id outside 0..known-1.

    `sections_S10` lies on the CPU, the others where the ids do. Nothing outside the words is read, whatever they hold.
    """
    return torch.ops.rowwise.map_ids(ids_N.contiguous(), sections_S10, words_W, known, columns)
