"""`rowwise data convert`: rewrite files as a warehouse, which is what training reads fastest.

Its own file for its options; what is done is `ingest.warehouse.convert`. Nothing here loads torch.
"""

import re
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from rowwise.cli.console import console_for
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import terminal
from rowwise.errors import DataError, SpecError
from rowwise.textfile import decode_json, read_bytes

if TYPE_CHECKING:
    from rowwise.ingest.reader import Reader
    from rowwise.ingest.warehouse.convert import ConversionSummary
    from rowwise.ingest.warehouse.layout import WarehouseLayout

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


class Compression(StrEnum):
    """The codecs of Parquet pages."""

    ZSTD = "zstd"
    SNAPPY = "snappy"
    NONE = "none"


def convert(  # noqa: PLR0913 - one for each option
    source: Annotated[str, typer.Argument(metavar="SRC", help="Parquet, CSV or TSV: a file, folder, pattern or URL.")],
    dest: Annotated[
        Path, typer.Argument(metavar="DEST", help="A new folder; or that of a conversion that was killed.")
    ],
    columns: Annotated[
        str | None, typer.Option(help="Only these, as in a,b,m.17; m.17 is key 17 of map column m.")
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option(help="m=1,2,3: the keys of map column m, which are looked for else.")
    ] = None,
    types: Annotated[list[str] | None, typer.Option(help="a=string: the type of a CSV column.")] = None,
    partition_by: Annotated[
        str | None, typer.Option(help="Columns that become folders, as in day or day,hour.")
    ] = None,
    cluster_by: Annotated[str | None, typer.Option(help="Rows with the same value of this stand together.")] = None,
    sort_by: Annotated[str | None, typer.Option(help="The order of rows inside --cluster-by.")] = None,
    compression: Annotated[Compression, typer.Option(help="How pages are packed.")] = Compression.ZSTD,
    row_group_rows: Annotated[int, typer.Option(metavar="N", help="Rows of a row group, at most.")] = 65_536,
    row_group_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Of a row group when decoded, about.")] = "48MiB",
    popularity: Annotated[
        str | None,
        typer.Option(help="A JSON file of {column: uses}, or none; without it, what jobs noted in SRC in 7 days."),
    ] = None,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory to use, at most.")] = "2GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
) -> None:
    """Rewrite files as a warehouse: a Parquet column for each feature, in row groups of the size that training reads.

    The same command goes on after it was stopped or killed, and the result is the same to the last bit.

    Example: rowwise data convert clicks.csv clicks-warehouse

    Example: rowwise data convert logs/ warehouse/ --partition-by day --cluster-by session --sort-by time

    Example: rowwise data convert warehouse/ smaller/ --columns label,user,ids.17 --memory 500MB
    """
    from rowwise.ingest.warehouse.convert import convert as write
    from rowwise.ingest.warehouse.layout import WarehouseLayout
    from rowwise.ingest.warehouse.popularity import popularity as lately

    how = WarehouseLayout(
        columns=None if columns is None else _listed("--columns", columns),
        keys={name: _keys(values) for name, values in _pairs("--keys", keys).items()},
        partition_by=() if partition_by is None else _listed("--partition-by", partition_by),
        cluster_by=cluster_by,
        sort_by=sort_by,
        compression=compression.value,
        group_rows=row_group_rows,
        group_bytes=size_of("--row-group-bytes", row_group_bytes),
        memory_bytes=size_of("--memory", memory),
        popularity=_popularity(popularity),
    )
    _check_places(source, dest)
    reader = _open(source, _pairs("--types", types))
    with splits_bar(terminal(stderr=True), "converting") as tell:
        summary = write(reader, dest, how, tell, lately(source, time.time()))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        _show(summary, dest, how)


def size_of(option: str, text: str) -> int:
    """A number of bytes, as in 2GB, 48MiB or 1000."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise SpecError(f"{option} {text}: want a size such as 500MB, 2GB or 48MiB")
    unit = found[2].upper()
    scale = 1024 ** list(UNITS).index(unit) if found[3] else UNITS[unit]
    return int(float(found[1]) * scale)


def _open(source: str, types: dict[str, str]) -> "Reader":
    from rowwise.ingest.datasets.files import open_files
    from rowwise.ingest.delimited import CsvReader

    reader = open_files(source)
    if not types:
        return reader
    if not isinstance(reader, CsvReader):
        raise SpecError(f"--types {', '.join(types)}: {source} is Parquet, which knows its types: leave it out")
    return CsvReader(source, types=types)


def _check_places(source: str, dest: Path) -> None:
    """What is written is not among what is read."""
    here, there = Path(source).absolute(), dest.absolute()
    if there == here or here in there.parents or there in here.parents:
        raise SpecError(f"{dest}: lies in {source}, or around it: want another folder")


def _listed(option: str, text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if "" in parts or len(set(parts)) < len(parts):
        raise SpecError(f"{option} {text!r}: want names with a comma between them, each once")
    return parts


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise SpecError(f"{option} {text}: want column=value")
        if name in found:
            raise SpecError(f"{option} {text}: {option} {name}={found[name]} is given, too: want one of them")
        found[name] = value
    return found


def _keys(text: str) -> tuple[int | str, ...]:
    values = _listed("--keys", text)
    whole = all(value.removeprefix("-").isdecimal() for value in values)
    return tuple(int(value) for value in values) if whole else values


def _popularity(given: str | None) -> dict[str, float] | None:
    if given is None:
        return None
    if given == "none":
        return {}
    try:
        return decode_json(read_bytes(given), dict[str, float])
    except msgspec.DecodeError as error:
        raise DataError(f"{given}: want JSON such as {{'price': 12, 'user': 7}}: {error}") from error


def _show(summary: "ConversionSummary", dest: Path, how: "WarehouseLayout") -> None:
    console = console_for(quiet=False)
    if summary.was_done:
        console.print(f"{dest} is converted already; there was nothing to do", markup=False, soft_wrap=True)
    folders = f" in {summary.folders} folders" if how.partition_by else ""
    size = f"{summary.bytes / 1e6:,.1f} MB in {summary.files} files{folders}"
    rows = f"{summary.rows:,} rows of {summary.columns} columns"
    groups = f"{summary.groups} row groups of {summary.rows // max(summary.groups, 1):,} rows"
    console.print(f"rows    {rows}; {groups}", markup=False)
    if how.cluster_by is not None:
        inside = f", in the order of {how.sort_by}" if how.sort_by else ""
        console.print(f"order   by {how.cluster_by}{inside}", markup=False)
    rate = summary.rows / max(summary.seconds, 1e-9)
    went_on = "; went on where an earlier command was stopped" if summary.resumed else ""
    console.print(f"written {dest}: {size}, {summary.seconds:.1f} s, {rate:,.0f} rows/s{went_on}", markup=False)
    console.print(f"next    rowwise data inspect {dest}", markup=False, soft_wrap=True)
