"""Public names of a package that are loaded when first used, so that importing it costs nothing."""

import importlib
from collections.abc import Callable, Mapping, Sequence


def names_of(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[list[str], Callable[[str], object]]:
    """A package's `__all__` and `__getattr__`, from {module: names that it gives}."""
    home = {name: module for module, names in homes.items() for name in names}
    known = sorted(home)

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(known)}")
        return getattr(importlib.import_module(f"{package}.{home[name]}"), name)

    return known, load
