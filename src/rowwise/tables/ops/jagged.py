"""Operators on jagged batches: permute features, split and concatenate samples, bucketize by row range, deduplicate.

Each is one native call over the combined tensors, so none has a cost per feature. float32 weights move with their ids;
other weights, and those that require a gradient, are moved by torch afterwards, by position. `share` finds bags that
samples share ([Note: Shared bags]); of the others only `split` keeps them shared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, SpecError
from rowwise.tables.batch import Jagged, SharedBags
from rowwise.tables.ops import check

Segment = tuple[int, int, int]  # index of a batch, first bag, number of bags


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Ids of a batch, ordered by (bucket, feature, sample).

    Id n here was id `positions_N[n]` of the batch: `x[positions_N]` reorders a tensor of the batch's ids likewise, and
    `out[positions_N] = x` undoes it.
    """

    features: tuple[str, ...]
    values_N: Tensor
    lengths_WFB: Tensor
    weights_N: Tensor | None
    positions_N: Tensor
    starts_W1: Tensor  # first value of each bucket, and the number of values

    @property
    def num_buckets(self) -> int:
        """Number of buckets, including empty ones."""
        return self.starts_W1.numel() - 1

    def bucket(self, index: int) -> Jagged:
        """One bucket as a batch of the same features and samples; its tensors are views."""
        if not 0 <= index < self.num_buckets:
            raise IndexError(f"bucket {index}; expected one of 0..{self.num_buckets - 1}")
        bags = self.lengths_WFB.numel() // self.num_buckets
        begin, end = self.starts_W1[index : index + 2].tolist()
        return Jagged(
            features=self.features,
            values_N=self.values_N[begin:end],
            lengths_FB=self.lengths_WFB[index * bags : (index + 1) * bags],
            weights_N=None if self.weights_N is None else self.weights_N[begin:end],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique:
    """The distinct ids of each segment, ascending; `values_U[inverse_N]` are the original ids."""

    values_U: Tensor
    bounds_S1: Tensor  # first distinct id of each segment, and the number of distinct ids
    inverse_N: Tensor  # into all of values_U
    counts_U: Tensor  # occurrences of each distinct id in its segment


def permute(jagged: Jagged, features: Sequence[str]) -> Jagged:
    """The batch with these of its features, in this order."""
    jagged, batch = _expand_shared(jagged, features), jagged.batch_size
    segments = [(0, index * batch, batch) for index in _indices(jagged, features)]
    return _take([jagged], segments, features)[0]


def split(jagged: Jagged, sizes: Sequence[int]) -> list[Jagged]:
    """The batch split along its samples into batches of these sizes, views of one copy."""
    batch = jagged.batch_size
    if sum(sizes) != batch or min(sizes, default=0) < 0:
        raise BatchError(
            f"sizes {list(sizes)} do not cut {batch} samples", f"sizes of at least 0 that add up to {batch}"
        )
    if jagged.shared is not None:
        return _split_shared(jagged, jagged.shared, sizes)
    segments: list[Segment] = []
    first = 0
    for size in sizes:
        segments += [(0, feature * batch + first, size) for feature in range(len(jagged.features))]
        first += size
    return _take([jagged], segments, jagged.features, parts=len(sizes))


def share(jagged: Jagged, features: Sequence[str]) -> Jagged:
    """The batch with the bags of these features stored once where neighbouring samples have equal ones (RecD).

    Bags are equal if ids and weights are. Weights that require gradients raise: each has a gradient of its own.
    """
    if not features:
        raise BatchError("no features to share bags of", "at least one")
    jagged, batch = jagged.expanded().contiguous(), jagged.batch_size
    group = permute(jagged, features)
    weights = group.weights_N
    if weights is not None and weights.requires_grad:
        raise BatchError(
            "per-id weights of shared bags require gradients", "weights without gradients, or bags that are not shared"
        )
    # Compares the n-th id of each bag with the n-th id of the bag before, which is as many ids back as the bag is long
    # if both are equally long. If they are not, `begins_FB` separates them by their lengths.
    counts = group.lengths_FB.long()
    at_N = torch.arange(len(group.values_N), device=counts.device)
    before_N = (at_N - counts.repeat_interleave(counts, output_size=len(at_N))).clamp(min=0)
    differs_N = group.values_N != group.values_N[before_N]
    if weights is not None:
        differs_N |= weights != weights[before_N]
    counts_FB = counts.view(len(features), batch)
    begins_FB = torch.zeros_like(counts_FB, dtype=torch.bool)
    begins_FB[:, 1:] = counts_FB[:, 1:] != counts_FB[:, :-1]
    bags_N = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(at_N))
    begins_FB.view(-1)[bags_N[differs_N]] = True
    begins_B = begins_FB.any(0)
    begins_B[:1] = True
    inverse_B = begins_B.cumsum(0) - 1
    remaining = tuple(f for f in jagged.features if f not in features)
    shared = SharedBags(jagged=group.of_samples(begins_B.nonzero().flatten()), inverse_B=inverse_B)
    own = permute(jagged, remaining) if remaining else group.without_samples()
    return replace(own, features=remaining, shared=shared)


