"""Tables of a checkpoint for other programs: Parquet for queries, and torch files under the names that others use.

Rows of any type become float32, which is exact. Parquet is written a bit at a time; a torch file is laid out on the
disk first, as torch writes it from memory, so it takes its space twice for a while.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow import parquet as pq
from torch import Tensor

from rowwise.checkpoint.atomic import atomic_output, scratch_beside
from rowwise.checkpoint.listing import progress_in
from rowwise.checkpoint.manifest import Span
from rowwise.checkpoint.named import SavedTable, choose_tables, tables_of
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.windows import Tell, windows
from rowwise.errors import CheckpointError
from rowwise.spec import RowType

GROUP_bytes = 16 << 20  # of a row group, before it is compressed


def export_parquet(
    checkpoint: Checkpoint, folder: Path, tables: Sequence[str] = (), *, state: bool = False, tell: Tell | None = None
) -> list[Path]:
    """A file for each table: `id` and `vector`, and with `state` its optimizer state, a column each.

    The schema's metadata says which table it is, the type of its rows, and of which step.
    """
    chosen = choose_tables(tables_of(checkpoint.manifest), tables, checkpoint.folder)
    told = _RowCounter(tell, (table.entry.rows for table in chosen.values()))
    with atomic_output(folder) as part:
        part.mkdir()
        for name, table in chosen.items():
            _write_table(checkpoint, part / f"{name}.parquet", table, told, state=state)
    return [folder / f"{name}.parquet" for name in chosen]


def export_torch(
    checkpoint: Checkpoint, file: Path, names: Mapping[str, str], tell: Tell | None = None
) -> dict[str, tuple[int, ...]]:
    """One file for torch.load: tensors of the checkpoint under other names, tables as float32; gives their shapes."""
    told = _RowCounter(tell, (checkpoint.entry(name).rows for name in names))
    with atomic_output(file) as part, scratch_beside(file) as folder:
        found: dict[str, Tensor] = {}
        for number, (name, new) in enumerate(names.items()):
            found[new] = _laid_out(checkpoint, name, folder / str(number), told)
        try:
            torch.save(found, part)
        except RuntimeError as error:  # what a full disk is to torch
            raise CheckpointError(f"{file} was not written: {error}") from error
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def own_names(checkpoint: Checkpoint, tables: Sequence[str] = (), *, state: bool = False) -> dict[str, str]:
    """Tensors of a checkpoint as the model's state dict calls them; of some tables, or all there is.

    State of optimizers, if it is wanted, keeps its name in the checkpoint.
    """
    if tables:
        chosen = choose_tables(tables_of(checkpoint.manifest), tables, checkpoint.folder).values()
        names = [n for table in chosen for n in (table.name, *(table.state.values() if state else ()))]
    else:
        wanted = ("model/", "rows/", "optimizer/") if state else ("model/",)
        names = [name for name in checkpoint.names() if name.startswith(wanted)]
    return {name: name.removeprefix("model/") for name in names}


def torchrec_names(
    checkpoint: Checkpoint, tables: Sequence[str] = (), sequences: Sequence[str] = (), prefix: str = ""
) -> dict[str, str]:
    """Tables as TorchRec calls them: pooled ones in an EmbeddingBagCollection, sequences in an EmbeddingCollection.

    `prefix` is the path of the collection in the model, with a dot at its end; none, to load the collection itself.
    """
    every = tables_of(checkpoint.manifest)
    chosen = choose_tables(every, tables, checkpoint.folder)
    choose_tables(chosen, sequences, checkpoint.folder)
    names: dict[str, str] = {}
    for name, table in chosen.items():
        kind = "embeddings" if name in sequences else "embedding_bags"
        names[table.name] = f"{prefix}{kind}.{table.table}.weight"
    twice = next((name for name in names.values() if list(names.values()).count(name) > 1), None)
    if twice is not None:
        raise CheckpointError(f"{checkpoint.folder} has several tables that would be {twice!r}: name one with --table")
    return names


def load_window(checkpoint: Checkpoint, name: str, rows: Span, out: Tensor | None = None) -> Tensor:
    """Some rows of a tensor, those of a table as float32."""
    entry = checkpoint.entry(name)
    kind = None if entry.row_type is None else RowType.FP32
    if out is None:
        dtype = torch.float32 if kind else getattr(torch, entry.dtype)
        out = torch.empty((rows[1] - rows[0], *entry.shape[1:]), dtype=dtype)
    checkpoint.copy_into(out, name, rows, row_type=kind)
    return out


class _RowCounter:
    """Reports progress in rows, once a window."""

    def __init__(self, tell: Tell | None, rows: Iterable[int]) -> None:
        self._tell, self._total, self._done = tell, sum(rows), 0

    def add(self, rows: int) -> None:
        self._done += rows
        if self._tell is not None:
            self._tell(self._done, self._total)


def _laid_out(checkpoint: Checkpoint, name: str, place: Path, told: _RowCounter) -> Tensor:
    """A tensor in a file that the system may take out of memory."""
    entry = checkpoint.entry(name)
    dtype = torch.float32 if entry.row_type else getattr(torch, entry.dtype)
    count = entry.rows * entry.columns
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    with place.open("xb") as file:  # a full disk is met here, and not as a signal when memory is written to
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
    out = torch.from_file(str(place), shared=True, size=count, dtype=dtype).view(entry.rows, *entry.shape[1:])
    for rows in windows(entry):
        load_window(checkpoint, name, rows, out[slice(*rows)])
        told.add(rows[1] - rows[0])
    return out.view(entry.shape)


def _write_table(checkpoint: Checkpoint, file: Path, table: SavedTable, told: _RowCounter, *, state: bool) -> None:
    slots = {slot: name for slot, name in table.state.items() if checkpoint.entry(name).shape} if state else {}
    about = {"table": table.table, "row_type": str(table.entry.row_type)}
    step = progress_in(checkpoint.manifest.data, "step")
    about |= {} if step is None else {"step": str(step)}
    if state and "step" in table.state:
        about["updates"] = str(int(checkpoint.load(table.state["step"])))
    columns = {"vector": table.name, **slots}
    types = {column: _type(checkpoint.entry(name).shape) for column, name in columns.items()}
    fields = [pa.field("id", pa.int64(), nullable=False)]
    fields += [pa.field(column, kind, nullable=False) for column, kind in types.items()]
    schema = pa.schema(fields, metadata={f"rowwise.{key}": value for key, value in about.items()})
    width = sum(4 * checkpoint.entry(name).columns for name in columns.values())
    entries = [checkpoint.entry(name) for name in columns.values()]
    with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer:
        for rows in windows(*entries):
            arrays: list[pa.Array] = [pa.array(range(*rows), pa.int64())]
            arrays += [_array(load_window(checkpoint, name, rows), types[c]) for c, name in columns.items()]
            batch = pa.Table.from_arrays(arrays, schema=schema)
            writer.write_table(batch, row_group_size=max(1, GROUP_bytes // width))
            told.add(rows[1] - rows[0])


def _type(shape: tuple[int, ...]) -> pa.DataType:
    """A list of float32 of one length, or, of a number a row, float32."""
    inside = pa.field("item", pa.float32(), nullable=False)
    return pa.list_(inside, shape[1]) if len(shape) == 2 else pa.float32()


def _array(rows: Tensor, kind: pa.DataType) -> pa.Array:
    flat = pa.array(rows.reshape(-1).numpy())
    return flat if rows.dim() == 1 else pa.FixedSizeListArray.from_arrays(flat, type=kind)
