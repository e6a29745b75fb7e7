"""A `Reader` of a dataset that Hugging Face `datasets` has saved to a folder: streams of Arrow batches.

Files are mapped into memory, and columns are read when they are used. A split is a range of rows of one file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import msgspec
import pyarrow as pa

from rowwise.base.errors import DataError
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.ingest.frames import SPLIT_ROWS
from rowwise.ingest.reader import Split, check_columns

STATE, PARTS = "state.json", "dataset_dict.json"  # of one dataset, of a dict of datasets


class _DataFile(msgspec.Struct, frozen=True):
    filename: str


class _SavedDataset(msgspec.Struct, frozen=True):
    files: tuple[_DataFile, ...] = msgspec.field(name="_data_files")
    indices: tuple[_DataFile, ...] | None = msgspec.field(name="_indices_data_files", default=None)


@final
class ArrowReader:
    """Reads the rows of a folder of `save_to_disk`, in the order of its state.json; it is pickled without tables."""

    def __init__(self, folder: str | Path, split_rows: int = SPLIT_ROWS) -> None:
        self._folder, self._split_rows = str(folder), split_rows
        self._tables = dict[str, pa.Table]()
        self._files = _list_files(Path(folder))
        self._schema = self._open(self._files[0]).schema
        for name in self._files:
            schema = self._open(name).schema
            if not schema.equals(self._schema):
                raise DataError(f"{name}: its columns differ from those of {self._files[0]}", "a folder of one save")

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def splits(self) -> tuple[Split, ...]:
        step = self._split_rows
        return tuple(
            Split(source=name, start=row, stop=min(row + step, rows), first_row=row, rows=min(step, rows - row))
            for name in self._files
            for rows in (self._open(name).num_rows,)
            for row in range(0, rows, step)
        )

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        check_columns(columns, self._schema, split.source)
        table = self._open(split.source)
        if table.num_rows < split.stop:
            raise DataError(
                f"{split.source}: {table.num_rows} rows, had {split.stop} or more: the file has changed",
                hint="put the old file back, or start a new run",
            )
        return table.select(list(columns)).slice(split.start, split.stop - split.start)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_tables": {}}

    def _open(self, name: str) -> pa.Table:
        """All batches of a file, which stay in the file until they are used."""
        if name not in self._tables:
            try:
                with pa.memory_map(name) as file:
                    self._tables[name] = pa.ipc.open_stream(file).read_all()
            except FileNotFoundError:
                raise DataError(f"{name}: the file is gone", hint="save the dataset again") from None
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"{name}: cannot be read as a stream of Arrow: {error}", "a file of save_to_disk"
                ) from None
        return self._tables[name]


def _list_files(folder: Path) -> tuple[str, ...]:
    if (folder / PARTS).is_file():
        parts = sorted(path.parent.name for path in folder.glob(f"*/{STATE}"))
        raise DataError(f"{folder}: a dict of datasets", " or ".join(f"hf:{folder / part}" for part in parts))
    if not (folder / STATE).is_file():
        raise DataError(f"{folder}: no {STATE} in it", "a folder of Dataset.save_to_disk")
    try:
        state = decode_json(read_bytes(folder / STATE), _SavedDataset)
    except msgspec.DecodeError as error:
        raise DataError(f"{folder / STATE}: {error}", "a folder of Dataset.save_to_disk") from None
    if state.indices:
        raise DataError(
            f"{folder}: its rows are selected by indices", hint="dataset.flatten_indices() before it is saved"
        )
    if not state.files:
        raise DataError(f"{folder}: no file with rows in {STATE}", "a dataset with rows")
    return tuple(str(folder / file.filename) for file in state.files)
