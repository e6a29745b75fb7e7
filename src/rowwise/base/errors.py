"""The errors and warnings of rowwise, as one tree.

    RowwiseError
    |-- SpecError        an invalid table, feature or plan (also a ValueError)
    |   `-- planner.infeasible.InfeasibleError   tables that fit no plan; names what would make them fit
    |-- BatchError       an invalid batch: shapes, types or features do not match (also a ValueError)
    |-- DataError        a file, column or value of the data that cannot be used (also a ValueError)
    |-- IdError          an id outside its table (also a ValueError)
    |-- GradientError    a gradient that is not finite (also an ArithmeticError)
    |   `-- UpdateError  raised after other rows were updated
    |-- DeviceError      a bad id or gradient found by a kernel on a GPU; raised a step later
    |-- StateError       a state dict that does not match the tables (also a ValueError)
    |-- PeerError        another rank failed, or ranks do not agree (also a RuntimeError)
    |   `-- AgreedError  another rank had an error; all ranks raise, and collectives still work
    |-- TableMemoryError tables that do not fit into memory (also a MemoryError)
    |-- StoreError       rows on disk that cannot be read or written (also an OSError)
    |-- StorageError     a folder or object store that cannot be reached, read or written (also an OSError)
    |-- CheckpointError  a checkpoint that is missing, damaged or could not be written (also an OSError)
    |   `-- DamageError  files are missing, or do not match their checksums
    `-- NativeError      the native operators are missing or do not load (also an ImportError)

`UnknownIdWarning` counts ids that were mapped to the last row of a table with `unknown='last_row'`.
"""

from collections.abc import Iterable


class RowwiseError(Exception):
    """Base of every error that rowwise raises on purpose.

    Args:
        problem: what is wrong, with the table, feature, id, rank, key or file, and its value.
        expected: what would have been right.
        hint: how to fix it, if `expected` does not say so.
    """

    def __init__(self, problem: object = "", expected: object = "", *, hint: object = "") -> None:
        self.problem, self.expected, self.hint = str(problem), str(expected), str(hint)
        expectation = f"expected {expected}" if self.expected else ""
        line = ": ".join(filter(None, (self.problem, expectation)))
        super().__init__("; ".join(filter(None, (line, self.hint))))


class SpecError(RowwiseError, ValueError):
    """An invalid table, feature or plan."""


class BatchError(RowwiseError, ValueError):
    """An invalid batch: shapes, types or features do not match."""


class DataError(RowwiseError, ValueError):
    """A file, column or value of the data that cannot be used."""


class IdError(RowwiseError, ValueError):
    """An id outside its table."""


class GradientError(RowwiseError, ArithmeticError):
    """A gradient that is not finite."""


class UpdateError(GradientError):
    """A row's gradient is not finite, and other rows were updated already."""


class DeviceError(RowwiseError):
    """A bad id or gradient found by a kernel on a GPU; raised on the host a step later."""


class StateError(RowwiseError, ValueError):
    """A state dict that does not match the tables."""


class PeerError(RowwiseError, RuntimeError):
    """Another rank failed, or ranks do not agree."""


class AgreedError(PeerError):
    """Another rank had an error; all ranks raise, and collectives still work. `kinds`: class names of the errors."""

    def __init__(self, message: str, kinds: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.kinds = kinds


class TableMemoryError(RowwiseError, MemoryError):
    """Tables that do not fit into memory."""


class StoreError(RowwiseError, OSError):
    """Rows on disk that cannot be read or written."""


class CheckpointError(RowwiseError, OSError):
    """A checkpoint that is missing, damaged or could not be written."""


class DamageError(CheckpointError):
    """A checkpoint whose files are missing or do not match their checksums."""


class StorageError(RowwiseError, OSError):
    """A folder or object store that cannot be reached, read or written."""


class NativeError(RowwiseError, ImportError):
    """The native operators are missing or do not load."""


class UnknownIdWarning(UserWarning):
    """Ids outside their table were mapped to its last row."""


def one_line(error: BaseException) -> str | None:
    """The message of a user's mistake or a missing file, as one line; None for any other error, which is a bug."""
    if isinstance(error, RowwiseError):
        return escape_newlines(str(error))
    if isinstance(error, OSError) and error.filename is not None:
        return escape_newlines(f"{error.filename}: {error.strerror}")
    return None


def escape_newlines(text: str) -> str:
    """Any text as one printable line."""
    return printable(text).replace("\n", "\\n")


def printable(text: str) -> str:
    r"""A text for a terminal: control characters are escaped, as \x1b; the narrow space of numbers is a plain one."""
    text = text.replace("\u202f", " ")
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question with the most similar of the known names; empty if none is similar."""
    import difflib  # slow to import, and only errors need it

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""
