"""Exports tables for other programs: Parquet for queries, torch files with other names.

All row types become float32, which is exact. Parquet is written window by window. Torch writes from memory, so tensors
are first put into memory-mapped files: a torch file needs twice its space while it is written.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow import compute as pc
from pyarrow import parquet as pq
from torch import Tensor

from rowwise.base.errors import CheckpointError
from rowwise.checkpoint.atomic import atomic_output, scratch_beside
from rowwise.checkpoint.listing import progress_in
from rowwise.checkpoint.manifest import Span
from rowwise.checkpoint.named import SavedTable, choose_tables, tables_of
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.windows import ProgressCounter, Tell, windows
from rowwise.tables.managed import NO_ID
from rowwise.tables.spec import RowType

GROUP_bytes = 16 << 20  # uncompressed size of a row group


def export_parquet(
    checkpoint: Checkpoint, folder: Path, tables: Sequence[str] = (), *, state: bool = False, tell: Tell | None = None
) -> list[Path]:
    """A file for each table with columns `id` and `vector`, and with `state` a column for each optimizer slot.

    For a managed table: the rows with an id.

    The schema's metadata has the table's name, its row type and the checkpoint's step.
    """
    chosen = choose_tables(tables_of(checkpoint.manifest), tables, checkpoint.folder)
    progress = ProgressCounter(tell, sum(table.entry.rows for table in chosen.values()))
    with atomic_output(folder) as unfinished:
        unfinished.mkdir()
        for name, table in chosen.items():
            _write_table(checkpoint, unfinished / f"{name}.parquet", table, progress, state=state)
    return [folder / f"{name}.parquet" for name in chosen]


def export_torch(
    checkpoint: Checkpoint, file: Path, names: Mapping[str, str], tell: Tell | None = None
) -> dict[str, tuple[int, ...]]:
    """One file for torch.load: tensors under other names, tables as float32; returns their shapes."""
    progress = ProgressCounter(tell, sum(checkpoint.entry(name).rows for name in names))
    with atomic_output(file) as unfinished, scratch_beside(file) as folder:
        tensors: dict[str, Tensor] = {}
        for number, (name, new) in enumerate(names.items()):
            tensors[new] = _load_mapped(checkpoint, name, folder / str(number), progress)
        try:
            torch.save(tensors, unfinished)
        except RuntimeError as error:  # torch raises it for a full disk
            raise CheckpointError(f"{file} was not written: {error}", "twice its size of free space") from error
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def own_names(checkpoint: Checkpoint, tables: Sequence[str] = (), *, state: bool = False) -> dict[str, str]:
    """Names of the checkpoint's tensors in the model's state dict; of some tables, or of all tensors.

    Optimizer state, with `state`, keeps its name in the checkpoint.
    """
    if tables:
        chosen = choose_tables(tables_of(checkpoint.manifest), tables, checkpoint.folder)
        names = [n for table in chosen.values() for n in (table.name, *(table.state.values() if state else ()))]
    else:
        prefixes = ("model/", "rows/", "optimizer/") if state else ("model/",)
        chosen = tables_of(checkpoint.manifest)
        names = [name for name in checkpoint.names() if name.startswith(prefixes)]
    ids = {t.ids: f"{t.path.removesuffix('stored')}ids.{t.table}" for t in chosen.values() if t.ids is not None}
    return {name: name.removeprefix("model/") for name in names} | ids


def torchrec_names(
    checkpoint: Checkpoint, tables: Sequence[str] = (), sequences: Sequence[str] = (), prefix: str = ""
) -> dict[str, str]:
    """TorchRec's names of tables: pooled tables in an EmbeddingBagCollection, sequences in an EmbeddingCollection.

    `prefix` is the path of the collection in the model, with a trailing dot; empty to load into the collection itself.
    """
    saved = tables_of(checkpoint.manifest)
    chosen = choose_tables(saved, tables, checkpoint.folder)
    choose_tables(chosen, sequences, checkpoint.folder)
    names: dict[str, str] = {}
    for name, table in chosen.items():
        if table.ids is not None:
            raise CheckpointError(
                f"{checkpoint.folder}: table {name!r} is managed, and TorchRec's tables have no ids",
                hint="export to Parquet, which has the ids, or choose other tables",
            )
        kind = "embeddings" if name in sequences else "embedding_bags"
        names[table.name] = f"{prefix}{kind}.{table.table}.weight"
    clash = next((name for name in names.values() if list(names.values()).count(name) > 1), None)
    if clash is not None:
        raise CheckpointError(f"{checkpoint.folder}: several tables would be {clash!r}", hint="choose one with --table")
    return names


def load_window(checkpoint: Checkpoint, name: str, rows: Span, out: Tensor | None = None) -> Tensor:
    """Rows of a tensor; rows of a table as float32."""
    entry = checkpoint.entry(name)
    kind = None if entry.row_type is None else RowType.FP32
    if out is None:
        dtype = torch.float32 if kind else getattr(torch, entry.dtype)
        out = torch.empty((rows[1] - rows[0], *entry.shape[1:]), dtype=dtype)
    checkpoint.copy_into(out, name, rows, row_type=kind)
    return out


def _load_mapped(checkpoint: Checkpoint, name: str, file: Path, progress: ProgressCounter) -> Tensor:
    """A tensor in a memory-mapped file, whose pages the system can write back."""
    entry = checkpoint.entry(name)
    dtype = torch.float32 if entry.row_type else getattr(torch, entry.dtype)
    count = entry.rows * entry.columns
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    with file.open("xb") as opened:  # allocated first: on a full disk, writing to mapped memory would raise SIGBUS
        os.posix_fallocate(opened.fileno(), 0, count * dtype.itemsize)
    out = torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(entry.rows, *entry.shape[1:])
    for rows in windows(entry):
        load_window(checkpoint, name, rows, out[slice(*rows)])
        progress.add(rows[1] - rows[0])
    return out.view(entry.shape)


def _write_table(
    checkpoint: Checkpoint, file: Path, table: SavedTable, progress: ProgressCounter, *, state: bool
) -> None:
    slots = {slot: name for slot, name in table.state.items() if checkpoint.entry(name).shape} if state else {}
    slots = {slot: name for slot, name in slots.items() if checkpoint.entry(name).dtype == "float32"}
    metadata = {"table": table.table, "row_type": str(table.entry.row_type)}
    step = progress_in(checkpoint.manifest.data, "step")
    metadata |= {} if step is None else {"step": str(step)}
    if state and "step" in table.state:
        metadata["updates"] = str(int(checkpoint.load(table.state["step"])))
    columns = {"vector": table.name, **slots}
    types = {column: _type(checkpoint.entry(name).shape) for column, name in columns.items()}
    fields = [pa.field("id", pa.int64(), nullable=False)]
    fields += [pa.field(column, kind, nullable=False) for column, kind in types.items()]
    schema = pa.schema(fields, metadata={f"rowwise.{key}": value for key, value in metadata.items()})
    width = sum(4 * checkpoint.entry(name).columns for name in columns.values())
    entries = [checkpoint.entry(name) for name in columns.values()]
    with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer:
        for rows in windows(*entries):
            arrays: list[pa.Array] = [_ids(checkpoint, table, rows)]
            arrays += [_array(load_window(checkpoint, name, rows), types[c]) for c, name in columns.items()]
            batch = pa.Table.from_arrays(arrays, schema=schema)
            if table.ids is not None:
                batch = batch.filter(pc.call_function("not_equal", [batch["id"], pa.scalar(NO_ID)]))
            writer.write_table(batch, row_group_size=max(1, GROUP_bytes // width))
            progress.add(rows[1] - rows[0])


def _ids(checkpoint: Checkpoint, table: SavedTable, rows: Span) -> pa.Array:
    return (
        pa.array(range(*rows), pa.int64())
        if table.ids is None
        else pa.array(load_window(checkpoint, table.ids, rows).numpy())
    )


def _type(shape: tuple[int, ...]) -> pa.DataType:
    """A fixed-size list of float32; float32 for a number per row."""
    item = pa.field("item", pa.float32(), nullable=False)
    return pa.list_(item, shape[1]) if len(shape) == 2 else pa.float32()


def _array(rows: Tensor, kind: pa.DataType) -> pa.Array:
    flat = pa.array(rows.reshape(-1).numpy())
    return flat if rows.dim() == 1 else pa.FixedSizeListArray.from_arrays(flat, type=kind)
