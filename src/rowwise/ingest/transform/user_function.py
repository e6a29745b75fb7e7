"""A transform by a user's function on Arrow columns: path.py:function.

The source of the file is executed, also in serving, where it comes from the export. So the file may import installed
packages, but no neighbouring files.
"""

import ast
import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, final

import msgspec
import pyarrow as pa

from rowwise.base.errors import DataError, RowwiseError
from rowwise.base.textfile import read_text
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.kinds import ANYTHING
from rowwise.ingest.transform.arrays import plain_kind
from rowwise.ingest.transform.transform import Arrays, Kinds, RowPosition, Run, Transform


class UserFunction(Transform, frozen=True, kw_only=True, tag="own", tag_field="kind"):
    """A user's function that takes Arrow arrays and returns one, or several in a tuple or a dict.

    The result must have as many rows as the input, also for an empty input. Nulls and NaN are passed as they are in the
    data, text as large_string, lists as large_list. A row of the result must depend on that row only; this is not
    checked, but serving relies on it.
    """

    function: str  # path.py:function
    columns: tuple[str, ...] = ()  # arguments in the order of the parameters; by default named like the parameters
    to: tuple[str, ...] = ()  # names of the results; by default one column, named like the function
    source: str = ""  # source code, as in an export; empty to read the file

    def __post_init__(self) -> None:
        path, colon, name = self.function.rpartition(":")
        if not colon or not path.endswith(".py") or not name.isidentifier():
            raise self.spec_error(f"function={self.function!r}: expected path.py:function")
        for field, names in (("columns", self.columns), ("to", self.to)):
            if len(set(names)) < len(names):
                raise self.spec_error(f"{self.function}: {field}: {', '.join(names)}: expected each name once")

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def file(self) -> str:
        return self.function.rpartition(":")[0]

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns

    @property
    def makes(self) -> tuple[str, ...]:
        return self.to

    @property
    def wants(self) -> tuple[str, ...]:
        return (ANYTHING,) * len(self.columns)

    def types(self, kinds: Kinds) -> Kinds:
        empty = tuple(pa.array([], kind) for kind in kinds)
        return tuple(array.type for array in self.run(empty, RowPosition()))

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        return self.prepare()(arrays, where)

    def read_files(self) -> "UserFunction":
        """The transform with its source code, and the column names derived from it."""
        text = self.source or self._read()
        parameters = self._parameters(text)
        columns = self.columns or parameters
        if not columns:
            raise self.spec_error(f"{self.function} has no parameters: expected at least one, for a column to read")
        return msgspec.structs.replace(self, source=text, columns=columns, to=self.to or (self.name,))

    def prepare(self) -> Run:
        """Execute the source code once, and return the function."""
        full = self.read_files()
        digest = hashlib.sha256(full.source.encode()).hexdigest()
        module = ModuleType(f"rowwise_own_{Path(self.file).stem}_{digest[:16]}")
        module.__file__ = self.file
        sys.modules[module.__name__] = module  # dataclasses look a class's module up there
        with _FunctionErrors(f"{self.file} cannot be run"):
            exec(compile(full.source, self.file, "exec"), vars(module))
        return partial(full._call, getattr(module, self.name))

    def _call(self, function: Callable[..., Any], arrays: Arrays, where: RowPosition) -> Arrays:
        place = f"{self.function}, on the {len(arrays[0])} rows from {where.split.locate_row(0)}"
        plain = [array.cast(plain_kind(array.type)) for array in arrays]
        with _FunctionErrors(place):
            output = function(*plain)
        return tuple(
            _check_result(array, len(arrays[0]), f"{place}: {name!r}") for name, array in self._outputs(output, place)
        )

    def _outputs(self, output: Any, place: str) -> list[tuple[str, Any]]:
        """The returned columns, in the order of `to`."""
        names = ", ".join(self.to)
        if isinstance(output, dict):
            if set(output) != set(self.to):
                returned = ", ".join(map(str, output)) or "nothing"
                raise DataError(f"{place}: it returned columns called {returned}", f"{names}, as `to` says")
            return [(name, output[name]) for name in self.to]
        outputs = list(output) if isinstance(output, (tuple, list)) else [output]
        if len(outputs) != len(self.to):
            raise DataError(f"{place}: it returned {len(outputs)} columns", f"{len(self.to)}, {names}, as `to` says")
        return list(zip(self.to, outputs, strict=True))

    def _read(self) -> str:
        try:
            return read_text(self.file)
        except OSError as error:
            raise self.spec_error(f"{self.file}: cannot be read: {error.strerror}") from None

    def _parameters(self, text: str) -> tuple[str, ...]:
        """The names of the function's parameters, by parsing the source without executing it."""
        try:
            inside = ast.parse(text, self.file).body
        except (SyntaxError, ValueError) as error:
            raise self.spec_error(f"{self.file} is not Python: {error}") from None
        functions = {node.name: node for node in inside if isinstance(node, ast.FunctionDef)}
        if self.name not in functions:
            names = ", ".join(functions) or "none"
            raise self.spec_error(f"{self.file} has no function {self.name!r}; it has {names}")
        parameters = functions[self.name].args
        names = tuple(a.arg for a in (*parameters.posonlyargs, *parameters.args))
        required = len(names) - len(parameters.defaults)
        fits = required <= len(self.columns) and (parameters.vararg is not None or len(self.columns) <= len(names))
        if self.columns and not fits:
            problem = f"{self.function} has {len(names)} parameters"
            raise self.spec_error(f"{problem}, but columns has {len(self.columns)} names: expected the same number")
        return names[:required]


def _check_result(array: Any, rows: int, place: str) -> pa.Array:
    if not isinstance(array, (pa.Array, pa.ChunkedArray)):
        raise DataError(
            f"{place}: it returned {type(array).__name__}",
            "an Arrow array",
            hint="pa.array(x) makes one of numpy and of lists",
        )
    if len(array) != rows:
        raise DataError(f"{place}: it returned {len(array)} rows", f"{rows}, one for each row that it got")
    if pa.types.is_null(array.type):
        raise DataError(f"{place}: it returned an array without a type", "a type, as in pa.array(x, pa.float64())")
    column = combine_chunks(array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array]))
    return column.cast(plain_kind(column.type))


@final
class _FunctionErrors:
    """Turns any exception of user code into an error that names its file and line."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            message = str(error) if isinstance(error, RowwiseError) else f"{type(error).__name__}: {error}"
            raise DataError(f"{self._place}: {message}{_line(at, self._place)}") from error


def _line(at: TracebackType | None, place: str) -> str:
    """The innermost line of the user's file in a traceback."""
    file, line = place.partition(".py")[0] + ".py", 0
    while at is not None:
        if at.tb_frame.f_code.co_filename == file:
            line = at.tb_lineno
        at = at.tb_next
    return f" (line {line})" if line else ""
