"""Assigns samples to folds by a hash of their ids: see [Note: Folds] in `idmap.py`.

By ids and not by position in the data: the probe and the trained model assign a sample alike wherever it is read from,
and samples with equal ids, whose labels inform about each other, share a fold.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowwise.base.errors import BatchError
from rowwise.tables.batch import Jagged
from rowwise.tables.ids.idmap import MapSection
from rowwise.tables.ops.idmap import map_ids

HASH_RANGE = 1 << 39  # hashes are hashed once more, and an id map takes no larger ids


def assign_folds(jagged: Jagged, features: Sequence[str], count: int, seed: int) -> Tensor:
    """The fold of each sample [B], 0 to `count` - 1, by the ids of these features."""
    missing = [name for name in features if name not in jagged.all_features]
    if missing:
        got = ", ".join(jagged.all_features)
        raise BatchError(f"the batch has features {got}", f"{', '.join(missing)} too, to assign samples to folds")
    sums_B = _sum_hashes(jagged, features, seed)
    if jagged.shared is not None:
        sums_B = sums_B + _sum_hashes(jagged.shared.jagged, features, seed)[jagged.shared.inverse_B.long()]
    return _hash_ids(sums_B & (HASH_RANGE - 1), count, seed)


def _sum_hashes(jagged: Jagged, features: Sequence[str], seed: int) -> Tensor:
    """The sum of the hashes of each sample's ids, modulo 2**64, without shared bags."""
    sums_B = torch.zeros(jagged.batch_size, dtype=torch.int64, device=jagged.values_N.device)
    for name, (begin, end) in jagged.id_ranges().items():
        if name not in features:
            continue
        hashes_N = _hash_ids(jagged.values_N[begin:end], HASH_RANGE, seed + 1 + features.index(name))
        # A bag's sum is a difference of running sums, which is exact modulo 2**64 even where these wrap around.
        running = torch.cat([hashes_N.new_zeros(1), hashes_N.cumsum(0)])
        lengths_B = jagged.lengths_of(name)
        ends_B = lengths_B.cumsum(0)
        sums_B += running[ends_B] - running[ends_B - lengths_B]
    return sums_B


def _hash_ids(ids_N: Tensor, rows: int, seed: int) -> Tensor:
    sections = torch.tensor([MapSection(kind="hash", rows=rows, seed=seed).kernel_args], dtype=torch.int64)
    return map_ids(ids_N, sections, ids_N.new_empty(0, dtype=torch.int64), HASH_RANGE, 1)[:, 0]
