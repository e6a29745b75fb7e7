"""Finds and loads the native libraries that were built with the package; binds those that do not need torch."""

import ctypes
import importlib.util
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_void_p
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rowwise.base.errors import NativeError

Signatures = Mapping[str, tuple[Any, list[Any]]]  # by function: types of its result and of its arguments
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


def address_of(numbers: Any) -> int:
    """The address of a contiguous array or tensor."""
    if isinstance(numbers, np.ndarray):
        assert numbers.flags.c_contiguous
        return numbers.ctypes.data
    assert numbers.is_contiguous()
    return numbers.data_ptr()


class Numbers(c_void_p):
    """A pointer to a contiguous array or tensor, made from it, from an address, or from None."""

    dtype: np.dtype[Any] | None = None  # required of arrays; None: any

    @classmethod
    def from_param(cls, value: Any) -> "Numbers":
        if value is None or type(value) is int:
            return cls(value)
        assert cls.dtype is None or value.dtype == cls.dtype
        return cls(address_of(value))


def _numbers(dtype: str) -> type[Numbers]:
    return type(f"{dtype}s", (Numbers,), {"dtype": np.dtype(dtype)})


Int32s, Int64s, Uint8s, Float32s, Float64s = map(_numbers, ("int32", "int64", "uint8", "float32", "float64"))


class NativeStruct(Structure):
    """A structure of numbers and pointers to arrays; it keeps the arrays alive."""

    _fields_: ClassVar[tuple[tuple[str, Any], ...]]
    converts: ClassVar[bool] = False  # copy arrays of other types or layouts; for read-only arrays

    def __init__(self, *values: Any, **named: Any) -> None:
        kinds = dict(self._fields_)
        named |= zip(kinds, values, strict=False)
        self._arrays = {name: value for name, value in named.items() if hasattr(value, "__len__")}
        if self.converts:
            self._arrays = {name: np.ascontiguousarray(x, kinds[name].dtype) for name, x in self._arrays.items()}
        super().__init__(**named | {name: kinds[name].from_param(array) for name, array in self._arrays.items()})


class NeedsMemory(NamedTuple):
    """The type of a numeric result that reports failed allocations."""

    kind: Any
    least: int  # a lower result is a failed allocation
    problem: str

    def check(self, result: Any, *_: Any) -> Any:
        if result < self.least:
            raise MemoryError(self.problem)
        return result


class CLibrary:
    """A library that does not need torch. Its functions are attributes; the first use of one loads it.

    Args:
        name: file name of the library.
        signatures: types of its functions. An argument that is a structure is a pointer to one, or to an array of them.
    """

    def __init__(self, name: str, signatures: Signatures) -> None:
        self.name, self._signatures = name, signatures

    def __getattr__(self, function: str) -> Any:
        if function.startswith("_"):  # a protocol of Python
            raise AttributeError(function)
        path = find_library(self.name)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(f"{path} does not load: {error}; {BUILD}") from error
        for name, (result, arguments) in self._signatures.items():
            bound = getattr(library, name)
            bound.argtypes = [POINTER(kind) if issubclass(kind, Structure) else kind for kind in arguments]
            if isinstance(result, NeedsMemory):
                bound.restype, bound.errcheck = result.kind, result.check
            else:
                bound.restype = result
            setattr(self, name, bound)
        return object.__getattribute__(self, function)
