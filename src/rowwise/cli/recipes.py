"""`rowwise ls` and `rowwise cp`: which recipes there are, and one to edit."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rowwise.cli.terminal import say, terminal

WIDTH = 140


def ls() -> None:
    """List the recipes that ship, with what to expect of each.

    Example: rowwise ls
    """
    from rowwise.recipes.find import load, names

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("recipe", no_wrap=True)
    table.add_column("what", overflow="fold")
    for name in ("test", "takes"):
        table.add_column(name, no_wrap=True)
    for name in names():
        about = load(name).about
        expect = ", ".join(f"{metric} {value:.4g}" for metric, value in about.expect.items())
        takes = [] if about.time_s is None else [f"{about.time_s:.0f} s"]
        takes += [] if about.memory_gb is None else [f"{about.memory_gb:.1f} GB"]
        table.add_row(name, about.what, expect, ", ".join(takes))
    terminal(width=WIDTH).print(table, markup=False)


def cp(
    recipe: Annotated[str, typer.Argument(help="A recipe by name, or a YAML file.")],
    to: Annotated[Path, typer.Argument(help="The new file, or a folder.")] = Path(),
) -> None:
    """Copy a recipe, to edit it.

    Example: rowwise cp dlrm-synthetic my.yaml
    """
    from rowwise.recipes.find import copy

    place = copy(recipe, to)
    say(f"{place} is yours; train it: rowwise train {place}")