def concatenate(jaggeds: Sequence[Jagged], features: Sequence[str] | None = None) -> Jagged:
    """The samples of all batches as one batch of these features (None: those of the first batch), without sharing.

    Ids are int64 if those of any batch are. Weights are kept if every batch has them.
    """
    if not jaggeds:
        raise BatchError("no batches to concatenate: their features would be unknown", "at least one")
    features = jaggeds[0].all_features if features is None else features
    jaggeds = [_expand_shared(jagged, features) for jagged in jaggeds]
    # Feature-major: all samples of the first feature, batch after batch, then of the second.
    sources = [_indices(jagged, features) for jagged in jaggeds]
    segments = [
        (number, source[feature] * jagged.batch_size, jagged.batch_size)
        for feature in range(len(features))
        for number, (jagged, source) in enumerate(zip(jaggeds, sources, strict=True))
    ]
    return _take(jaggeds, segments, features)[0]


def row_bounds(features: Sequence[str], bounds_by_feature: Mapping[str, Sequence[int]]) -> Tensor:
    """`bounds_FW1` for `bucketize`, for batches with these features in this order; made once, used every step."""
    rows: list[list[int]] = []
    for name in features:
        if name not in bounds_by_feature:
            raise SpecError(f"no row bounds for feature {name!r}; there are some for {', '.join(bounds_by_feature)}")
        bounds = list(bounds_by_feature[name])
        if len(bounds) < 2 or bounds[0] != 0 or bounds != sorted(bounds):
            raise SpecError(f"feature {name!r}: row bounds {bounds} do not ascend from 0 to the rows of its table")
        if rows and len(bounds) != len(rows[0]):
            expected = f"{len(rows[0]) - 1}, as feature {features[0]!r} has"
            raise SpecError(f"feature {name!r}: {len(bounds) - 1} row ranges", expected)
        rows.append(bounds)
    return torch.tensor(rows, dtype=torch.int64)


def bucketize(jagged: Jagged, bounds_FW1: Tensor) -> Buckets:
    """Send each id to the bucket w with bounds[w] <= id < bounds[w + 1], where it becomes id - bounds[w].

    `bounds_FW1` holds the bounds of each feature, from 0 to the rows of its table (see `row_bounds`), on the CPU. A
    range may be empty. The order inside a bag is kept. An id outside its table raises; on a GPU, where that would wait
    for the device, it goes to the first bucket as -1, which every lookup refuses.
    """
    features = len(jagged.all_features)
    if bounds_FW1.dim() != 2 or bounds_FW1.shape[0] != features:
        got = tuple(bounds_FW1.shape)
        raise SpecError(f"row bounds: got {got}", f"a row for each of the {features} features (see row_bounds)")
    jagged = jagged.expanded().contiguous()
    native = _moves_natively([jagged])
    try:
        values, lengths, weights, positions, starts = torch.ops.rowwise.bucketize(
            jagged.values_N, jagged.lengths_FB, jagged.weights_N if native else None, bounds_FW1
        )
    except (RuntimeError, ValueError):
        # The kernel knows a position in a tensor; names take a search that only a failure pays for.
        check.check_lengths(jagged)
        check.check_rows(jagged, bounds_FW1[:, -1].tolist())
        raise
    if jagged.weights_N is None:
        weights = None
    elif not native:
        weights = jagged.weights_N[positions]
    return Buckets(
        features=jagged.features,
        values_N=values,
        lengths_WFB=lengths,
        weights_N=weights,
        positions_N=positions,
        starts_W1=starts,
    )


def deduplicate(values_N: Tensor, bounds_S1: Tensor) -> Unique:
    """The distinct ids of each segment values[bounds[s] : bounds[s + 1]], ascending; the bounds are on the CPU."""
    try:
        values, bounds, inverse, counts = torch.ops.rowwise.deduplicate(values_N.contiguous(), bounds_S1)
    except RuntimeError as error:
        if "do not ascend" not in str(error):
            raise
        first = bounds_S1.flatten()[:8].tolist()
        raise BatchError(f"bounds of segments begin {first}", f"bounds that ascend from 0 to {len(values_N)}") from None
    return Unique(values_U=values, bounds_S1=bounds, inverse_N=inverse, counts_U=counts)


