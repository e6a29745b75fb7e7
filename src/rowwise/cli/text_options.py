"""Options that say how text files are written, and the lines that say how they are."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rowwise.base.errors import SpecError
from rowwise.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowwise.ingest.dialect import Dialect
    from rowwise.ingest.reader import Reader

Delimiter = Annotated[str | None, typer.Option(help="What is between values of text files: ';', '|', tab, space.")]
Decimal = Annotated[str | None, typer.Option(help="The sign before fractions in text files: . or ,")]
Encoding = Annotated[str | None, typer.Option(help="Of text files: utf-8, cp1252, latin-1, utf-16, ...")]
Names = Annotated[str | None, typer.Option(help="Names for the columns of text files without a header: a,b,c.")]
Header = Annotated[
    bool | None, typer.Option("--header/--no-header", help="Whether text files begin with the names of the columns.")
]
Quotes = Annotated[
    bool, typer.Option("--quotes/--no-quotes", help="Whether double quotes enclose values of text files.")
]
Missing = Annotated[
    str | None, typer.Option(help="Words for a missing number in text files: NA,-,? (default: those that are found).")
]
UnpackTo = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="For plain copies of compressed text files (default: ~/.cache/rowwise)."),
]
ColumnType = Annotated[
    list[str] | None,
    typer.Option("--column-type", metavar="COLUMN=TYPE", help="int, float, string, bool, ...; repeatable."),
]
Unpacked = Annotated[int | None, typer.Option("--unpacked-gb", help="What these copies may take (default: 100).")]
MARKS = {"tab": "\t", "\\t": "\t", "space": " ", "comma": ",", "semicolon": ";", "pipe": "|"}


def open_source(path: str, types: "Sequence[str] | None", **options: Any) -> "Reader":
    """Open files, text as far as options say how it is written; refuse those that do not fit the files."""
    from rowwise.ingest.datasets.files import open_files
    from rowwise.ingest.delimited import CsvReader
    from rowwise.ingest.dialect import Dialect
    from rowwise.ingest.reader import check_columns

    dialect = _make_dialect(types or (), options)
    reader = open_files(path, dialect)
    plain = Dialect()
    given = [name for name in plain.__struct_fields__ if getattr(dialect, name) != getattr(plain, name)]
    if given and not isinstance(reader, CsvReader):
        option = {"types": "column-type"}.get(given[0], given[0].replace("_", "-"))
        raise SpecError(f"--{option}: {path} is Parquet, which says how it is written: leave it out")
    check_columns(list(dialect.types), reader.schema, path)
    return reader


def _make_dialect(types: "Sequence[str]", options: dict[str, Any]) -> "Dialect":
    """How text files are written, as far as options say it; `types` are texts such as price=float."""
    from rowwise.ingest.dialect import Dialect

    given = {name: value for name, value in options.items() if value is not None}
    if "delimiter" in given:
        given["delimiter"] = MARKS.get(given["delimiter"], given["delimiter"])
    if "decimal" in given and given["decimal"] not in (".", ","):
        raise SpecError(f"--decimal {given['decimal']}", ". or ,")
    if "names" in given:
        given["names"] = tuple(given["names"].split(","))
    if "missing" in given:
        given["missing"] = ("", *given["missing"].split(","))
    return Dialect(**given, types=parse_pairs("--column-type", types, "COLUMN=TYPE, such as price=float"))


def parse_pairs(option: str, texts: "Sequence[str]", expected: str) -> dict[str, str]:
    """The values of NAME=VALUE by name, each of which is given once."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise SpecError(f"{option} {text}", expected)
        if name in pairs:
            raise SpecError(f"{option} {text}: {option} {name}={pairs[name]} is also given", "one of them")
        pairs[name] = value
    return pairs


def show_how(reader: "Reader", console: Console) -> None:
    """Say how text files are written, and what of any files may surprise."""
    from rowwise.ingest.delimited import CsvReader
    from rowwise.ingest.dialect import describe

    if isinstance(reader, CsvReader):
        say(console, describe(reader.dialect))
        if reader.copied:
            place = f"{reader.dialect.unpack_to} (other: --unpack-to, --unpacked-gb)"
            say(console, f"files read from plain copies in {place}: {reader.copied:,}")
    for note in getattr(reader, "notes", ()):
        say(console, f"! {note}", "yellow")
