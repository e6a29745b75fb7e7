"""What flows: the ids of a batch as one jagged array, and the batch around it.

All sparse features travel in one `Jagged`, feature-major: first every sample's ids of the first feature, then
of the second. Two buffers move, not two a feature. The methods `keys`, `values`, `lengths`,
`weights_or_none`, `offsets` and `stride` are those of TorchRec's KeyedJaggedTensor, so either can stand in
for the other; TorchRec is never imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rowwise.errors import BatchError

T = TypeVar("T")
ID_TYPES = (torch.int32, torch.int64)


class KeyedJagged(Protocol):
    """The part of TorchRec's KeyedJaggedTensor that is read."""

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
        """Weight of each id, if any."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Jagged:
    """Ids of F features for B samples: bag (f, b) is the next lengths_FB[f * B + b] ids of values_N."""

    features: tuple[str, ...]
    values_N: Tensor
    lengths_FB: Tensor
    weights_N: Tensor | None = None

    def __post_init__(self) -> None:
        """Shapes and types; what the lengths hold is checked by the lookup, which reads them anyway."""
        if not self.features:
            raise BatchError("a batch needs at least one feature")
        if len(set(self.features)) != len(self.features):
            raise BatchError(f"a feature is named twice: {', '.join(self.features)}")
        for name, tensor in (("values", self.values_N), ("lengths", self.lengths_FB)):
            if tensor.dtype not in ID_TYPES or tensor.dim() != 1:
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise BatchError(f"{name}: got {got}; want one dimension of int32 or int64")
        # The only thing that says how many samples there are, so it has to come out even.
        if self.lengths_FB.numel() % len(self.features):
            got, want = self.lengths_FB.numel(), len(self.features)
            raise BatchError(f"{got} lengths do not divide among {want} features: want one for each feature and sample")
        # Weights may be of any float type: autocast makes them of 16 bits. The lookup computes in 32.
        weights = self.weights_N
        if weights is not None and (weights.shape != self.values_N.shape or not weights.is_floating_point()):
            got = f"{weights.dtype} {tuple(weights.shape)}"
            raise BatchError(f"weights: got {got}; want one float for each of the {self.values_N.numel()} ids")

    @property
    def batch_size(self) -> int:
        """Samples in the batch."""
        return self.lengths_FB.numel() // len(self.features)

    @classmethod
    def from_lists(cls, bags: Mapping[str, Sequence[Sequence[int]]]) -> "Jagged":
        """From {feature: one list of ids for each sample}."""
        sizes = {name: len(samples) for name, samples in bags.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"features have different numbers of samples: {sizes}")
        values = [i for samples in bags.values() for bag in samples for i in bag]
        lengths = [len(bag) for samples in bags.values() for bag in samples]
        try:
            values_N = torch.tensor(values, dtype=None if values else torch.int64)  # floats are refused, not cut
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchError(_name_bad_value(bags)) from error
        return cls(
            features=tuple(bags),
            values_N=values_N,
            lengths_FB=torch.tensor(lengths, dtype=torch.int64),
        )

    @classmethod
    def from_keyed(cls, keyed: "KeyedJagged | Jagged") -> "Jagged":
        """From anything shaped like TorchRec's KeyedJaggedTensor."""
        # Ours passes through untouched, so that a model may call this on whatever it is given.
        if isinstance(keyed, Jagged):
            return keyed
        return cls(
            features=tuple(keyed.keys()),
            values_N=keyed.values(),
            lengths_FB=keyed.lengths(),
            weights_N=keyed.weights_or_none(),
        )

    def to_keyed(self, make: Callable[..., T]) -> T:
        """As another class: `jagged.to_keyed(torchrec.KeyedJaggedTensor)`."""
        return make(keys=list(self.features), values=self.values_N, weights=self.weights_N, lengths=self.lengths_FB)

    def contiguous(self) -> "Jagged":
        """The same batch with tensors that kernels can walk; itself, if they are already."""
        tensors = [self.values_N, self.lengths_FB] + ([] if self.weights_N is None else [self.weights_N])
        if all(t.is_contiguous() for t in tensors):
            return self
        weights = None if self.weights_N is None else self.weights_N.contiguous()
        return Jagged(
            features=self.features,
            values_N=self.values_N.contiguous(),
            lengths_FB=self.lengths_FB.contiguous(),
            weights_N=weights,
        )

    def to(self, device: torch.device | str) -> "Jagged":
        """On another device."""
        weights = None if self.weights_N is None else self.weights_N.to(device)
        return Jagged(
            features=self.features,
            values_N=self.values_N.to(device),
            lengths_FB=self.lengths_FB.to(device),
            weights_N=weights,
        )

    def keys(self) -> list[str]:
        """Names of the features."""
        return list(self.features)

    def values(self) -> Tensor:
        """All ids."""
        return self.values_N

    def lengths(self) -> Tensor:
        """Ids in each bag."""
        return self.lengths_FB

    def weights_or_none(self) -> Tensor | None:
        """Weight of each id, if any."""
        return self.weights_N

    def offsets(self) -> Tensor:
        """Where each bag begins, and the end of the last."""
        return torch.cat([self.lengths_FB.new_zeros(1), self.lengths_FB.cumsum(0, dtype=self.lengths_FB.dtype)])

    def stride(self) -> int:
        """Samples in the batch, under TorchRec's name."""
        return self.batch_size


def _name_bad_value(bags: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """The first value that cannot be an id."""
    for name, samples in bags.items():
        for sample, bag in enumerate(samples):
            for position, value in enumerate(bag):
                if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
                    where = f"feature {name!r}, sample {sample}, position {position}"
                    return f"{where}: {value!r} is not an id: want a whole number of 64 bits; hash strings first"
    return "the ids of the batch do not make a tensor of whole numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One training batch: dense features [B, F], sparse ids, labels [B, tasks], and what else is known of a sample."""

    dense_BF: Tensor
    sparse: Jagged
    labels_BK: Tensor
    weights_B: Tensor | None = None  # how much a sample counts in the loss; None: all alike
    keys_B: Tensor | None = None  # int64: which row of the data a sample is
    times_B: Tensor | None = None  # int64: when it happened

    def __post_init__(self) -> None:
        """All parts hold the same samples."""
        sizes = {
            "dense": self.dense_BF.shape[0],
            "sparse": self.sparse.batch_size,
            "labels": self.labels_BK.shape[0],
        }
        for name, tensor in (("weights", self.weights_B), ("keys", self.keys_B), ("times", self.times_B)):
            if tensor is not None:
                sizes[name] = tensor.shape[0]
        if len(set(sizes.values())) > 1:
            raise BatchError(f"parts of the batch have different numbers of samples: {sizes}")

    def to(self, device: torch.device | str) -> "Batch":
        """On another device."""
        moved = (None if x is None else x.to(device) for x in (self.weights_B, self.keys_B, self.times_B))
        weights_B, keys_B, times_B = moved
        return Batch(
            dense_BF=self.dense_BF.to(device),
            sparse=self.sparse.to(device),
            labels_BK=self.labels_BK.to(device),
            weights_B=weights_B,
            keys_B=keys_B,
            times_B=times_B,
        )