def lengths(offsets: Tensor) -> Tensor:
    """Ids in each bag, from offsets [bags + 1]."""
    try:
        return torch.ops.rowwise.lengths(offsets.contiguous())
    except RuntimeError:
        if not offsets.numel() or int(offsets.flatten()[0]):
            got = offsets.flatten()[:3].tolist()
            raise BatchError(f"offsets begin {got}", "offsets from 0 to the number of ids") from None
        descends = torch.nonzero(offsets[1:] < offsets[:-1])
        if not len(descends):
            raise
        at = int(descends[0])
        raise BatchError(
            f"offsets descend from {int(offsets[at])} to {int(offsets[at + 1])} at position {at + 1}",
            "offsets that ascend from 0, each where a bag begins",
        ) from None


def _expand_shared(jagged: Jagged, features: Sequence[str]) -> Jagged:
    """The batch with these features and without shared bags: shared samples are expanded."""
    return jagged if jagged.shared is None else replace(jagged.expand_features(features), shared=None)


def _split_shared(jagged: Jagged, shared: SharedBags, sizes: Sequence[int]) -> list[Jagged]:
    """`split` that keeps bags shared; a distinct sample whose samples are in several parts is in each of them."""
    shared.check()
    own = split(replace(jagged, shared=None), sizes) if jagged.features else [jagged.without_samples()] * len(sizes)
    batches: list[Jagged] = []
    for part, inverse_B in zip(own, shared.inverse_B.split(list(sizes)), strict=True):
        low, high = (int(inverse_B[0]), int(inverse_B[-1])) if len(inverse_B) else (0, -1)
        bags = shared.jagged.of_samples(torch.arange(low, high + 1, device=inverse_B.device))
        batches.append(replace(part, shared=SharedBags(jagged=bags, inverse_B=inverse_B - low)))
    return batches


def _indices(jagged: Jagged, features: Sequence[str]) -> list[int]:
    at = {name: index for index, name in enumerate(jagged.features)}
    missing = [name for name in features if name not in at]
    if missing:
        raise BatchError(f"no feature {missing[0]!r} in the batch; it has {', '.join(jagged.all_features)}")
    return [at[name] for name in features]


def _moves_natively(jaggeds: Sequence[Jagged]) -> bool:
    """Whether the kernels can move the weights: float32, and no gradient to record."""
    return all(
        j.weights_N is not None
        and j.weights_N.dtype == torch.float32
        and not (j.weights_N.requires_grad and torch.is_grad_enabled())
        for j in jaggeds
    )


def _take(jaggeds: Sequence[Jagged], segments: list[Segment], features: Sequence[str], parts: int = 1) -> list[Jagged]:
    """`parts` batches of these features, made of segments of bags in order."""
    jaggeds = [jagged.contiguous() for jagged in jaggeds]
    segments_RC = torch.tensor(segments, dtype=torch.int64).view(-1, 3)
    values = [j.values_N for j in jaggeds]
    bags = [j.lengths_FB for j in jaggeds]
    weights = [j.weights_N for j in jaggeds if j.weights_N is not None]
    weighted = len(weights) == len(jaggeds)
    native = _moves_natively(jaggeds)
    try:
        taken, lengths_, moved, starts = torch.ops.rowwise.take(values, bags, weights if native else [], segments_RC)
    except RuntimeError:
        for jagged in jaggeds:
            check.check_lengths(jagged)
        raise
    if weighted and not native:
        # Position of each value in the concatenated batches: the same segments taken of 0, 1, 2, ...
        count = torch.arange(sum(len(v) for v in values), device=taken.device).split([len(v) for v in values])
        moved = torch.cat(weights)[torch.ops.rowwise.take(count, bags, [], segments_RC)[0]]
    per_part = len(segments) // max(1, parts)
    starts = starts.tolist()
    bag_sizes = [sum(count for _, _, count in segments[k * per_part : (k + 1) * per_part]) for k in range(parts)]
    spans = [slice(starts[k * per_part], starts[(k + 1) * per_part]) for k in range(parts)]
    return [
        Jagged(
            features=tuple(features),
            values_N=taken[span],
            lengths_FB=bags_of_part,
            weights_N=moved[span] if weighted else None,
        )
        for span, bags_of_part in zip(spans, lengths_.split(bag_sizes), strict=True)
    ]
