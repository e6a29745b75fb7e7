"""Local shards: the rectangle of a tensor that a rank writes to a checkpoint, or fills from one.

A shard is a view of memory, or rows of a `RowStream`; then `tensor` is on the meta device and has the shape only.
Writers call `load` and readers `store` for shards of bounded size, so a stream may exceed memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rowwise.checkpoint.manifest import Span, TensorEntry
from rowwise.tables.spec import Bits, RowType
from rowwise.tables.store.row_stream import InitialValues, RowStream


def ids_dtype(rows: int) -> torch.dtype:
    return torch.int32 if rows < 1 << 31 else torch.int64


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A rectangle of a tensor, as this rank stores it; see [Note: Chunks] in `manifest`."""

    name: str
    tensor: Tensor  # a view of live memory: write it before it changes; for a stream a shape without memory
    shape: tuple[int, ...]  # shape of the full tensor; (rows, dim) for a table
    rows: Span
    cols: Span | None = None  # None for all
    row_type: RowType | None = None  # row type of a table
    column_group: int | None = None
    shared: bool = False  # every rank has an equal copy, and writes some of its rows
    touched: Tensor | None = None  # a byte per row, nonzero if changed since the last save; None if not tracked
    ids: Tensor | None = None  # row numbers of `tensor`, ascending, for an increment; None for all of `rows`
    bits: Bits | None = None  # write weights with fewer bits
    stream: RowStream | None = None
    stream_row: int = 0  # row of the full tensor at which the stream begins

    @classmethod
    def whole(cls, name: str, tensor: Tensor, *, shared: bool = True) -> Self:
        """A full tensor that is not a table: `shared` if all ranks list it, else only one rank may."""
        shape, tensor = tuple(tensor.shape), tensor.detach()
        tensor = tensor if shape else tensor.view(1)
        return cls(name=name, tensor=tensor, shape=shape, rows=(0, len(tensor)), shared=shared)

    @property
    def row_bytes(self) -> int:
        return self.tensor[:1].numel() * self.tensor.element_size()

    @property
    def columns(self) -> int:
        """Number of columns in this shard."""
        return math.prod(self.shape[1:]) if self.cols is None else self.cols[1] - self.cols[0]

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def entry(self) -> TensorEntry:
        """The manifest's entry of the whole tensor, without chunks."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return TensorEntry(dtype=dtype, shape=self.shape, row_type=self.row_type, column_group=self.column_group)

    @property
    def initial(self) -> InitialValues | None:
        """The values of a stream's unwritten rows; None if all rows are written."""
        return None if self.stream is None or self.ids is not None else self.stream.initial

    def cut(self, begin: int, end: int) -> Self:
        """The rows from begin to end, numbered as in the whole tensor."""
        chosen = slice(begin - self.rows[0], end - self.rows[0])
        touched = None if self.touched is None else self.touched[chosen]
        return replace(self, tensor=self.tensor[chosen], rows=(begin, end), shared=False, touched=touched)

    def load(self) -> Tensor:
        """The rows in memory: a view, or a copy of those of a stream."""
        if self.stream is None:
            return self.tensor
        if self.ids is None:
            rows = self.stream.read(self.rows[0] - self.stream_row, self.rows[1] - self.stream_row)
        else:
            rows = self.stream.read_rows(self.ids.long() - self.stream_row)
        # A number per row may be saved once per column block.
        return rows if rows.dim() == self.tensor.dim() else rows.unsqueeze(1).expand(self.tensor.shape)

    def store(self, rows: Tensor) -> None:
        """Overwrite the rows, in memory or in the stream."""
        if self.stream is None:
            self.tensor.copy_(rows)
        else:
            self.stream.write(self.rows[0] - self.stream_row, rows.view(len(rows), *self.stream.shape[1:]))

    def store_rows(self, rows: Tensor, values: Tensor) -> None:
        """Overwrite rows of the stream, numbered as those of this shard."""
        assert self.stream is not None
        self.stream.write_rows(rows + self.rows[0] - self.stream_row, values.view(len(values), *self.stream.shape[1:]))

    def written_rows(self) -> Self:
        """The rows of the stream other than those with initial values."""
        assert self.stream is not None
        first = self.stream_row
        ids = self.stream.written(self.rows[0] - first, self.rows[1] - first) + first
        return replace(self, tensor=self.tensor[: len(ids)], ids=ids.to(ids_dtype(self.shape[0])), touched=None)

    def allocate(self) -> Self:
        """A shard of the same rectangle with memory of its own."""
        # Zeros, as int8 rows end with padding that no read fills: files must have the same bytes each time.
        return replace(self, tensor=torch.zeros(self.tensor.shape, dtype=self.tensor.dtype), stream=None)

    def split(self, size_bytes: int) -> Iterator[Self]:
        step = max(1, size_bytes // max(1, self.row_bytes))
        if self.ids is None:
            yield from (self.cut(k, min(k + step, self.rows[1])) for k in range(*self.rows, step))
            return
        for tensor, ids in zip(self.tensor.split(step), self.ids.split(step), strict=True):
            if len(ids):
                yield replace(self, tensor=tensor, ids=ids, rows=(int(ids[0]), int(ids[-1]) + 1))
