"""`Jagged`: the ids of a batch as one jagged tensor; `Batch`: a training batch with dense features and labels.

All sparse features are in one `Jagged`, feature-major: the ids of all samples of the first feature, then of the second.
So a batch is two buffers, not two per feature. The methods `keys`, `values`, `lengths`, `weights_or_none`, `offsets`
and `stride` are those of TorchRec's KeyedJaggedTensor, so either class can be used for the other; TorchRec is never
imported.

[Note: Shared bags] The samples of a session are neighbours and have equal bags of some features. A batch may store such
bags once (`Jagged.shared`), with the index of the distinct sample of each sample. A lookup reads each distinct bag
once; all other code calls `expanded()`, which has a bag for each feature and sample. `features`, `values_N`,
`lengths_FB` and `weights_N` do not include the shared features; the methods of TorchRec's class raise for such a batch,
so that no caller overlooks them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rowwise.base.errors import BatchError

T = TypeVar("T")
ID_TYPES = (torch.int32, torch.int64)


class KeyedJagged(Protocol):
    """The methods of TorchRec's KeyedJaggedTensor that `Jagged.from_keyed` calls."""

    def keys(self) -> Sequence[str]:
        """Names of the features."""
        ...

    def values(self) -> Tensor:
        """All ids, feature after feature."""
        ...

    def lengths(self) -> Tensor:
        """Ids in each bag."""
        ...

    def weights_or_none(self) -> Tensor | None:
        """Weight of each id; None if the batch has no weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Jagged:
    """Ids of F features for B samples: bag (f, b) is the next lengths_FB[f * B + b] ids of values_N.

    Further features may be in `shared`, see [Note: Shared bags].
    """

    features: tuple[str, ...]
    values_N: Tensor
    lengths_FB: Tensor
    weights_N: Tensor | None = None
    shared: "SharedBags | None" = None

    def __post_init__(self) -> None:
        """Check shapes and dtypes; the lookup checks the values of lengths, as it reads them anyway."""
        if not self.all_features:
            raise BatchError("a batch has no features", "at least one, with an empty list for samples without ids")
        if len(set(self.all_features)) != len(self.all_features):
            raise BatchError(
                f"a feature is named twice: {', '.join(self.all_features)}", "each feature once, own or shared"
            )
        for name, tensor in (("values", self.values_N), ("lengths", self.lengths_FB)):
            if not isinstance(tensor, Tensor) or tensor.dtype not in ID_TYPES or tensor.dim() != 1:
                got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise BatchError(f"{name}: got {got}", "one dimension of int32 or int64")
        # `batch_size` is this number over the number of features.
        if self.lengths_FB.numel() % max(1, len(self.features)):
            raise BatchError(
                f"{self.lengths_FB.numel()} lengths do not divide among {len(self.features)} features",
                "one for each feature and sample",
            )
        # Any float type, as weights computed under autocast have 16 bits; the lookup converts them to float32.
        weights = self.weights_N
        if weights is not None and (weights.shape != self.values_N.shape or not weights.is_floating_point()):
            raise BatchError(
                f"weights: got {weights.dtype} {tuple(weights.shape)}",
                f"one float for each of the {self.values_N.numel()} ids",
            )
        if self.shared is not None:
            _check_shared(self, self.shared)

    @property
    def batch_size(self) -> int:
        """Samples in the batch."""
        if self.shared is not None:
            return self.shared.inverse_B.numel()
        return self.lengths_FB.numel() // len(self.features)

    @property
    def all_features(self) -> tuple[str, ...]:
        """Own features, then shared ones: the order of `expanded()`."""
        return self.features if self.shared is None else self.features + self.shared.jagged.features

    def expanded(self) -> "Jagged":
        """The batch without sharing: a bag for each feature and sample."""
        return self.expand_features(self.all_features)

    def expand_features(self, features: Collection[str]) -> "Jagged":
        """The batch with a bag for each sample of these features, if they are shared."""
        shared = self.shared
        expanding = () if shared is None else tuple(f for f in shared.jagged.features if f in features)
        if shared is None or not expanding:
            return self
        expanded = shared.expanded(expanding)
        remaining = tuple(f for f in shared.jagged.features if f not in features)
        weights = [w for w in (self.weights_N, expanded.weights_N) if w is not None]
        return Jagged(
            features=self.features + expanding,
            values_N=torch.cat([self.values_N, expanded.values_N]),
            lengths_FB=torch.cat([self.lengths_FB, expanded.lengths_FB]),
            weights_N=torch.cat(weights) if weights else None,
            shared=shared.select(remaining) if remaining else None,
        )

    def of_samples(self, samples_B: Tensor, features: Sequence[str] | None = None) -> "Jagged":
        """The bags of these samples, in this order, of the own features `features` (default: all)."""
        features, device = self.features if features is None else features, self.lengths_FB.device
        index_F = torch.tensor([self.features.index(f) for f in features], dtype=torch.int64, device=device)
        ends = self.lengths_FB.cumsum(0)
        total, ids = int(ends[-1]) if len(ends) else 0, self.values_N.numel()
        if total != ids or (total and int(self.lengths_FB.min()) < 0):
            names = ", ".join(self.features)
            raise BatchError(
                f"lengths of {names} add up to {total}, for {ids} ids", f"lengths of at least 0 that add up to {ids}"
            )
        bags = (index_F.unsqueeze(1) * self.batch_size + samples_B).flatten()
        lengths_FB = self.lengths_FB.index_select(0, bags)
        # Output id n is id n + shift of this batch, where `shift` is how far its bag moves to the front.
        new_ends = lengths_FB.cumsum(0)
        count = int(new_ends[-1]) if len(new_ends) else 0
        shift = ends.index_select(0, bags) - new_ends
        source_N = shift.repeat_interleave(lengths_FB, output_size=count) + torch.arange(count, device=device)
        return Jagged(
            features=tuple(features),
            values_N=self.values_N.index_select(0, source_N),
            lengths_FB=lengths_FB,
            weights_N=None if self.weights_N is None else self.weights_N.index_select(0, source_N),
        )

    def lengths_of(self, feature: str) -> Tensor:
        """The number of ids of a feature, own or shared, in each sample [B]."""
        shared = self.shared
        if shared is not None and feature in shared.jagged.features:
            return shared.jagged.lengths_of(feature).index_select(0, shared.inverse_B)
        if feature not in self.features:
            raise BatchError(f"no feature {feature!r}; there are {', '.join(self.all_features)}")
        at, batch = self.features.index(feature), self.batch_size
        return self.lengths_FB[at * batch : (at + 1) * batch]

    def id_ranges(self) -> dict[str, tuple[int, int]]:
        """Where the ids of each own feature begin and end in `values_N`."""
        lengths_FB = self.lengths_FB.view(len(self.features), self.batch_size)
        ends_F = lengths_FB.sum(1, dtype=torch.int64).cumsum(0).tolist()
        return dict(zip(self.features, pairwise([0, *ends_F]), strict=True))

    def ids_of(self, feature: str) -> Tensor:
        """The ids of an own feature."""
        begin, end = self.id_ranges()[feature]
        return self.values_N[begin:end]

    def without_samples(self) -> "Jagged":
        """An empty batch with the same features."""
        return self.map_tensors(lambda x: x[:0].clone())

    @classmethod
    def from_lists(cls, bags: Mapping[str, Sequence[Sequence[int]]]) -> "Jagged":
        """A batch from {feature: one list of ids per sample}."""
        sizes = {name: len(samples) for name, samples in bags.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(
                f"features have different numbers of samples: {sizes}", "a list for each sample, maybe empty"
            )
        values = [i for samples in bags.values() for bag in samples for i in bag]
        lengths = [len(bag) for samples in bags.values() for bag in samples]
        try:
            # Without a dtype, as an integer one would truncate floats.
            values_N = torch.tensor(values, dtype=None if values else torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchError(_name_bad_value(bags)) from error
        return cls(features=tuple(bags), values_N=values_N, lengths_FB=torch.tensor(lengths, dtype=torch.int64))

    @classmethod
    def from_keyed(cls, keyed: "KeyedJagged | Jagged") -> "Jagged":
        """A batch from a KeyedJaggedTensor, or any class with its methods; a `Jagged` is returned as it is."""
        if isinstance(keyed, Jagged):
            return keyed
        try:
            parts = keyed.keys(), keyed.values(), keyed.lengths(), keyed.weights_or_none()
        except AttributeError:
            raise BatchError(
                f"ids of a batch: got {type(keyed).__name__}",
                "a Jagged, or a class with keys, values, lengths and weights_or_none as KeyedJaggedTensor has",
            ) from None
        names, values_N, lengths_FB, weights_N = parts
        return cls(features=tuple(names), values_N=values_N, lengths_FB=lengths_FB, weights_N=weights_N)

    def to_keyed(self, make: Callable[..., T]) -> T:
        """Convert to another class: `jagged.to_keyed(torchrec.KeyedJaggedTensor)`."""
        plain = self.expanded()
        return make(keys=list(plain.features), values=plain.values_N, weights=plain.weights_N, lengths=plain.lengths_FB)

    def contiguous(self) -> "Jagged":
        """The batch with contiguous tensors; itself, if they are."""
        tensors = [self.values_N, self.lengths_FB] + ([] if self.weights_N is None else [self.weights_N])
        shared = None if self.shared is None else self.shared.contiguous()
        if shared is self.shared and all(t.is_contiguous() for t in tensors):
            return self
        weights = None if self.weights_N is None else self.weights_N.contiguous()
        values, lengths = self.values_N.contiguous(), self.lengths_FB.contiguous()
        return replace(self, values_N=values, lengths_FB=lengths, weights_N=weights, shared=shared)

    def to(self, device: torch.device | str) -> "Jagged":
        return self.map_tensors(lambda x: x.to(device))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Jagged":
        """A copy with `change` applied to each tensor."""
        return replace(
            self,
            values_N=change(self.values_N),
            lengths_FB=change(self.lengths_FB),
            weights_N=None if self.weights_N is None else change(self.weights_N),
            shared=self.shared and self.shared.map_tensors(change),
        )

    def keys(self) -> list[str]:
        """Names of the features."""
        return list(_require_unshared(self).features)

    def values(self) -> Tensor:
        return _require_unshared(self).values_N

    def lengths(self) -> Tensor:
        """Ids in each bag."""
        return _require_unshared(self).lengths_FB

    def weights_or_none(self) -> Tensor | None:
        """Weight of each id; None if the batch has no weights."""
        return _require_unshared(self).weights_N

    def offsets(self) -> Tensor:
        """First id of each bag, and the number of ids."""
        _require_unshared(self)
        return torch.cat([self.lengths_FB.new_zeros(1), self.lengths_FB.cumsum(0, dtype=self.lengths_FB.dtype)])

    def stride(self) -> int:
        """The batch size, by TorchRec's name."""
        return self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBags:
    """Features whose bags neighbouring samples share: sample b has bag `inverse_B[b]` of each. See [Note: Shared bags].

    `inverse_B` ascends from 0 to U - 1 in steps of 0 or 1.
    """

    jagged: Jagged  # the U distinct samples
    inverse_B: Tensor

    def __post_init__(self) -> None:
        """Check shapes and dtypes; `check` checks the values when they are used."""
        inverse = self.inverse_B
        if inverse.dtype not in ID_TYPES or inverse.dim() != 1:
            raise BatchError(
                f"distinct samples of a batch: got {inverse.dtype} {tuple(inverse.shape)}",
                "one dimension of int32 or int64",
            )
        if self.jagged.shared is not None:
            raise BatchError("shared features are shared again: call expanded() on the distinct samples")

    def expanded(self, features: Sequence[str] | None = None) -> Jagged:
        """The bags of all samples, of the shared features `features` (default: all)."""
        self.check()
        return self.jagged.of_samples(self.inverse_B, features)

    def select(self, features: Sequence[str]) -> "SharedBags":
        """The shared bags of these features."""
        samples_U = torch.arange(self.jagged.batch_size, device=self.inverse_B.device)
        return SharedBags(jagged=self.jagged.of_samples(samples_U, features), inverse_B=self.inverse_B)

    def check(self) -> None:
        """Raise unless `inverse_B` ascends from 0 to U - 1 in steps of 0 or 1."""
        inverse_B, distinct = self.inverse_B, self.jagged.batch_size
        if not len(inverse_B) and not distinct:
            return
        # With -1 before and U after it, the first and last value are checked as steps too.
        ends = inverse_B.new_tensor([-1, distinct])
        steps = torch.cat([ends[:1], inverse_B, ends[1:]]).diff()
        least_step, largest_step = map(int, steps[1:-1].aminmax()) if len(steps) > 2 else (0, 1)
        if (int(steps[0]), int(steps[-1])) == (1, 1) and least_step >= 0 and largest_step <= 1:
            return
        steps[1:-1][steps[1:-1] == 0] = 1
        at = int((steps != 1).nonzero()[0])
        nearby = inverse_B[max(0, at - 2) : at + 2].tolist()
        raise BatchError(
            f"shared features {', '.join(self.jagged.features)}: inverse_B is {nearby} around sample {at}",
            f"indices that ascend from 0 to {distinct - 1} in steps of 0 or 1",
        )

    def contiguous(self) -> "SharedBags":
        jagged = self.jagged.contiguous()
        if jagged is self.jagged and self.inverse_B.is_contiguous():
            return self
        return SharedBags(jagged=jagged, inverse_B=self.inverse_B.contiguous())

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "SharedBags":
        return SharedBags(jagged=self.jagged.map_tensors(change), inverse_B=change(self.inverse_B))


