"""Logits of raw rows, for `rowwise serve` and `rowwise predict`: bitwise independent of batch and process."""

from collections.abc import Callable, Iterator, Mapping
from typing import final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rowwise.ingest.block import Ints
from rowwise.ingest.bound import BoundPreparation, PreparedRows
from rowwise.models.inference import RowBlocks, RowSpan, choose_blocks
from rowwise.tables.batch import Batch, Jagged

Logits = Callable[[Batch], Tensor]  # [B, K] in float32 on the host


@final
class Forward:
    """Prepares rows and computes their logits, in blocks that keep a row's bits ([Note: Blocks of rows]).

    Args:
        preparation: bound to the raw columns.
        logits_of: the model, called in `inference_mode`.
        blocks: block sizes of batches.
    """

    def __init__(self, preparation: BoundPreparation, logits_of: Logits, blocks: RowBlocks) -> None:
        self.preparation, self.blocks, self._logits_of = preparation, blocks, logits_of

    def __call__(
        self,
        arrays: Mapping[str, pa.Array],
        rows: int,
        max_rows: int,
        on_batch: Callable[[RowSpan], None] | None = None,
    ) -> Tensor:
        """Logits [rows, K] in batches of up to `max_rows`; `on_batch` is called after each."""
        parts: list[Tensor] = []
        for span, logits_BK in self.batches(arrays, rows, max_rows):
            parts.append(logits_BK)
            if on_batch is not None:
                on_batch(span)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def batches(self, arrays: Mapping[str, pa.Array], rows: int, max_rows: int) -> Iterator[tuple[RowSpan, Tensor]]:
        """Spans of rows with their logits, batch by batch."""
        for span in self.blocks.cut(rows, max_rows):
            logits_BK = self.of_order(arrays, _padded_order(span.begin, span.end, span.padding))
            yield span, logits_BK[: span.end - span.begin]

    def of_order(self, arrays: Mapping[str, pa.Array], order_B: Ints) -> Tensor:
        """Logits [B, K] of the rows `order_B`, in one batch."""
        return self._logits_of(make_batch(self.preparation(arrays, order_B), self.preparation))


def choose_blocks_of(preparation: BoundPreparation, logits_of: Logits, sample: pa.Table) -> RowBlocks:
    """Block sizes for which logits of the sample do not depend on other rows of a batch; in `inference_mode`."""
    arrays, forward = arrays_of(sample), Forward(preparation, logits_of, RowBlocks())
    return choose_blocks(lambda rows_B: forward.of_order(arrays, np.asarray(rows_B, np.int64)), sample.num_rows)


def arrays_of(table: pa.Table) -> dict[str, pa.Array]:
    """The columns of a table, each as one contiguous array."""
    return {name: table[name].combine_chunks() for name in table.column_names}


def make_batch(prepared: PreparedRows, preparation: BoundPreparation) -> Batch:
    """A batch without labels, in the memory of the prepared rows."""
    values_N, lengths_FB = torch.from_numpy(prepared.values_N), torch.from_numpy(prepared.lengths_FB)
    dense_BF = torch.from_numpy(prepared.dense_BF)
    sparse = Jagged(features=preparation.features, values_N=values_N, lengths_FB=lengths_FB)
    return Batch(dense_BF=dense_BF, sparse=sparse, labels_BK=dense_BF.new_empty(len(dense_BF), 0))


def _padded_order(begin: int, end: int, padding: int) -> Ints:
    """Row numbers from begin to end, then the last one repeated."""
    return np.minimum(np.arange(begin, end + padding), end - 1)
