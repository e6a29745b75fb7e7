"""What a command says of code that a recipe brings along from elsewhere, before it runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rowwise.textfile import printable

if TYPE_CHECKING:
    from rowwise.recipes.recipe import Recipe


def load_recipe(name: str, changes: Sequence[str] = (), *, told: bool = True) -> "Recipe":
    """A recipe by name or path; says which code from elsewhere it runs."""
    from rowwise.recipes.find import find
    from rowwise.recipes.text import read

    path = find(name)
    recipe = read(path, changes)
    if told:
        _tell(recipe, path)
    return recipe


def tell_of_run(run: Path, changes: Sequence[str] = ()) -> None:
    """The same of a run, whose recipe is in its folder."""
    from rowwise.recipes.text import RECIPE, read

    if (run / RECIPE).is_file():
        _tell(read(run / RECIPE, changes), run / RECIPE)


def _tell(recipe: "Recipe", path: Path) -> None:
    from rowwise.recipes.code import code_elsewhere

    for what in code_elsewhere(recipe, path):
        print(f"rowwise: this runs {printable(what)}: want code that you trust", file=sys.stderr)
