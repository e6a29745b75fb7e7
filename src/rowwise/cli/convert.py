"""`rowwise data convert`: rewrite files as a warehouse, the fastest format for training."""

import re
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from rowwise.base.errors import DataError, SpecError
from rowwise.base.textfile import decode_json, parse_whole, read_bytes
from rowwise.cli import text_options
from rowwise.cli.options import AsJson
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_terminal, print_json, say

if TYPE_CHECKING:
    from rowwise.ingest.warehouse.convert import ConversionSummary
    from rowwise.ingest.warehouse.layout import WarehouseLayout

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


class Compression(StrEnum):
    """Compression of Parquet pages."""

    ZSTD = "zstd"
    SNAPPY = "snappy"
    NONE = "none"


def convert(  # noqa: PLR0913 - one for each option
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Parquet, CSV or TSV: a file, folder, pattern or URL; or delta:TABLE and the like."
        ),
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="A new folder or URL, or an unfinished conversion to resume.")
    ],
    columns: Annotated[
        str | None, typer.Option(help="Columns to keep, such as a,b,m.17 (key 17 of map column m) (default: all).")
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option(help="Keys of a map column: m=1,2,3 (default: all in the data).")
    ] = None,
    delimiter: text_options.Delimiter = None,
    decimal: text_options.Decimal = None,
    encoding: text_options.Encoding = None,
    names: text_options.Names = None,
    header: text_options.Header = None,
    quotes: text_options.Quotes = True,
    missing: text_options.Missing = None,
    column_type: text_options.ColumnType = None,
    unpack_to: text_options.UnpackTo = None,
    unpacked_gb: text_options.Unpacked = None,
    partition_by: Annotated[
        str | None, typer.Option(help="Partition columns, one folder per value, such as day or day,hour.")
    ] = None,
    cluster_by: Annotated[
        str | None, typer.Option(help="Column to cluster rows by: equal values become adjacent.")
    ] = None,
    sort_by: Annotated[str | None, typer.Option(help="Column to sort by within clusters.")] = None,
    compression: Annotated[Compression, typer.Option(help="Compression of Parquet pages.")] = Compression.ZSTD,
    row_group_rows: Annotated[int, typer.Option(metavar="N", help="Maximum number of rows in a row group.")] = 65_536,
    row_group_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Approximate size of a row group in memory.")
    ] = "48MiB",
    popularity: Annotated[
        str | None,
        typer.Option(
            help="Order columns by a JSON file {column: uses}, or none (default: by uses in the last 7 days)."
        ),
    ] = None,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory budget.")] = "2GB",
    as_json: AsJson = False,
) -> None:
    """Rewrite files as a warehouse: one Parquet column per feature, in row groups sized for training.

    The same command resumes after a stop or a kill, with the same result bit for bit.

    Example: rowwise data convert clicks.csv clicks-warehouse

    Example: rowwise data convert logs/ warehouse/ --partition-by day --cluster-by session --sort-by time

    Example: rowwise data convert logs/ s3://data/clicks --partition-by day

    Example: rowwise data convert warehouse/ smaller/ --columns label,user,ids.17 --memory 500MB
    """
    from rowwise.ingest.warehouse.convert import convert as write
    from rowwise.ingest.warehouse.layout import WarehouseLayout
    from rowwise.ingest.warehouse.popularity import popularity as recent_uses

    layout = WarehouseLayout(
        columns=None if columns is None else _split_names("--columns", columns),
        keys={
            name: _parse_keys(values)
            for name, values in text_options.parse_pairs("--keys", keys or (), "column=value").items()
        },
        partition_by=() if partition_by is None else _split_names("--partition-by", partition_by),
        cluster_by=cluster_by,
        sort_by=sort_by,
        compression=compression.value,
        group_rows=row_group_rows,
        group_bytes=parse_size("--row-group-bytes", row_group_bytes),
        memory_bytes=parse_size("--memory", memory),
        popularity=_read_popularity(popularity),
    )
    _check_folders(source, dest)
    reader = text_options.open_source(
        source,
        column_type,
        delimiter=delimiter,
        decimal=decimal,
        encoding=encoding,
        names=names,
        header=header,
        quotes=quotes,
        missing=missing,
        unpack_to=unpack_to,
        unpacked_gb=unpacked_gb,
    )
    with splits_bar(make_terminal(stderr=True), "converting") as tell:
        summary = write(reader, dest, layout, tell, recent_uses(source, time.time()))
    if as_json:
        print_json(summary)
    else:
        _show(summary, dest, layout)


def parse_size(option: str, text: str) -> int:
    """Bytes from a text such as 2GB, 48MiB or 1000."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{option} {text}", "a size such as 500MB, 2GB or 48MiB")
    unit = match[2].upper()
    scale = 1024 ** list(UNITS).index(unit) if match[3] else UNITS[unit]
    return int(float(match[1]) * scale)


def _check_folders(source: str, dest: str) -> None:
    from rowwise.ingest.datasets.files import split_kind

    source = split_kind(source)[1]
    if "://" in source or "://" in dest:
        source_prefix, dest_prefix = f"{source.rstrip('/')}/", f"{dest.rstrip('/')}/"
        if source_prefix.startswith(dest_prefix) or dest_prefix.startswith(source_prefix):
            raise SpecError(f"{dest} is inside {source} or contains it", "separate URLs")
        return
    source_folder, dest_folder = Path(source).absolute(), Path(dest).absolute()
    if dest_folder == source_folder or source_folder in dest_folder.parents or dest_folder in source_folder.parents:
        raise SpecError(f"{dest} is inside {source} or contains it", "separate folders")


def _split_names(option: str, text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if "" in parts or len(set(parts)) < len(parts):
        raise SpecError(f"{option} {text!r}", "distinct names separated by commas")
    return parts


def _parse_keys(text: str) -> tuple[int | str, ...]:
    values = _split_names("--keys", text)
    numbers = [number for value in values if (number := parse_whole(value, signed=True)) is not None]
    return tuple(numbers) if len(numbers) == len(values) else values


def _read_popularity(file: str | None) -> dict[str, float] | None:
    if file is None:
        return None
    if file == "none":
        return {}
    try:
        return decode_json(read_bytes(file), dict[str, float])
    except msgspec.DecodeError as error:
        raise DataError(f"--popularity {file}: {error}", 'JSON such as {"price": 12, "user": 7}') from error


def _show(summary: "ConversionSummary", dest: str, layout: "WarehouseLayout") -> None:
    console = make_terminal(stderr=True)
    if summary.was_done:
        say(console, f"{dest} is already complete")
    folders = f" in {summary.folders} folders" if layout.partition_by else ""
    size = f"{summary.bytes / 1e6:,.1f} MB in {summary.files} files{folders}"
    rows = f"{summary.rows:,} rows of {summary.columns} columns"
    groups = f"{summary.groups} row groups of {summary.rows // max(summary.groups, 1):,} rows"
    console.print(f"rows    {rows}; {groups}", markup=False)
    if layout.cluster_by is not None:
        sorting = f", in the order of {layout.sort_by}" if layout.sort_by else ""
        console.print(f"order   by {layout.cluster_by}{sorting}", markup=False)
    rate = summary.rows / max(summary.seconds, 1e-9)
    resumed = "; continued an unfinished conversion" if summary.resumed else ""
    console.print(f"written {dest}: {size}, {summary.seconds:.1f} s, {rate:,.0f} rows/s{resumed}", markup=False)
    say(console, f"next    rowwise data inspect {dest}")
