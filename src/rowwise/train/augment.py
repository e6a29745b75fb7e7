"""Random changes of training samples: `train.augment`. Random numbers are those of the CPU's generator."""

from dataclasses import replace

import torch
from torch import Tensor

from rowwise.base.errors import BatchError
from rowwise.tables.batch import Batch, Jagged
from rowwise.tables.ops.check import check_lengths
from rowwise.train.settings import Augment


def augment(batch: Batch, settings: Augment) -> Batch:
    """The batch without randomly chosen parts of its features; the batch itself if settings leave nothing out."""
    if settings.keeps_all:
        return batch
    dense_BF = batch.dense_BF
    try:
        if batch.sparse.shared is not None:
            check_lengths(batch.sparse.shared.jagged)
        sparse = batch.sparse.expanded()
        check_lengths(sparse)
    except BatchError:
        return batch  # its lookup raises on all ranks
    device, lengths_FB = sparse.values_N.device, sparse.lengths_FB.long().cpu()
    bags_N = torch.arange(len(lengths_FB)).repeat_interleave(lengths_FB)
    kept_N = _kept_ids(lengths_FB, bags_N, settings)
    lengths_FB = torch.bincount(bags_N[kept_N], minlength=len(lengths_FB)).to(sparse.lengths_FB)
    kept_N = kept_N.to(device)
    if settings.drop_features:
        dense_BF = dense_BF * (torch.rand(dense_BF.shape) >= settings.drop_features).to(dense_BF)
    ids = Jagged(
        features=sparse.features,
        values_N=sparse.values_N[kept_N],
        lengths_FB=lengths_FB,
        weights_N=None if sparse.weights_N is None else sparse.weights_N[kept_N],
    )
    return replace(batch, dense_BF=dense_BF, sparse=ids)


def _kept_ids(lengths_FB: Tensor, bags_N: Tensor, settings: Augment) -> Tensor:
    """Which ids [N] stay; `bags_N` has the bag of each id."""
    kept_N = torch.ones(len(bags_N), dtype=torch.bool)
    if settings.drop_features:
        kept_N &= (torch.rand(len(lengths_FB)) >= settings.drop_features)[bags_N]
    if settings.crop_lists:
        cut_FB = (torch.rand(len(lengths_FB)) * settings.crop_lists * lengths_FB).long()
        begin_FB = (torch.rand(len(lengths_FB)) * (cut_FB + 1)).long().minimum(cut_FB)
        places_N = torch.arange(len(bags_N)) - (lengths_FB.cumsum(0) - lengths_FB)[bags_N]
        kept_N &= (places_N >= begin_FB[bags_N]) & (places_N < (begin_FB + lengths_FB - cut_FB)[bags_N])
    if settings.drop_ids:
        kept_N &= (torch.rand(len(bags_N)) >= settings.drop_ids) | (lengths_FB == 1)[bags_N]
    return kept_N
