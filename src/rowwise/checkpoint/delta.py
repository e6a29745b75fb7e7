"""Smaller checkpoints: increments of changed rows, and weights in fewer bits.

A reader sees an increment as a complete checkpoint: its folder has hard links to the files of its base, and its
manifest lists the base's chunks, then its own. It restores the same bits as a full checkpoint. Only weights are
rounded, never optimizer state (see `ops/quantise`). Known limits: replaced rows take disk space until the next full
checkpoint; the changed rows are copied in memory.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec import structs
from torch import Tensor

from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import CheckpointManifest, TensorEntry
from rowwise.errors import CheckpointError, StateError
from rowwise.ops.quantise import dequantise, quantise
from rowwise.ops.rowtype import pack, unpack
from rowwise.spec import Bits, quantised_bytes


def round_shards(shards: Sequence[LocalShard], bits: Bits | None) -> list[LocalShard]:
    """Mark tables to be written with so many bits per weight, if their row type has more."""

    def is_wider(shard: LocalShard) -> bool:
        return shard.row_type is not None and bits is not None and 8 * shard.row_type.facts.weight_bytes > bits

    return [replace(shard, bits=bits) if is_wider(shard) else shard for shard in shards]


def changed_rows(shards: Sequence[LocalShard]) -> list[LocalShard]:
    """Copies of the rows that changed; shards without marks stay whole."""
    return [_changed(shard) for shard in shards]


def matches_base(shards: Sequence[LocalShard], base: CheckpointManifest) -> bool:
    """Whether the base has the same tensors, so that changed rows of these shards can extend it."""
    bare = {name: structs.replace(entry, chunks=()) for name, entry in base.tensors.items()}
    return all(shard.touched is None or bare.get(shard.name) == shard.entry for shard in shards)


def stored_bytes(shards: Sequence[LocalShard], *, changed: bool) -> int:
    """Bytes to write for the shards, or for their changed rows only."""
    return sum(_stored_bytes(shard, changed=changed) for shard in shards)


def encode(shard: LocalShard) -> Tensor:
    if shard.bits is None:
        return shard.tensor
    assert shard.row_type is not None
    weights = unpack(shard.tensor, shard.columns, shard.row_type, shard.column_group)
    try:
        return quantise(weights, shard.bits, f"{shard.name!r}", range(*shard.rows) if shard.ids is None else shard.ids)
    except StateError as error:
        raise CheckpointError(str(error)) from None


def decode_rows(chunk: Tensor, entry: TensorEntry, bits: Bits | None, columns: int) -> Tensor:
    """Rows in their table's row type, from rows that were rounded to `bits`."""
    if bits is None:
        return chunk
    assert entry.row_type is not None
    return pack(dequantise(chunk, columns, bits), entry.row_type, entry.column_group)


def ids_dtype(entry: TensorEntry) -> torch.dtype:
    return torch.int32 if entry.rows < 1 << 31 else torch.int64


def clear_changes(shards: Sequence[LocalShard]) -> None:
    """Clear the marks of changed rows, after a save."""
    for shard in shards:
        if shard.touched is not None:
            shard.touched.zero_()


def _changed(shard: LocalShard) -> LocalShard:
    if shard.touched is None:
        return shard
    changed = shard.touched.nonzero().flatten()
    ids = (changed + shard.rows[0]).to(ids_dtype(shard.entry))
    return replace(shard, tensor=shard.tensor[changed], ids=ids.cpu(), touched=None)


def _stored_bytes(shard: LocalShard, *, changed: bool) -> int:
    row_bytes = shard.row_bytes if shard.bits is None else quantised_bytes(shard.columns, shard.bits)
    if shard.touched is None or not changed:
        return len(shard.tensor) * row_bytes
    return int(shard.touched.count_nonzero()) * (row_bytes + ids_dtype(shard.entry).itemsize)
