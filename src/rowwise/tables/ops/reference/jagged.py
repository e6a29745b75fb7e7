"""Reference of the operators on jagged batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rowwise.base.errors import IdError
from rowwise.tables.ops.reference.lookup import offsets

Taken = tuple[Tensor, Tensor, Tensor, Tensor]
Routed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Expanded = tuple[Tensor, Tensor, Tensor]
Distinct = tuple[Tensor, Tensor, Tensor, Tensor]


def lengths(offsets: Tensor) -> Tensor:
    """Ids in each bag, from offsets."""
    if not len(offsets) or bool((offsets[:1] != 0).any() | (offsets[1:] < offsets[:-1]).any()):
        raise RuntimeError("rowwise: offsets do not ascend from 0")
    return offsets.long().diff()


def in_range(values: Tensor, lengths: Tensor, limits: Tensor, batch: int) -> bool:
    """Whether every id is in 0..rows-1; `limits`: pairs of a feature of the batch and the rows of its table."""
    bounds = offsets(lengths)
    for source, rows in limits.tolist():
        ids = values[int(bounds[source * batch]) : int(bounds[(source + 1) * batch])]
        if bool(((ids < 0) | (ids.long() >= rows)).any()):
            return False
    return True


def find_newer(values: Tensor, offsets: Tensor, features: Tensor, ids: Tensor, places: Tensor, batch: int) -> Tensor:
    """The ids of a batch, with their places instead of those among `ids`; see `newer.py`.

    A row of `features` is (feature of the batch, rows of its table, first and last of the table's `ids`).
    """
    out = values.long().clone()
    for source, rows, first, last in features.tolist():
        feature_ids = out[int(offsets[source * batch]) : int(offsets[(source + 1) * batch])]
        if bool(((feature_ids < 0) | (feature_ids >= rows)).any()):
            raise RuntimeError("rowwise: an id is outside its table")
        known = dict(zip(ids[first:last].tolist(), places[first:last].tolist(), strict=True))
        feature_ids.copy_(torch.tensor([known.get(row, row) for row in feature_ids.tolist()], dtype=torch.int64))
    return out


def take(values: Sequence[Tensor], lengths: Sequence[Tensor], weights: Sequence[Tensor], segments: Tensor) -> Taken:
    """The bags of some segments of batches, in order: values, lengths, weights, and each segment's first value.

    A segment is (batch, first bag, number of bags). Integers are int64 if those of any batch are.
    """
    bounds = [offsets(x) for x in lengths]
    # Empty parts of every batch, so that the types do not depend on the batches of the segments.
    taken, bags, moved = ([x[:0] for x in tensors] for tensors in (values, lengths, weights))
    starts = [0]
    for source, first, count in segments.tolist():
        begin, end = int(bounds[source][first]), int(bounds[source][first + count])
        taken.append(values[source][begin:end])
        bags.append(lengths[source][first : first + count])
        if weights:
            moved.append(weights[source][begin:end])
        starts.append(starts[-1] + end - begin)
    none = torch.empty(0, device=values[0].device)
    return torch.cat(taken), torch.cat(bags), torch.cat(moved) if weights else none, torch.tensor(starts)


def bucketize(values: Tensor, lengths: Tensor, weights: Tensor | None, bounds: Tensor) -> Routed:
    """Ids by the bucket whose row range holds them, minus its first row; the order inside a bag is kept.

    Returns values, lengths and weights by (bucket, feature, sample), their positions before, and bucket offsets.
    """
    features, buckets = bounds.shape[0], bounds.shape[1] - 1
    bags = len(lengths)
    bag_N = torch.arange(bags, device=values.device).repeat_interleave(lengths)
    feature_N = bag_N // max(1, bags // features)
    bucket_N, local_N = torch.empty_like(bag_N), torch.empty_like(values)
    for feature, row_bounds in enumerate(bounds.to(values.device)):
        mask_N = feature_N == feature
        ids = values[mask_N].long()
        if bool(((ids < 0) | (ids >= row_bounds[-1])).any()):
            raise IdError(f"rowwise: an id of feature {feature} is outside its table of {int(row_bounds[-1])} rows")
        # The last bucket that begins at or before the id: empty ones that begin there too are passed over.
        bucket_N[mask_N] = torch.searchsorted(row_bounds[1:-1].contiguous(), ids, right=True)
        local_N[mask_N] = (ids - row_bounds[bucket_N[mask_N]]).to(values.dtype)
    # Ids come by (feature, sample, position), so a stable sort by bucket leaves that order inside each.
    positions_N = torch.argsort(bucket_N, stable=True)
    counts_WFB = torch.bincount(bucket_N * bags + bag_N, minlength=buckets * bags)
    starts_W1 = offsets(torch.bincount(bucket_N, minlength=buckets))
    moved = values.new_empty(0, dtype=torch.float32) if weights is None else weights[positions_N]
    return local_N[positions_N], counts_WFB.to(lengths.dtype), moved, positions_N, starts_W1


def deduplicate(values: Tensor, bounds: Tensor) -> Distinct:
    """Distinct ids of each segment, ascending; their offsets by segment; index of each id among them; counts."""
    parts: list[Tensor] = [values[:0]]
    inverse: list[Tensor] = [values.new_empty(0, dtype=torch.int64)]
    counts: list[Tensor] = [values.new_empty(0, dtype=torch.int64)]
    starts = [0]
    for segment in values.split(bounds.diff().tolist()):
        distinct, where, count = torch.unique(segment, return_inverse=True, return_counts=True)
        parts.append(distinct)
        inverse.append(where + starts[-1])
        counts.append(count)
        starts.append(starts[-1] + len(distinct))
    return torch.cat(parts), torch.tensor(starts), torch.cat(inverse), torch.cat(counts)


def expand(values: Sequence[Tensor], lengths: Sequence[Tensor], weights: Sequence[Tensor], *args: Any) -> Expanded:
    """Values, lengths and weights of the bags (`places[f]`, `samples[b]`); a place is a batch, and its first bag there.

    `samples` has a tensor for each batch: the sample of it for each output sample. Integers are int64 if those of any
    batch are; with `narrow` values are int32.
    """
    samples, places, narrow = args
    bounds = [offsets(x) for x in lengths]
    taken, bags, moved = ([x[:0] for x in tensors] for tensors in (values, lengths, weights))
    for source, first in places.tolist():
        bag_B = samples[source].long() + first
        if bool(((bag_B < first) | (bag_B >= len(lengths[source]))).any()):
            raise RuntimeError("rowwise: a sample is outside the distinct ones")
        length_B = lengths[source][bag_B]
        # Output id n is source id n + shift, where `shift` is how far its bag moves to the front.
        shift_B = bounds[source][bag_B] - length_B.cumsum(0) + length_B
        count = int(length_B.sum())
        at_N = shift_B.repeat_interleave(length_B, output_size=count) + torch.arange(count, device=bag_B.device)
        taken.append(values[source][at_N])
        bags.append(length_B)
        if weights:
            moved.append(weights[source][at_N])
    none = torch.empty(0, device=values[0].device)
    taken_N = torch.cat(taken)
    return taken_N.int() if narrow else taken_N, torch.cat(bags), torch.cat(moved) if weights else none


def spread(out: Tensor, vectors: Tensor, samples: Tensor | None, segments: Tensor) -> None:
    """Write segments (source column, target column, width) of the vectors of `samples`, or of all in their order."""
    if samples is not None:
        vectors = vectors.index_select(0, samples)
    for source, target, width in segments.tolist():
        out[:, target : target + width] = vectors[:, source : source + width]
