"""Finds and loads the native libraries that were built with the package, without torch."""

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowwise.base.errors import NativeError

Signatures = Mapping[str, tuple[Any, list[Any]]]  # by function: the type of its result, and those of its arguments
BUILD = "build it with `make build` or `pip install .`"


def find_library(name: str) -> Path:
    """The path of a library in the package's `_lib` folder, for installed and editable packages."""
    # An editable install has two folders: the sources, and one in site-packages with the built libraries.
    spec = importlib.util.find_spec("rowwise")
    folders = [Path(f) for f in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        path = folder / "_lib" / name
        if path.exists():
            return path
    searched = ", ".join(str(f / "_lib") for f in folders)
    raise NativeError(f"{name} is not in {searched}: {BUILD}")


def bind_library(name: str, signatures: Signatures) -> Any:
    """Load a library that does not need torch, with the result and the arguments of its functions."""
    path = find_library(name)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} does not load: {error}; {BUILD}") from error
    for function, (result, arguments) in signatures.items():
        bound = getattr(library, function)
        bound.restype, bound.argtypes = result, arguments
    return library
