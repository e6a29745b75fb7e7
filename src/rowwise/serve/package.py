"""The served folder: numbered versions of a model, and a small file that names the current one.

    current.json                    {"current": 2}, see `Traffic`; replaced in one step
    versions/000002/manifest.json   a checkpoint: rows in the served type, dense weights, id maps; no optimizer state
                    files.json      the SHA-256 of each file, see `contents.py`
                    model.json      architecture of the model, and preparation of its rows
                    golden.arrow    held-out raw rows with their logits
                    stats.json      statistics of each raw column in training
                    hot.arrow       most accessed rows in training, see `hot_rows.py`
                    mean_rows.arrow see `default_rows.py`
                    sides/          columns that requests omit, by key
                    retrieval/      items, see `items.py`

A version appears atomically and is immutable.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import msgspec
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import CheckpointError, SpecError
from rowwise.base.inside import number_in
from rowwise.base.storage.folder import Folder, refuse_url
from rowwise.base.textfile import decode_json, read_bytes, sync, write_new
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.named import VERSION_DIGITS, VERSIONS
from rowwise.ingest.kinds import is_list
from rowwise.ingest.unpacked import read_arrow_file, write_arrow_file
from rowwise.serve.contents import digest_of, hash_files, open_checked, read_files, reading_export
from rowwise.serve.traffic import Traffic
from rowwise.tables.spec import Value

CURRENT, MODEL, GOLDEN, STATS = "current.json", "model.json", "golden.arrow", "stats.json"
MAX_BYTES = 1 << 30  # of model.json (with vocabularies), and of golden.arrow
LOGIT = "logit:"  # prefix of logit columns in golden.arrow
MAX_VERSION = 999_999
MAX_GOLDEN = 1 << 14  # rows


class ColumnStats(Value, frozen=True):
    """Statistics of a raw column."""

    null_share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    mean: float | None = None  # of single numbers
    mean_length: Annotated[float, msgspec.Meta(ge=0)] | None = None  # of lists

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "ColumnStats":
        """Statistics of a column in training, or in requests."""
        kind, mean, mean_length = column.type, None, None
        if is_list(kind):
            mean_length = pc.call_function("mean", [pc.call_function("list_value_length", [column])]).as_py()
        elif types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind):
            value = pc.call_function("mean", [column.cast(pa.float64(), safe=False)]).as_py()
            mean = value if value is not None and math.isfinite(value) else None
        return cls(null_share=column.null_count / max(1, len(column)), mean=mean, mean_length=mean_length)


class VersionFolder(NamedTuple):
    """A version on disk."""

    path: Path
    number: int

    @property
    def digest(self) -> str:
        """The digest by `files.json`; without it, by hashing all files."""
        return digest_of(read_files(self.path) or hash_files(self.path))

    @contextmanager
    def checked(self, expect: str | None) -> Iterator[Self]:
        """This version, checked to have no links; with `expect`, a verified private copy until the block ends."""
        with open_checked(self.path, f"{self.number:06}", expect) as path:
            yield self._replace(path=path)


def version_folder(folder: Path, number: int) -> VersionFolder:
    return VersionFolder(folder / VERSIONS / f"{number:0{VERSION_DIGITS}}", number)


def list_versions(folder: Path) -> list[int]:
    """The numbers of the complete versions, ascending."""
    names = [path.parent.name for path in (folder / VERSIONS).glob(f"*/{NAME}")]
    numbers = (number_in(name, VERSION_DIGITS) for name in names)
    return sorted(number for number in numbers if number is not None and 1 <= number <= MAX_VERSION)


def next_version(folder: Path, after: int = 0) -> int:
    """The number of a new version: above all versions of the folder, and above `after`."""
    number = 1 + max([after, *list_versions(folder)])
    if number > MAX_VERSION:
        raise CheckpointError(f"{folder} has version {MAX_VERSION}, the largest number", "another folder")
    return number


def is_served(path: Path) -> bool:
    """Whether a path is a folder of versions, or one of them."""
    return (path / CURRENT).is_file() or (path / MODEL).is_file()


def find_version(path: Path, number: int | None = None) -> VersionFolder:
    """The version with a number, by default the current one; or the version at this path."""
    refuse_url(path, "rowwise serve URL --cache FOLDER downloads the versions of a store to a folder")
    path_number = number_in(path.name, VERSION_DIGITS) or 0
    if (path / MODEL).is_file() and number in (None, path_number):
        return VersionFolder(path, path_number)
    known = list_versions(path)
    if not known:
        raise CheckpointError(f"{path} has no version of a model", "a folder that `rowwise export` wrote")
    number = read_traffic(path).current if number is None else number
    if number not in known:
        known_numbers = ", ".join(map(str, known))
        raise CheckpointError(f"{path} has no version {number}; there are {known_numbers}")
    return version_folder(path, number)


def read_traffic(folder: Path) -> Traffic:
    """The traffic split between versions."""
    try:
        return decode_traffic(folder, read_bytes(folder / CURRENT))
    except FileNotFoundError:
        raise CheckpointError(f"{folder / CURRENT} is missing", hint=_repair_hint(folder)) from None


def decode_traffic(folder: Folder, content: bytes) -> Traffic:
    """Decode `current.json` of a local folder or of a store."""
    try:
        return decode_json(content, Traffic)
    except (msgspec.MsgspecError, SpecError) as error:
        raise CheckpointError(f"{folder / CURRENT} is damaged: {error}", hint=_repair_hint(folder)) from None


def _repair_hint(folder: Folder) -> str:
    return f"set the version: rowwise versions {folder} --current N"


def write_traffic(folder: Path, traffic: Traffic) -> None:
    """Route requests to these versions, atomically."""
    for number in traffic.versions:
        find_version(folder, number)
    unfinished = folder / f"{CURRENT}.part"
    write_new(unfinished, msgspec.json.encode(traffic))
    sync(unfinished)
    unfinished.replace(folder / CURRENT)
    sync(folder)


class GoldenRows(NamedTuple):
    """Raw rows, and their logits [R, K] by `rowwise predict`."""

    rows: pa.Table
    logits: pa.Table


def write_golden(version: Path, golden: GoldenRows) -> None:
    table = golden.rows
    for name in golden.logits.column_names:
        table = table.append_column(LOGIT + name, golden.logits[name])
    write_arrow_file(version / GOLDEN, table)


def read_golden(version: Path) -> GoldenRows:
    path = version / GOLDEN
    with reading_export(path):
        table = read_arrow_file(path)
        if not 1 <= len(table) <= MAX_GOLDEN:
            raise pa.ArrowInvalid(f"it has {len(table):,} rows: expected 1 to {MAX_GOLDEN:,}")
    logits = [name for name in table.column_names if name.startswith(LOGIT)]
    return GoldenRows(
        table.drop_columns(logits), table.select(logits).rename_columns([name.removeprefix(LOGIT) for name in logits])
    )


def read_stats(version: Path) -> dict[str, ColumnStats]:
    """Training statistics of each raw column."""
    path = version / STATS
    with reading_export(path):
        return decode_json(read_bytes(path, links=False), dict[str, ColumnStats])
