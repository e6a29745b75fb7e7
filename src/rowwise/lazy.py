"""Lazy imports of a package's public names, so that `rowwise --help` does not load torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence


def names_of(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[list[str], Callable[[str], object]]:
    """The `__all__` and `__getattr__` of a package, from {module: its public names}."""
    home = {name: module for module, names in homes.items() for name in names}
    known = sorted(home)

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}: want one of {', '.join(known)}")
        return getattr(importlib.import_module(f"{package}.{home[name]}"), name)

    return known, load
