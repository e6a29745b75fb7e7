"""Untrusted JSON: values are counted before decoding, and duplicate columns are refused.

A decoder blocks all other requests of a worker, for a time proportional to values, lists and keys. These are counted
first, without blocking.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from rowwise.base.errors import DataError

WHERE = "request"  # prefix of error messages
SMALL_bytes = 64 << 10  # bodies up to this size are decoded inline, in a few milliseconds at worst
PIECE_bytes = 1 << 18  # block size for counting
KEYS_PER_COLUMN = 8  # as in a tensor
VALUES_PER_LIST = 2  # cost of decoding a list, in values

T = TypeVar("T")


class BodyLimits(NamedTuple):
    """Limits of a body."""

    size_bytes: int = 16 << 20  # of JSON
    values: int = 1 << 20  # of JSON
    columns: int = 1024
    list_values: int = 1 << 15  # per list of one row, which is computed in one batch


if TYPE_CHECKING:
    ColumnName = str
else:

    class ColumnName(str):
        """A key that must be unique: a custom type, for which the decoder calls its hook."""

        __slots__ = ()


class _JsonParts(NamedTuple):
    """Approximate counts of values (commas), lists, objects and keys of a body."""

    commas: int
    lists: int
    objects: int
    keys: int


def decode_body(body: bytes | bytearray, kind: type[T], limits: BodyLimits, expected: str) -> T:
    """Decode a body; raises for duplicate or too many keys of type `ColumnName`."""
    is_small = len(body) <= SMALL_bytes
    if not is_small:
        _check_parts(body, limits)
    names: set[str] = set()
    duplicates: list[str] = []

    def add(_: type, name: str) -> ColumnName:
        if name in names:
            duplicates.append(name)
        names.add(name)
        return ColumnName(name)

    try:
        with nullcontext() if is_small else _no_collection():
            decoded = msgspec.json.decode(body, type=kind, dec_hook=add)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DataError(f"{WHERE}: {str(error)[:500]}", expected) from None
    if duplicates:
        raise DataError(f"{WHERE}: column {duplicates[0][:80]!r} is given twice", "each column once")
    return decoded


def check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise DataError(f"{WHERE}: {count:,} {what}", f"at most {limit:,}", hint="send those that the model reads")


def _check_parts(body: bytes | bytearray, limits: BodyLimits) -> None:
    """Raise for a body that would take long to decode."""
    if len(body) > limits.size_bytes:
        raise DataError(
            f"{WHERE}: {len(body):,} bytes of JSON",
            f"at most {limits.size_bytes:,}",
            hint="send fewer rows, or binary tensors, or Arrow",
        )
    parts = _count_parts(body)
    check_count("keys", parts.keys, KEYS_PER_COLUMN * limits.columns)
    values = parts.commas + VALUES_PER_LIST * (parts.lists + parts.objects)
    if values > limits.values:
        problem = f"{WHERE}: its JSON has more than {limits.values:,} values, where a list counts as {VALUES_PER_LIST}"
        raise DataError(problem, hint="send fewer rows, or binary tensors, or Arrow")


def _count_parts(body: bytes | bytearray) -> _JsonParts:
    """Count commas, brackets and colons outside of strings."""
    counts, is_inside, begin = np.zeros(4, np.int64), 0, 0
    while begin < len(body):
        text = body[begin : begin + PIECE_bytes]
        if b"\\" in text:
            escapes = len(text) - len(text.rstrip(b"\\"))
            text = text[: len(text) - escapes % 2]  # keep an escape together with its character
            text = text.replace(rb"\\", b"__").replace(rb"\"", b"__")  # an escaped quote does not end a string
        begin += max(1, len(text))
        piece = np.frombuffer(text, np.uint8)
        if not len(piece):
            continue
        # The parity of the quotes so far tells whether a character is inside a string.
        inside = (np.cumsum(piece == ord('"'), dtype=np.uint8) + np.uint8(is_inside)) & 1
        is_inside = int(inside[-1])
        outside = piece * (inside ^ 1)
        counts += [np.count_nonzero(outside == ord(character)) for character in ",[{:"]
    return _JsonParts(*counts.tolist())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: decoded JSON has no cycles, and collections would take 5x the decoding."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kinds_of(values: Any) -> set[type]:
    """The types of values."""
    return set(map(type, values))
