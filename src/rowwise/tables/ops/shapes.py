"""Shapes of the operators' results for torch.compile, as functions of the operators' names.

A size that depends on the values of a tensor is a dynamic size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from rowwise.tables.spec import RowType, row_bytes


def nothing(*_: Any) -> None:
    """Shape function of operators that write into their arguments."""
    return


def offsets(lengths: Tensor) -> Tensor:
    return lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64)


def lengths(offsets: Tensor) -> Tensor:
    return offsets.new_empty(offsets.shape[0] - 1, dtype=torch.int64)


def pool(arena: Tensor, *args: Any) -> Tensor:
    *_, batch, columns = args
    return arena.new_empty((batch, columns), dtype=torch.float32)


def pool_weight_grad(arena: Tensor, features: Tensor, values: Tensor, *_: Any) -> Tensor:
    return arena.new_empty(values.shape, dtype=torch.float32)


def sum_sampled(vectors: Tensor, ids: Tensor, starts: Tensor, *_: Any) -> Tensor:
    return vectors.new_empty((starts.shape[0] - 1, vectors.shape[1]))


def gather(arena: Tensor, *_: Any) -> Tensor:
    return arena.new_empty(_dynamic_size(), dtype=torch.float32)


def pack(rows: Tensor, group: int) -> Tensor:
    size = row_bytes(RowType.INT8, rows.shape[1], group)
    return rows.new_empty((rows.shape[0], size), dtype=torch.uint8)


def unpack(packed: Tensor, dim: int, group: int = 0) -> Tensor:
    return packed.new_empty((packed.shape[0], dim), dtype=torch.float32)


def pack4(rows: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], 8 + -(-rows.shape[1] // 8) * 4), dtype=torch.uint8)


def keep_largest(rows: Tensor, kept: int) -> Tensor:
    return rows.new_empty((rows.shape[0], 5 * kept), dtype=torch.uint8)


def interact(dense: Tensor, pooled: Tensor) -> Tensor:
    vectors = pooled.shape[1] // dense.shape[1] + 1
    return dense.new_empty((dense.shape[0], dense.shape[1] + vectors * (vectors - 1) // 2))


def pair_sums(offset: Tensor, pooled: Tensor) -> Tensor:
    return offset.new_empty(offset.shape[0])


def pair_grads(first: Tensor, pooled: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Shape function of the gradients of `interact` and `pair_sums`."""
    return first.new_empty(first.shape), pooled.new_empty(pooled.shape)


def dots(query: Tensor, rows: Tensor, places: Tensor | None = None) -> Tensor:
    return query.new_empty(rows.shape[:1] if places is None else places.shape)


def relu_grad(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape), grad.new_empty(grad.shape[::-1])


def find_newer(values: Tensor, *_: Any) -> Tensor:
    return values.new_empty(values.shape[0], dtype=torch.int64)


def take(values: list[Tensor], lengths: list[Tensor], weights: list[Tensor], segments: Tensor) -> tuple[Tensor, ...]:
    taken, bags = _dynamic_size(), _dynamic_size()
    return (
        values[0].new_empty(taken, dtype=widest(values)),
        lengths[0].new_empty(bags, dtype=widest(lengths)),
        values[0].new_empty(taken if weights else 0, dtype=torch.float32),
        segments.new_empty(segments.shape[0] + 1),
    )


def bucketize(values: Tensor, lengths: Tensor, weights: Tensor | None, bounds: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.empty_like(values),
        lengths.new_empty((bounds.shape[1] - 1) * lengths.shape[0]),
        values.new_empty(0 if weights is None else values.shape[0], dtype=torch.float32),
        values.new_empty(values.shape[0], dtype=torch.int64),
        values.new_empty(bounds.shape[1], dtype=torch.int64),
    )


def expand(values: list[Tensor], lengths: list[Tensor], weights: list[Tensor], *args: Any) -> tuple[Tensor, ...]:
    samples, places, narrow = args
    expanded = _dynamic_size()
    return (
        values[0].new_empty(expanded, dtype=torch.int32 if narrow else widest(values)),
        lengths[0].new_empty(places.shape[0] * samples[0].shape[0], dtype=widest(lengths)),
        values[0].new_empty(expanded if weights else 0, dtype=torch.float32),
    )


def deduplicate(values: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
    distinct = _dynamic_size()
    return (
        values.new_empty(distinct),
        torch.empty_like(bounds),
        values.new_empty(values.shape[0], dtype=torch.int64),
        values.new_empty(distinct, dtype=torch.int64),
    )


def map_ids(ids: Tensor, sections: Tensor, words: Tensor, known: int, columns: int) -> Tensor:
    return ids.new_empty((ids.shape[0], columns), dtype=torch.int64)


def _dynamic_size() -> SymInt:
    return torch.library.get_ctx().new_dynamic_size()


def widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """int64 if any of the tensors has it, else int32."""
    return torch.int64 if any(x.dtype == torch.int64 for x in tensors) else torch.int32
