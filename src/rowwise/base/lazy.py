"""Imports the public names of a package when they are used, so that `rowwise --help` does not load torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence


def export_lazily(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[list[str], Callable[[str], object]]:
    """The `__all__` and `__getattr__` of a package, from {module: its public names}."""
    module_of = {name: module for module, names in homes.items() for name in names}
    exported = sorted(module_of)

    def load(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}: expected one of {', '.join(exported)}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return exported, load
