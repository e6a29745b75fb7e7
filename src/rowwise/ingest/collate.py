"""Collates slices of encoded splits into a `Batch`; each slice is copied once, into the batch's tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowwise.ingest.block import EncodedRows, Ints
from rowwise.ingest.columns import Columns
from rowwise.tables.batch import Batch, Jagged, SharedBags


class SplitRows(NamedTuple):
    """A slice of a split: rows `begin` up to `end`."""

    encoded: EncodedRows
    begin: int
    end: int
    batch_row: int = 0  # row of the global batch at which the slice begins

    def clip(self, begin: int, end: int) -> "SplitRows":
        """The rows of the slice that lie in rows `begin` up to `end` of the batch."""
        first, last = (min(max(self.begin + x - self.batch_row, self.begin), self.end) for x in (begin, end))
        return SplitRows(self.encoded, first, last, self.batch_row + first - self.begin)


def collate(slices: Sequence[SplitRows], columns: Columns) -> Batch:
    """A batch of the rows of the slices, one after another."""
    return Batch(
        dense_BF=_concatenate(slices, lambda e: e.dense_RF),
        sparse=_sparse(slices, columns),
        labels_BK=_concatenate(slices, lambda e: e.labels_RK),
        weights_B=None if columns.weight is None else _concatenate(slices, lambda e: e.weights_R),
        keys_B=None if columns.key is None else _concatenate(slices, lambda e: e.keys_R),
        times_B=None if columns.time is None else _concatenate(slices, lambda e: e.times_R),
    )


def _concatenate(slices: Sequence[SplitRows], array_of: Callable[[EncodedRows], NDArray[np.generic] | None]) -> Tensor:
    parts: list[NDArray[np.generic]] = []
    for encoded, begin, end, _ in slices:
        column = array_of(encoded)
        assert column is not None  # `columns` has it, so it was encoded
        parts.append(column[begin:end])
    # Always copy: a view would keep the whole split alive as long as the batch.
    return torch.from_numpy(np.concatenate(parts))


def _sparse(slices: Sequence[SplitRows], columns: Columns) -> Jagged:
    """The features with a bag for each row, and those with a bag for each distinct row. See [Note: Shared bags]."""
    names = [s.feature_name for s in columns.sparse]
    if not columns.shared:
        return _jagged(slices, {name: f for f, name in enumerate(names)})
    per_row = {name: f for f, name in enumerate(names) if name not in columns.shared}
    shared = {name: f for f, name in enumerate(names) if name in columns.shared}
    distinct: list[SplitRows] = []
    inverse: list[Ints] = []
    count = 0
    for encoded, begin, end, _ in slices:
        inverse_R = encoded.inverse_R
        assert inverse_R is not None  # `columns.shared` is not empty, so it was encoded
        # inverse_R ascends, so the distinct rows of a slice are a slice, too.
        first, last = (int(inverse_R[begin]), int(inverse_R[end - 1]) + 1) if begin < end else (0, 0)
        distinct.append(SplitRows(encoded, first, last))
        inverse.append(inverse_R[begin:end] + (count - first))
        count += last - first
    stream = SharedBags(jagged=_jagged(distinct, shared), inverse_B=torch.from_numpy(np.concatenate(inverse)))
    return _jagged(slices, per_row, stream)


def _jagged(slices: Sequence[SplitRows], features: Mapping[str, int], shared: SharedBags | None = None) -> Jagged:
    values: list[Ints] = [np.empty(0, np.int64)]
    lengths_FB = np.ones((len(features), sum(end - begin for _, begin, end, _ in slices)), np.int64)
    for lengths_B, f in zip(lengths_FB, features.values(), strict=True):
        at = 0
        for encoded, begin, end, _ in slices:
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
