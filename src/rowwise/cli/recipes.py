"""`rowwise ls` and `rowwise cp`: list the built-in recipes, and copy one to edit."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rowwise.cli.options import RecipeName
from rowwise.cli.terminal import make_terminal, print_line

WIDTH = 140


def ls() -> None:
    """List the built-in recipes, with their test metrics, training time and memory.

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
        metrics = ", ".join(f"{metric} {value:.4g}" for metric, value in about.expect.items())
        if about.published and not metrics:
            metrics = "published: " + ", ".join(f"{m} {value:.4g}" for m, value in about.published.items())
        cost = [] if about.time_s is None else [f"{about.time_s:.0f} s"]
        cost += [] if about.memory_gb is None else [f"{about.memory_gb:.1f} GB"]
        table.add_row(name, about.what, metrics, ", ".join(cost))
    make_terminal(width=WIDTH).print(table, markup=False)


def cp(
    recipe: RecipeName,
    to: Annotated[Path, typer.Argument(help="New YAML file, or a folder for it.")] = Path(),
) -> None:
    """Copy a recipe into a new file to edit.

    Example: rowwise cp dlrm-synthetic my.yaml
    """
    from rowwise.recipes.find import copy

    path = copy(recipe, to)
    print_line(f"wrote {path}; train it with: rowwise train {path}")
