"""`rowwise recommend`: the best items of every user, in one file."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rowwise.cli.code import warn_of_run_code
from rowwise.cli.console import show_warning
from rowwise.cli.options import AsJson, RunArgument, Which
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_table, make_terminal, print_json, print_line

if TYPE_CHECKING:
    from rowwise.base.records import Recommended


def recommend(  # noqa: PLR0913 - one for each option
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="File to write: .parquet or .csv.")],
    k: Annotated[int, typer.Option("--k", help="Number of items per user.")] = 100,
    users: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Users to recommend to: parquet:PATH, csv:PATH or a path (default: those of the recipe's rows; of a "
            "sequence model the lists of its test rows).",
        ),
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Parquet file of the items to choose from (default: those of the training rows)."
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Condition on the items' columns, such as 'price < 20'; repeatable."),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of the users' keys (default: of their first feature)."),
    ] = None,
    item: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the items' keys, for models that score rows.")
    ] = None,
    seen: Annotated[
        Literal["all", "train", "none"],
        typer.Option(
            help="Rows whose items are left out: all of the recipe, those for training and validation, or none."
        ),
    ] = "all",
    which: Which = "best",
    as_json: AsJson = False,
) -> None:
    """Recommend the best items to every user: write the key of each user with items and scores, as Parquet or CSV.

    Two towers, graphs and sequence models are searched exhaustively, with the scores of a server's exact search. Other
    models score each user with each item of --items. Items that a user has seen are left out.

    Example: rowwise recommend runs/movielens-two-tower/1 --out best.parquet

    Example: rowwise recommend runs/movielens-sasrec/1 --out next.csv --k 20 --users parquet:lists.parquet

    Example: rowwise recommend runs/clicks/1 --out best.parquet --items items.parquet --item sku --user customer

    Example: rowwise recommend runs/shop/1 --out cheap.parquet --items items.parquet --where 'price < 20'
    """
    from rowwise.recipes.recommend import RecommendOptions
    from rowwise.recipes.recommend import recommend as write

    warn_of_run_code(run)
    options = RecommendOptions(k=k, users=users, items=items, where=tuple(where or ()), user=user, item=item, seen=seen)
    console = make_terminal(stderr=True, quiet=as_json)
    with splits_bar(console, "recommending") as tell:
        written = write(run, out, options, which=which, tell=tell, warn=partial(show_warning, console))
    if as_json:
        print_json(written)
    else:
        _show(written, out)


def _show(written: "Recommended", out: Path) -> None:
    print_line(f"wrote {out}: {written.users:,} users, up to {written.k} of {written.items:,} items each")
    table = make_table(("",), ("recommended", "rows"))
    table.add_row("items that occur", f"{written.coverage:.1%}", "")
    table.add_row("share of the 1 % most popular items", f"{written.popular:.1%}", f"{written.popular_rows:.1%}")
    table.add_row("novelty, bits", f"{written.novelty:.2f}", "")
    if written.short:
        table.add_row(f"users with fewer than {written.k} items", f"{written.short:,}", "")
    make_terminal().print(table, markup=False)
