"""Smaller checkpoints: only the rows that changed since the one before, and rows in fewer bits.

An increment is a whole checkpoint to whoever reads it: its folder has the files of the one before, too, as hard links,
and its manifest lists their pieces, then its own. It restores what a full one would, to the bit. Only weights are
rounded; the optimizer's state is exact always, see `ops/quantise`. Known limits: the space of rows that were replaced,
until the next full one; memory for the rows that changed.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec import structs
from torch import Tensor

from rowwise.checkpoint.manifest import CheckpointManifest, TensorEntry
from rowwise.checkpoint.parts import LocalShard
from rowwise.errors import CheckpointError, StateError
from rowwise.ops.quantise import dequantise, quantise
from rowwise.ops.rowtype import pack, unpack
from rowwise.spec import Bits, quantised_bytes


def round_shards(parts: Sequence[LocalShard], bits: Bits | None) -> list[LocalShard]:
    """With weights to be written in so many bits, where that is fewer than their row type has."""

    def is_wider(part: LocalShard) -> bool:
        return part.row_type is not None and bits is not None and 8 * part.row_type.facts.weight_bytes > bits

    return [replace(part, bits=bits) if is_wider(part) else part for part in parts]


def increment(parts: Sequence[LocalShard]) -> list[LocalShard]:
    """Copies of the rows that changed; what nobody keeps marks of whole."""
    return [_changed_rows(part) for part in parts]


def can_extend(parts: Sequence[LocalShard], base: CheckpointManifest) -> bool:
    """Whether the changed rows of these parts can be read on top of an earlier checkpoint."""
    bare = {name: structs.replace(entry, pieces=()) for name, entry in base.tensors.items()}
    return all(part.touched is None or bare.get(part.name) == part.entry for part in parts)


def stored_bytes(parts: Sequence[LocalShard], *, changed: bool) -> int:
    """Bytes of the parts in a file: of all rows, or of those that changed."""
    return sum(_stored_bytes(part, changed=changed) for part in parts)


def encode(part: LocalShard) -> Tensor:
    if part.bits is None:
        return part.tensor
    assert part.row_type is not None
    weights = unpack(part.tensor, part.columns, part.row_type, part.column_group)
    try:
        return quantise(weights, part.bits, f"{part.name!r}", range(*part.rows) if part.ids is None else part.ids)
    except StateError as error:
        raise CheckpointError(str(error)) from None


def decode_rows(chunk: Tensor, entry: TensorEntry, bits: Bits | None, columns: int) -> Tensor:
    """Rows that were written with so many bits, as their table stores them."""
    if bits is None:
        return chunk
    assert entry.row_type is not None
    return pack(dequantise(chunk, columns, bits), entry.row_type, entry.column_group)


def ids_dtype(entry: TensorEntry) -> torch.dtype:
    return torch.int32 if entry.rows < 1 << 31 else torch.int64


def clear(parts: Sequence[LocalShard]) -> None:
    """All rows are saved as they are."""
    for part in parts:
        if part.touched is not None:
            part.touched.zero_()


def _changed_rows(part: LocalShard) -> LocalShard:
    if part.touched is None:
        return part
    chosen = part.touched.nonzero().flatten()
    ids = (chosen + part.rows[0]).to(ids_dtype(part.entry))
    return replace(part, tensor=part.tensor[chosen], ids=ids.cpu(), touched=None)


def _stored_bytes(part: LocalShard, *, changed: bool) -> int:
    row_bytes = part.row_bytes if part.bits is None else quantised_bytes(part.columns, part.bits)
    if part.touched is None or not changed:
        return len(part.tensor) * row_bytes
    return int(part.touched.count_nonzero()) * (row_bytes + ids_dtype(part.entry).itemsize)
