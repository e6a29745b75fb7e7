"""Predicates on Arrow types."""

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


def element_of(kind: pa.DataType) -> pa.DataType:
    """The element type of a list, or the type itself."""
    return kind.value_type if is_list(kind) else kind


def decoded_kind(kind: pa.DataType) -> pa.DataType:
    """The value type of a dictionary, or the type itself."""
    return kind.value_type if types.is_dictionary(kind) else kind


def holds_whole(kind: pa.DataType) -> bool:
    """Whether ids of this type, or of its dictionary, are whole numbers."""
    return bool(types.is_integer(decoded_kind(kind)))


def is_time(kind: pa.DataType) -> bool:
    """Timestamps and 32-bit dates."""
    return bool(types.is_timestamp(kind) or types.is_date32(kind))


def wide_text(kind: pa.DataType) -> pa.DataType:
    """The type of text, or of bytes, with 64-bit offsets."""
    return pa.large_binary() if types.is_binary(kind) or types.is_large_binary(kind) else pa.large_string()


NUMBERS = "numbers"
ROWS = "whole numbers, or lists of them"
IDS = "whole numbers or text, or lists of them"
KEYS = "whole numbers or text"
TIMES = "times or whole numbers"
LISTS = "lists"
ID_LISTS = "lists of whole numbers or text"
NUMBER_LISTS = "lists of numbers"
NUMBERS_OR_LISTS = "numbers, or lists of them"
VALUES = "numbers or text, or lists of them"
NUMBER_OR_KEY = "numbers or text"
ANYTHING = "anything"


def _is_key(kind: pa.DataType) -> bool:
    return holds_whole(kind) or is_text(decoded_kind(kind))


FITS: dict[str, Callable[[pa.DataType], bool]] = {  # requirement, worded as in errors -> whether a type meets it
    NUMBERS: is_number,
    ROWS: lambda kind: bool(types.is_integer(element_of(kind))),
    IDS: lambda kind: _is_key(element_of(kind)),
    KEYS: _is_key,
    TIMES: lambda kind: bool(types.is_integer(kind)) or types.is_timestamp(kind) or types.is_date(kind),
    LISTS: is_list,
    ID_LISTS: lambda kind: is_list(kind) and _is_key(element_of(kind)),
    NUMBER_LISTS: lambda kind: is_list(kind) and is_number(element_of(kind)),
    NUMBERS_OR_LISTS: lambda kind: is_number(element_of(kind)),
    VALUES: lambda kind: is_number(element_of(kind)) or _is_key(element_of(kind)),
    NUMBER_OR_KEY: lambda kind: is_number(kind) or _is_key(kind),
    ANYTHING: lambda kind: True,
}
