"""In which fold a sample is: a hash of all its ids, so that the probe and the trained model cut the samples alike.

See [Note: Folds] in `idmap.py`. By the ids, and not by the number of a row: it is the same wherever rows come from,
and rows that are alike in all ids, whose labels say the same of them, are in one fold.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.errors import BatchError
from rowwise.hashing.idmap import MapSection
from rowwise.ops.idmap import map_ids

WIDE = 1 << 39  # hashes are below this, the most that an id map takes; they are added up


def folds_of(jagged: Jagged, features: Sequence[str], count: int, seed: int) -> Tensor:
    """The fold of each sample [B], 0 to `count` - 1, by the ids of these features."""
    missing = [name for name in features if name not in jagged.all_features]
    if missing:
        there = ", ".join(jagged.all_features)
        raise BatchError(f"folds of samples follow from feature {', '.join(missing)}; the batch has {there}")
    sums_B = _sums(jagged, features, seed)
    if jagged.shared is not None:
        sums_B = sums_B + _sums(jagged.shared.jagged, features, seed)[jagged.shared.inverse_B.long()]
    return _hash_ids(sums_B & (WIDE - 1), count, seed)


def begins_of(jagged: Jagged) -> list[int]:
    """The offset at which the ids of each feature begin, and the end of the last."""
    features = len(jagged.features)
    counts_F = jagged.lengths_FB.view(features, jagged.lengths_FB.numel() // max(1, features)).sum(1)
    return [0, *counts_F.cumsum(0).tolist()]


def _sums(jagged: Jagged, features: Sequence[str], seed: int) -> Tensor:
    """For each sample, the sum of the hashes of its ids modulo 2**64; unshared features only."""
    size = jagged.lengths_FB.numel() // len(jagged.features) if jagged.features else jagged.batch_size
    sums_B = torch.zeros(size, dtype=torch.int64, device=jagged.values_N.device)
    ends_FB = jagged.lengths_FB.cumsum(0, dtype=torch.int64)
    for place, name in enumerate(jagged.features):
        if name not in features or not size:
            continue
        ends_B = ends_FB[place * size : (place + 1) * size]
        begin = int(ends_B[0]) - int(jagged.lengths_FB[place * size])
        hashes_N = _hash_ids(jagged.values_N[begin : int(ends_B[-1])], WIDE, seed + 1 + features.index(name))
        # Sums of a bag as differences of sums up to its ends: wrapped, they come out right all the same.
        before_N1 = torch.cat([hashes_N.new_zeros(1), hashes_N.cumsum(0)])
        lengths_B = jagged.lengths_FB[place * size : (place + 1) * size]
        sums_B += before_N1[ends_B - begin] - before_N1[ends_B - begin - lengths_B]
    return sums_B


def _hash_ids(ids_N: Tensor, rows: int, seed: int) -> Tensor:
    sections = torch.tensor([MapSection(kind="hash", rows=rows, seed=seed).numbers], dtype=torch.int64)
    return map_ids(ids_N, sections, ids_N.new_empty(0, dtype=torch.int64), WIDE, 1)[:, 0]
