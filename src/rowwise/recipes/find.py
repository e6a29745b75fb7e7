"""The recipes that ship with rowwise, by name, and any others by path."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from rowwise.errors import SpecError
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.text import read
from rowwise.textfile import read_bytes

LIBRARY = Path(__file__).parent / "library"
ENDINGS = (".yaml", ".yml")


def names() -> list[str]:
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a recipe: a path, or a name of those that ship."""
    path = Path(name)
    # A folder may well be called as a recipe that ships; of any other name the reader says what it is.
    if path.suffix in ENDINGS or path.is_file() or (path.exists() and name not in names()):
        if not path.exists():
            raise SpecError(f"{name}: there is no such recipe file; rowwise ls lists those that ship")
        return path
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise SpecError(f"no recipe {name!r}{guess} There are {', '.join(names())}, and any path that ends in .yaml")
    return LIBRARY / f"{name}.yaml"


def load(name: str, changes: Sequence[str] = ()) -> Recipe:
    """A recipe by name or path, with changes such as "train.epochs=2"."""
    return read(find(name), changes)


def copy(name: str, to: Path) -> Path:
    """A recipe to edit; what is there is never overwritten."""
    source = find(name)
    place = to / source.name if to.is_dir() else to
    if place.exists():
        raise SpecError(f"{place} is there already: give another name")
    if place.suffix not in ENDINGS:
        raise SpecError(f"{place}: want a name that ends in .yaml")
    text = read_bytes(source)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(text)
    return place
