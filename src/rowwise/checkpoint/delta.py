"""Smaller checkpoints: increments of changed rows, and weights in fewer bits.

To a reader an increment is a complete checkpoint: its folder has hard links to the files of its base, and its manifest
lists the base's chunks, then its own. It restores the same bits as a full checkpoint. Only weights are rounded, never
optimizer state (see `ops/quantise`). Known limits: replaced rows take disk space until the next full checkpoint;
changed rows are copied to memory, but of a stream only their numbers.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from msgspec import structs
from torch import Tensor

from rowwise.base.errors import CheckpointError, StateError
from rowwise.checkpoint.local_shard import LocalShard, ids_dtype
from rowwise.checkpoint.manifest import CheckpointManifest, TensorEntry
from rowwise.tables.ops.quantise import dequantise, quantise
from rowwise.tables.ops.rowtype import pack, unpack
from rowwise.tables.spec import Bits, quantised_bytes

RUN_rows = 1 << 22


def round_shards(shards: Sequence[LocalShard], bits: Bits | None) -> list[LocalShard]:
    """Mark tables to be written with `bits` per weight, if their row type has more."""

    def is_wider(shard: LocalShard) -> bool:
        return shard.row_type is not None and bits is not None and shard.row_type.facts.weight_bits > bits

    return [replace(shard, bits=bits) if is_wider(shard) else shard for shard in shards]


def changed_rows(shards: Sequence[LocalShard], run_rows: int = RUN_rows) -> list[LocalShard]:
    """The changed rows: copies, or row numbers of a stream; shards without marks are returned as they are."""
    return [_changed(shard, run_rows) for shard in shards]


def matches_base(shards: Sequence[LocalShard], base: CheckpointManifest) -> bool:
    """Whether the base has the same tensors, so that changed rows of these shards can extend it."""
    bare = {name: structs.replace(entry, chunks=()) for name, entry in base.tensors.items()}
    return all(shard.touched is None or bare.get(shard.name) == shard.entry for shard in shards)


def stored_bytes(shards: Sequence[LocalShard], *, changed: bool) -> int:
    """Bytes to write for the shards, or for their changed rows only."""
    return sum(_stored_bytes(shard, changed=changed) for shard in shards)


def encoded_outline(shard: LocalShard) -> Tensor:
    """A tensor without memory of the shape and type that `encode` returns."""
    if shard.bits is None:
        return torch.empty_like(shard.tensor, device="meta")
    width = quantised_bytes(shard.columns, shard.bits)
    return torch.empty(len(shard.tensor), width, dtype=torch.uint8, device="meta")


def encode(shard: LocalShard, rows: Tensor) -> Tensor:
    """The rows of a shard as stored in its file."""
    if shard.bits is None:
        return rows
    assert shard.row_type is not None
    weights = unpack(rows, shard.columns, shard.row_type, shard.column_group)
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


def clear_changes(shards: Sequence[LocalShard]) -> None:
    """Clear the marks of changed rows, after a save."""
    for shard in shards:
        if shard.touched is not None:
            shard.touched.zero_()


def _changed(shard: LocalShard, run_rows: int) -> LocalShard:
    if shard.touched is None:
        return shard
    first, dtype = shard.rows[0], ids_dtype(shard.shape[0])
    runs = shard.touched.split(run_rows)  # as `nonzero` takes eight bytes for each row
    ids = torch.cat([(run.nonzero().flatten() + (first + k * run_rows)).to(dtype) for k, run in enumerate(runs)])
    if shard.initial is not None:  # if all rows are marked, only those that differ from the initial values
        written = shard.written_rows().ids
        assert written is not None
        ids = ids[torch.isin(ids, written, assume_unique=True)]
    tensor = (
        shard.tensor[(ids.long() - first).to(shard.tensor.device)] if shard.stream is None else shard.tensor[: len(ids)]
    )
    return replace(shard, tensor=tensor, ids=ids.cpu(), touched=None)


def _stored_bytes(shard: LocalShard, *, changed: bool) -> int:
    row_bytes = shard.row_bytes if shard.bits is None else quantised_bytes(shard.columns, shard.bits)
    count = len(shard.tensor)
    if shard.initial is not None:
        count = len(shard.written_rows().tensor)
    elif shard.touched is None or not changed:
        return count * row_bytes
    if shard.touched is not None and changed:
        count = min(count, int(shard.touched.count_nonzero()))
    return count * (row_bytes + ids_dtype(shard.shape[0]).itemsize)
