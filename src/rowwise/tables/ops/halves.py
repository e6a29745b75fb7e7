"""Lookups in halves, where a cache has fewer slots than a batch has rows.

An evaluation may use larger batches than the training, for which the caches were sized.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rowwise.tables.batch import Jagged
from rowwise.tables.ops.layout import DIM, SOURCE
from rowwise.tables.store.row_store import TooManyRowsError


def in_halves(jagged: Jagged, look_up: Callable[[Jagged], Tensor], features_FC: Tensor | None = None) -> Tensor:
    """The lookup of a batch, or those of its halves, one after the other, if a cache has too few slots.

    With gradients enabled the batch is not split, because an update needs all of its rows at once.

    Args:
        jagged: has no shared bags.
        look_up: gives a row for each sample, or the rows of all ids, feature after feature.
        features_FC: the features of a lookup by id; None: `look_up` gives a row for each sample.
    """
    batch = jagged.batch_size
    try:
        return look_up(jagged)
    except TooManyRowsError:
        if batch < 2 or torch.is_grad_enabled():
            raise
    samples_B = torch.arange(batch, device=jagged.lengths_FB.device)
    halves = [jagged.of_samples(half) for half in samples_B.split([batch // 2, batch - batch // 2])]
    parts = [in_halves(half, look_up, features_FC) for half in halves]
    if features_FC is None:
        return torch.cat(parts)
    sizes = [floats_by_feature(half, features_FC, torch.ops.rowwise.offsets(half.lengths_FB)) for half in halves]
    by_feature = zip(*(part.split(size) for part, size in zip(parts, sizes, strict=True)), strict=True)
    return torch.cat([piece for pieces in by_feature for piece in pieces])


def floats_by_feature(jagged: Jagged, features_FC: Tensor, offsets: Tensor) -> list[int]:
    """Floats per feature in the output of a lookup by id."""
    begins = (features_FC[:, SOURCE] * jagged.batch_size).to(offsets.device)
    counts = (offsets[begins + jagged.batch_size] - offsets[begins]).tolist()
    return [count * dim for count, dim in zip(counts, features_FC[:, DIM].tolist(), strict=True)]
