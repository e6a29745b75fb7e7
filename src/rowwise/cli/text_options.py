"""Options for the dialect of text files, and a description of the dialect."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rowwise.base.errors import SpecError
from rowwise.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowwise.ingest.dialect import Dialect
    from rowwise.ingest.reader import Reader

Delimiter = Annotated[str | None, typer.Option(help="Delimiter of text files: ';', '|', tab, space.")]
Decimal = Annotated[str | None, typer.Option(help="Decimal separator of text files: . or ,")]
Encoding = Annotated[str | None, typer.Option(help="Encoding of text files: utf-8, cp1252, latin-1, utf-16, ...")]
Names = Annotated[str | None, typer.Option(help="Column names of text files without a header: a,b,c.")]
Header = Annotated[
    bool | None, typer.Option("--header/--no-header", help="Whether text files begin with a header of column names.")
]
Quotes = Annotated[
    bool, typer.Option("--quotes/--no-quotes", help="Whether double quotes enclose values in text files.")
]
Missing = Annotated[
    str | None, typer.Option(help="Markers of missing numbers in text files: NA,-,? (default: detected).")
]
UnpackTo = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="Folder of unpacked copies of compressed text files (default: ~/.cache/rowwise)."
    ),
]
ColumnType = Annotated[
    list[str] | None,
    typer.Option(
        "--column-type", metavar="COLUMN=TYPE", help="Type of a column: int, float, string, bool, ...; repeatable."
    ),
]
Unpacked = Annotated[int | None, typer.Option("--unpacked-gb", help="Disk budget of unpacked copies (default: 100).")]
MARKS = {"tab": "\t", "\\t": "\t", "space": " ", "comma": ",", "semicolon": ";", "pipe": "|"}


def open_source(path: str, types: "Sequence[str] | None", **options: Any) -> "Reader":
    """Open files, with options for the dialect of text; raises for options that do not apply to the files."""
    from rowwise.ingest.arrow_files import ArrowReader
    from rowwise.ingest.datasets.files import open_files
    from rowwise.ingest.delimited import CsvReader
    from rowwise.ingest.dialect import Dialect
    from rowwise.ingest.reader import check_columns

    dialect = _make_dialect(types or (), options)
    reader = open_files(path, dialect)
    plain = Dialect()
    overridden = [name for name in plain.__struct_fields__ if getattr(dialect, name) != getattr(plain, name)]
    if overridden and not isinstance(reader, CsvReader):
        option = {"types": "column-type"}.get(overridden[0], overridden[0].replace("_", "-"))
        kind = "Arrow" if isinstance(reader, ArrowReader) else "Parquet"
        raise SpecError(f"--{option}: {path} is {kind}, which has no dialect: leave it out")
    check_columns(list(dialect.types), reader.schema, path)
    return reader


def _make_dialect(types: "Sequence[str]", options: dict[str, Any]) -> "Dialect":
    """The dialect from options; `types` are texts such as price=float."""
    from rowwise.ingest.dialect import Dialect

    fields = {name: value for name, value in options.items() if value is not None}
    if "delimiter" in fields:
        fields["delimiter"] = MARKS.get(fields["delimiter"], fields["delimiter"])
    if "decimal" in fields and fields["decimal"] not in (".", ","):
        raise SpecError(f"--decimal {fields['decimal']}", ". or ,")
    if "names" in fields:
        fields["names"] = tuple(fields["names"].split(","))
    if "missing" in fields:
        fields["missing"] = ("", *fields["missing"].split(","))
    return Dialect(**fields, types=parse_pairs("--column-type", types, "COLUMN=TYPE, such as price=float"))


def parse_pairs(option: str, texts: "Sequence[str]", expected: str) -> dict[str, str]:
    """Values by name from NAME=VALUE texts; raises for a name that is repeated."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise SpecError(f"{option} {text}", expected)
        if name in pairs:
            raise SpecError(f"{option} {text}: {option} {name}={pairs[name]} is also given", "one of them")
        pairs[name] = value
    return pairs


def show_dialect(reader: "Reader", console: Console) -> None:
    """Print the dialect of text files, and notes of the reader."""
    from rowwise.ingest.delimited import CsvReader
    from rowwise.ingest.dialect import describe

    if isinstance(reader, CsvReader):
        say(console, describe(reader.dialect))
        if reader.copied:
            place = f"{reader.dialect.unpack_to} (other: --unpack-to, --unpacked-gb)"
            say(console, f"files read from plain copies in {place}: {reader.copied:,}")
    for note in getattr(reader, "notes", ()):
        say(console, f"! {note}", "yellow")
