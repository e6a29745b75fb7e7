"""From encoded splits to a `Batch`: slices of the splits that it has rows of, each copied straight to its place."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowwise.batch import Batch, Jagged, Shared
from rowwise.ingest.bags import Ints
from rowwise.ingest.block import Encoded
from rowwise.ingest.columns import Columns


class SplitRows(NamedTuple):
    """Rows `begin` up to `end` of a split."""

    encoded: Encoded
    begin: int
    end: int
    place: int = 0  # of the first of them in a batch

    def within(self, begin: int, end: int) -> "SplitRows":
        """The rows of this range that are in a part of the batch."""
        first, last = (min(max(self.begin + x - self.place, self.begin), self.end) for x in (begin, end))
        return SplitRows(self.encoded, first, last, self.place + first - self.begin)


def collate(pieces: Sequence[SplitRows], columns: Columns) -> Batch:
    """The rows of the pieces, one after another."""
    return Batch(
        dense_BF=_concatenate_bags(pieces, lambda e: e.dense_RF),
        sparse=_sparse(pieces, columns),
        labels_BK=_concatenate_bags(pieces, lambda e: e.labels_RK),
        weights_B=None if columns.weight is None else _concatenate_bags(pieces, lambda e: e.weights_R),
        keys_B=None if columns.key is None else _concatenate_bags(pieces, lambda e: e.keys_R),
        times_B=None if columns.time is None else _concatenate_bags(pieces, lambda e: e.times_R),
    )


def _concatenate_bags(pieces: Sequence[SplitRows], part: Callable[[Encoded], NDArray[np.generic] | None]) -> Tensor:
    picked: list[NDArray[np.generic]] = []
    for encoded, begin, end, _ in pieces:
        column = part(encoded)
        assert column is not None  # the columns say that it is there
        picked.append(column[begin:end])
    # Always a copy: a batch that is kept does not keep its whole split.
    return torch.from_numpy(np.concatenate(picked))


def _sparse(pieces: Sequence[SplitRows], columns: Columns) -> Jagged:
    """Features of all rows, and beside them those that neighbouring rows share. See [Note: Shared bags]."""
    names = [s.feature_name for s in columns.sparse]
    if not columns.shared:
        return _make_jagged(pieces, {name: f for f, name in enumerate(names)})
    own, shared = ({n: f for f, n in enumerate(names) if (n in columns.shared) is one} for one in (False, True))
    distinct: list[SplitRows] = []
    inverse: list[Ints] = []
    count = 0
    for encoded, begin, end, _ in pieces:
        inverse_R = encoded.inverse_R
        assert inverse_R is not None  # the columns say that it is there
        first, last = (int(inverse_R[begin]), int(inverse_R[end - 1]) + 1) if begin < end else (0, 0)
        distinct.append(SplitRows(encoded, first, last))
        inverse.append(inverse_R[begin:end] + (count - first))
        count += last - first
    together = Shared(jagged=_make_jagged(distinct, shared), inverse_B=torch.from_numpy(np.concatenate(inverse)))
    return _make_jagged(pieces, own, together)


def _make_jagged(pieces: Sequence[SplitRows], features: Mapping[str, int], shared: Shared | None = None) -> Jagged:
    values: list[Ints] = [np.empty(0, np.int64)]
    lengths_FB = np.ones((len(features), sum(end - begin for _, begin, end, _ in pieces)), np.int64)
    for lengths_B, f in zip(lengths_FB, features.values(), strict=True):
        at = 0
        for encoded, begin, end, _ in pieces:
            values_N, offsets_R1 = encoded.bags[f].values_N, encoded.bags[f].offsets_R1
            if offsets_R1 is None:
                values.append(values_N[begin:end])
            else:
                values.append(values_N[offsets_R1[begin] : offsets_R1[end]])
                np.subtract(
                    offsets_R1[begin + 1 : end + 1], offsets_R1[begin:end], out=lengths_B[at : at + end - begin]
                )
            at += end - begin
    lengths = torch.from_numpy(lengths_FB.reshape(-1))
    values_N = torch.from_numpy(np.concatenate(values))
    return Jagged(features=tuple(features), values_N=values_N, lengths_FB=lengths, shared=shared)
