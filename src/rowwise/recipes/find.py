"""Finds recipes: built-in ones by name, others by path."""

from collections.abc import Sequence
from pathlib import Path

from rowwise.base.errors import SpecError, did_you_mean
from rowwise.base.textfile import read_bytes
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.text import read

LIBRARY = Path(__file__).parent / "library"
ENDINGS = (".yaml", ".yml")


def names() -> list[str]:
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a recipe, by path or built-in name."""
    path = Path(name)
    # A folder with the name of a built-in recipe does not hide it; reading refuses all other folders.
    if path.suffix in ENDINGS or path.is_file() or (path.exists() and name not in names()):
        if not path.exists():
            raise SpecError(f"{name}: no such file", "a recipe file, or a name from rowwise ls")
        return path
    if name not in names():
        expected = f"one of {', '.join(names())}, or a path that ends in .yaml"
        raise SpecError(f"no recipe {name!r}", expected, hint=did_you_mean(name, names()))
    return LIBRARY / f"{name}.yaml"


def load(name: str, changes: Sequence[str] = ()) -> Recipe:
    """A recipe by name or path, with changes such as "train.epochs=2"."""
    return read(find(name), changes)


def copy(name: str, to: Path) -> Path:
    """Copy a recipe into a new file; an existing one is never overwritten."""
    source = find(name)
    target = to / source.name if to.is_dir() else to
    if target.exists():
        raise SpecError(f"{target} exists", "another name")
    if target.suffix not in ENDINGS:
        raise SpecError(target, "a name that ends in .yaml")
    text = read_bytes(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text)
    return target
