"""Any files or tables as a dataset, with column roles inferred from their first splits."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from rowwise.base.errors import DataError, SpecError
from rowwise.base.storage.read_cache import CacheFolder
from rowwise.base.textfile import open_regular
from rowwise.ingest.columns import Columns
from rowwise.ingest.datasets.dataset import Dataset
from rowwise.ingest.delimited import ENDINGS, CsvReader, MisfitError, find_text_files
from rowwise.ingest.dialect import Dialect, find_encoding
from rowwise.ingest.inspect import Role, inspect
from rowwise.ingest.kinds import FITS, IDS
from rowwise.ingest.lake.snapshot import split_version
from rowwise.ingest.parquet import ENDINGS as PARQUET
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.reader import Reader, find_files
from rowwise.ingest.warehouse.storage import is_url
from rowwise.ingest.where import RowFilter
from rowwise.tables.spec import Table

LAKES = ("delta", "iceberg")
KINDS = ("parquet", "csv", *LAKES, "hf", "kafka")  # in parquet:PATH and the like
NAMES = ("parquet:PATH", "csv:PATH", "delta:TABLE", "iceberg:TABLE", "hf:FOLDER", "kafka:TOPIC")
DELIMITED = ENDINGS  # of text files
ONE_BYTE = ("utf-8", "cp1252", "latin-1")  # encodings without NUL bytes in text
LOOK_AT = 8  # splits
T = TypeVar("T")


def open_named(
    name: str, where: RowFilter | None = None, cache: CacheFolder | None = None, dialect: Dialect | None = None
) -> Reader | None:
    """A reader of parquet:PATH, or another of `NAMES`; None for other names."""
    kind, path = split_kind(name)
    if kind in LAKES:
        snapshot = _lake(kind).open_snapshot(*split_version(path), where or RowFilter())
        return ParquetReader(snapshot, where=where, verify=True, cache=cache)
    if kind == "parquet":
        return ParquetReader(path, where=where, verify=True, cache=cache)
    if kind == "hf":
        from rowwise.ingest.arrow_files import ArrowReader

        return ArrowReader(path)
    if kind == "kafka":
        from rowwise.ingest.kafka import KafkaReader

        return KafkaReader(path)
    return CsvReader(path, dialect) if kind == "csv" else None


def split_kind(name: str) -> tuple[str, str]:
    """The kind and the path of one of `NAMES`; no kind for other names."""
    kind, _, path = name.partition(":")
    return (kind, path) if kind in KINDS and not path.startswith("//") else ("", name)


def pin(name: str) -> str:
    """The name with an absolute path, and the newest version of a table or a topic: it names the same rows later."""
    kind, path = split_kind(name)
    if not kind:
        return name
    if kind == "kafka":
        from rowwise.ingest.kafka import find_ranges

        return f"kafka:{find_ranges(path).name}"
    version = None
    if kind in LAKES:
        path, version = split_version(path)
        if version is None:
            version = _lake(kind).latest(path)
    if not is_url(path) and (kind != "iceberg" or _lake(kind).is_path(path)):
        path = str(Path(path).absolute())
    return f"{kind}:{path}" if version is None else f"{kind}:{path}@{version}"


def check_fixed(names: Iterable[str | None], use: str) -> None:
    """Refuse names that leave the newest version open, for runs that have to read the same rows."""
    for name in filter(None, names):
        kind, path = split_kind(name)
        if (kind in LAKES and split_version(path)[1] is None) or (kind == "kafka" and not _has_fixed_end(path)):
            raise SpecError(
                f"{use} with {name}: each run would read what is newest then", f"a version, such as {pin(name)}"
            )


def _lake(kind: str) -> Any:
    """The module of a kind of table, which few runs need."""
    return import_module(f"rowwise.ingest.lake.{kind}")


def _has_fixed_end(topic: str) -> bool:
    from rowwise.ingest.kafka import has_fixed_end

    return has_fixed_end(topic)


def open_files(path: str | Path, dialect: Dialect | None = None) -> Reader:
    """A reader of one of `NAMES`, else by the endings of files' names, else by the first bytes of the files."""
    named = open_named(str(path), dialect=dialect)
    if named is not None:
        return named
    if is_url(path):
        return ParquetReader(path)
    files = find_files(path, (*ENDINGS, *PARQUET))
    tables = [name for name in files if _is_parquet(name)]
    lines = [name for name in files if name not in tables]
    if tables and Path(path).is_dir():
        lines = [name for name in lines if ".txt" not in Path(name).suffixes]
    if tables and lines:
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        raise DataError(
            f"{path}: {len(tables)} files are Parquet, such as {tables[0]}, and {len(lines)} text, such as {lines[0]}",
            f"a pattern of one kind, such as '{folder}/*.parquet'",
        )
    return ParquetReader(path) if tables else CsvReader(find_text_files(path), dialect)


def _is_parquet(name: str) -> bool:
    if name.endswith((*ENDINGS, *PARQUET)):
        return name.endswith(PARQUET)
    with open_regular(name) as file:
        head = file.read(4096)
    return head.startswith(b"PAR1") or (b"\0" in head and find_encoding(head, whole=False) in ONE_BYTE)


def read_settled(reader: Reader, look: Callable[[Reader], T]) -> tuple[Reader, T]:
    """Run `look` on all rows; if text files do not fit their detected dialect, on a reader settled on all rows."""
    if not isinstance(reader, CsvReader):
        return reader, look(reader)
    if not reader.undecided:
        try:
            return reader, look(reader)
        except MisfitError:
            pass
    settled = reader.settle()
    return settled, look(settled)


def from_files(
    reader: Reader, label: str | Sequence[str] | None = None, dim: int = 16, sparse: Sequence[str] = ()
) -> Dataset:
    """A dataset with columns and tables inferred from the first splits; `sparse` forces columns to be ids."""
    roles: dict[str, Role] = {f.name: "sparse" for f in reader.schema if f.name in sparse and FITS[IDS](f.type)}
    columns, tables = inspect(reader, label, splits=LOOK_AT, roles=roles, plain=True).card.suggest(dim)
    # Later splits may lack values of key and time, and no model needs them.
    return make_dataset(reader, structs.replace(columns, key=None, time=None), tables)


def make_dataset(reader: Reader, columns: Columns, tables: tuple[Table, ...]) -> Dataset:
    """A dataset of training rows only; a recipe's shares divide them."""
    return Dataset(train=reader, test=None, columns=columns, tables=tables)
