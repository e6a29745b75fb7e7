"""`map_ids`: applies an id map: [Note: Id maps] in `tables/ids/idmap.py`, the definition in `reference/idmap.py`."""

import torch
from torch import Tensor


def map_ids(ids_N: Tensor, sections_SC: Tensor, words_W: Tensor, known: int, columns: int) -> Tensor:
    """The rows of ids as int64 [N, columns], numbered through all parts; -1: no row, or an id outside 0..known-1.

    `sections_SC` is on the CPU, the words on the device of the ids. No word outside `words_W` is read, even for a
    damaged map.
    """
    return torch.ops.rowwise.map_ids(ids_N.contiguous(), sections_SC, words_W, known, columns)