def _require_unshared(jagged: Jagged) -> Jagged:
    """The batch, without shared features: a caller that reads own features would miss those, so they raise."""
    if jagged.shared is not None:
        names = ", ".join(jagged.shared.jagged.features)
        raise BatchError(f"the bags of {names} are shared by samples (Jagged.shared): call expanded() first")
    return jagged


def _check_shared(jagged: Jagged, shared: SharedBags) -> None:
    """Raise unless own and shared features are of the same samples, and both or neither have weights."""
    bags, samples = jagged.lengths_FB.numel(), shared.inverse_B.numel()
    if bags != len(jagged.features) * samples:
        raise BatchError(
            f"{bags} lengths for {len(jagged.features)} features of {samples} samples",
            "one for each feature and sample",
        )
    if (jagged.weights_N is None) != (shared.jagged.weights_N is None):
        raise BatchError("only some features of a batch have weights", "weights of own and shared features, or of none")


def _name_bad_value(bags: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """Describe the first value that is not an integer of 64 bits: feature, sample and position."""
    for name, samples in bags.items():
        for sample, bag in enumerate(samples):
            for position, value in enumerate(bag):
                if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
                    where = f"feature {name!r}, sample {sample}, position {position}"
                    return f"{where}: {value!r} is not an id: expected a whole number of 64 bits; hash strings first"
    return "the ids of the batch are not integers: expected whole numbers of 64 bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A training batch: dense features [B, F], sparse ids, labels [B, tasks], and optional columns of each sample."""

    dense_BF: Tensor
    sparse: Jagged
    labels_BK: Tensor
    weights_B: Tensor | None = None  # weight of each sample in the loss; None: 1
    keys_B: Tensor | None = None  # int64: row of the data that each sample comes from
    times_B: Tensor | None = None  # int64: time of each sample

    def __post_init__(self) -> None:
        """Check that all parts have the same number of samples."""
        sizes = {
            "dense": self.dense_BF.shape[0],
            "sparse": self.sparse.batch_size,
            "labels": self.labels_BK.shape[0],
        }
        for name, tensor in (("weights", self.weights_B), ("keys", self.keys_B), ("times", self.times_B)):
            if tensor is not None:
                sizes[name] = tensor.shape[0]
        if len(set(sizes.values())) > 1:
            raise BatchError(
                f"parts of the batch have different numbers of samples: {sizes}", "one row of each part for each sample"
            )

    def of_samples(self, samples_B: Tensor) -> "Batch":
        """These samples, in this order, without sharing."""
        return self._replace_parts(lambda x: x[samples_B], self.sparse.expanded().of_samples(samples_B))

    def to(self, device: torch.device | str, *, ids: bool = True) -> "Batch":
        """The batch on a device; `ids=False` leaves the sparse ids where they are."""
        return self.map_tensors(lambda x: x.to(device), ids=ids)

    def map_tensors(self, change: Callable[[Tensor], Tensor], *, ids: bool = True) -> "Batch":
        """A copy with `change` applied to each tensor; `ids=False` leaves the sparse ids as they are."""
        return self._replace_parts(change, self.sparse.map_tensors(change) if ids else self.sparse)

    def _replace_parts(self, change: Callable[[Tensor], Tensor], sparse: Jagged) -> "Batch":
        """A copy with `change` applied to each tensor field, and with these ids."""
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, sparse=sparse, **{name: change(x) for name, x in parts if isinstance(x, Tensor)})
