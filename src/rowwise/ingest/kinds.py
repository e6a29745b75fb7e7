"""Questions on types of Arrow that several modules ask."""

from collections.abc import Callable

import pyarrow as pa
from pyarrow import types


def is_text(kind: pa.DataType) -> bool:
    """Strings and bytes in any of Arrow's layouts."""
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def is_list(kind: pa.DataType) -> bool:
    """Lists in any of Arrow's layouts."""
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)
    return any(test(kind) for test in tests)


def is_number(kind: pa.DataType) -> bool:
    """Whole numbers, fractions and booleans."""
    return any(test(kind) for test in (types.is_integer, types.is_boolean, types.is_floating, types.is_decimal))


NUMBERS = "numbers"
ROWS = "whole numbers, or lists of them"
IDS = "whole numbers or text, or lists of them"
KEYS = "whole numbers or text"
TIMES = "times or whole numbers"


def _is_whole(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind))


def _is_key(kind: pa.DataType) -> bool:
    inner = kind.value_type if types.is_dictionary(kind) else kind
    return _is_whole(inner) or is_text(inner)


def element_of(kind: pa.DataType) -> pa.DataType:
    """The type of what lists hold, or the type itself."""
    return kind.value_type if is_list(kind) else kind


FITS: dict[str, Callable[[pa.DataType], bool]] = {  # by the requirement, as errors state it: whether a type meets it
    NUMBERS: is_number,
    ROWS: lambda kind: _is_whole(element_of(kind)),
    IDS: lambda kind: _is_key(element_of(kind)),
    KEYS: _is_key,
    TIMES: lambda kind: _is_whole(kind) or types.is_timestamp(kind) or types.is_date(kind),
}
