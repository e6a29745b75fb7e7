"""Where the libraries are that were built with the package."""

import ctypes
import importlib.util
from pathlib import Path

from rowwise.errors import NativeError

BUILD = "build it with `make build` or `pip install .`"


def find_library(name: str) -> Path:
    """A built library: beside the package, installed or not."""
    # An editable install has two folders: the sources, and one in site-packages that holds what was built.
    spec = importlib.util.find_spec("rowwise")
    folders = [Path(f) for f in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        path = folder / "_lib" / name
        if path.exists():
            return path
    looked = ", ".join(str(f / "_lib") for f in folders)
    raise NativeError(f"{name} is not in {looked}: {BUILD}")


def load_library(name: str) -> ctypes.CDLL:
    """One of those that need no torch."""
    path = find_library(name)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} does not load: {error}; {BUILD}") from error
