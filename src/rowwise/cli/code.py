"""Loads recipes, and warns of foreign code (not from the folder of the recipe) before it runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rowwise.base.errors import printable

if TYPE_CHECKING:
    from rowwise.recipes.recipe import Recipe


def load_recipe(name: str, changes: Sequence[str] = (), *, warn: bool = True) -> "Recipe":
    """Load a recipe by name or path; `warn`: print the foreign code that it runs, and keys that changes drop."""
    from rowwise.recipes.find import find
    from rowwise.recipes.text import dropped_keys, read

    path = find(name)
    recipe = read(path, changes)
    if warn:
        _warn(recipe, path)
        for line in dropped_keys(path, changes):
            print(f"rowwise: {printable(line)}", file=sys.stderr)
    return recipe


def warn_of_run_code(run: Path, changes: Sequence[str] = ()) -> None:
    """Print the foreign code that the recipe in a run folder runs."""
    from rowwise.recipes.text import RECIPE, read

    if (run / RECIPE).is_file():
        _warn(read(run / RECIPE, changes), run / RECIPE)


def _warn(recipe: "Recipe", path: Path) -> None:
    from rowwise.recipes.code import find_foreign_code

    for what in find_foreign_code(recipe, path):
        print(f"rowwise: this recipe runs {printable(what)}: make sure that you trust it", file=sys.stderr)
