"""Everything a user can be told, as one tree.

    RowwiseError
    |-- SpecError        a table, feature or plan that cannot be (also a ValueError)
    |   `-- planner.infeasible.InfeasibleError   tables that fit no plan; says what would make them fit
    |-- BatchError       a batch whose parts do not fit together (also a ValueError)
    |-- DataError        a file, column or value of the data that cannot be used (also a ValueError)
    |-- IdError          an id outside its table (also a ValueError)
    |-- GradientError    a gradient that is not finite (also an ArithmeticError)
    |   `-- UpdateError  that came to light when other rows were updated already
    |-- StateError       a state dict that does not match the tables (also a ValueError)
    |-- PeerError        another rank failed, or ranks do not agree (also a RuntimeError)
    |   `-- AgreedError  another rank met an error, all know of it, and all still can talk
    |-- TableMemoryError tables for which there is no memory (also a MemoryError)
    |-- CheckpointError  a checkpoint that is missing, damaged or could not be written (also an OSError)
    `-- NativeError      the native operators are missing or do not load (also an ImportError)

Messages say what was found, what was wanted and the way out. `UnknownIdWarning` counts ids that a table
was told to map to its last row.
"""

from rowwise.textfile import printable


class RowwiseError(Exception):
    """Base of every error that rowwise raises on purpose."""


class SpecError(RowwiseError, ValueError):
    """A table, feature or plan that cannot be."""


class BatchError(RowwiseError, ValueError):
    """A batch whose parts do not fit together."""


class DataError(RowwiseError, ValueError):
    """A file, column or value of the data that cannot be used."""


class IdError(RowwiseError, ValueError):
    """An id outside its table."""


class GradientError(RowwiseError, ArithmeticError):
    """A gradient that is not finite."""


class UpdateError(GradientError):
    """A gradient of a row that is not finite, and came to light when other rows were updated already."""


class StateError(RowwiseError, ValueError):
    """A state dict that does not match the tables."""


class PeerError(RowwiseError, RuntimeError):
    """Another rank failed, or ranks do not agree."""


class AgreedError(PeerError):
    """Another rank met an error; all ranks left together, and collectives still work. `kinds`: of the errors."""

    def __init__(self, message: str, kinds: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.kinds = kinds


class TableMemoryError(RowwiseError, MemoryError):
    """Tables for which there is no memory."""


class CheckpointError(RowwiseError, OSError):
    """A checkpoint that is missing, damaged or could not be written."""


class NativeError(RowwiseError, ImportError):
    """The native operators are missing or do not load."""


class UnknownIdWarning(UserWarning):
    """Ids outside their table were mapped to its last row."""


def one_line(error: BaseException) -> str | None:
    """What a user is told of a mistake, or of a file that cannot be had; None: it is a bug of ours."""
    if isinstance(error, RowwiseError):
        return _one_line(str(error))
    if isinstance(error, OSError) and error.filename is not None:
        return _one_line(f"{error.filename}: {error.strerror}")
    return None


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")
