"""JSON of strangers: its parts are counted before it is decoded, and no column is there twice.

A decoder holds up all other requests of a worker until it is done. Its time is that of the values, lists and keys,
which are counted without holding up anybody.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from rowwise.base.errors import DataError

WHERE = "request"  # begins the messages of errors
SMALL_bytes = 64 << 10  # of a body that is read at once: it takes a few milliseconds at worst
PIECE_bytes = 1 << 18  # of a body whose parts are counted
KEYS_OF_A_COLUMN = 8  # a tensor has that many
LIST_AS_VALUES = 2  # what a list takes, compared with a value

T = TypeVar("T")


class BodyLimits(NamedTuple):
    """What a body may have."""

    size_bytes: int = 16 << 20  # of JSON
    values: int = 1 << 20  # of JSON
    columns: int = 1024
    list_values: int = 1 << 15  # in a list of one row, which is computed at once


if TYPE_CHECKING:
    ColumnName = str
else:

    class ColumnName(str):
        """A key that may be there once. A decoder calls its hook for a type that is not its own."""

        __slots__ = ()


class _JsonParts(NamedTuple):
    """Values, lists, objects and keys of a body, but for one or two of each."""

    commas: int
    lists: int
    objects: int
    keys: int


def decode_body(body: bytes | bytearray, kind: type[T], limits: BodyLimits, expected: str) -> T:
    """A body as a type; its objects with keys of `ColumnName` have each key once, and few of them."""
    is_small = len(body) <= SMALL_bytes
    if not is_small:
        _check_parts(body, limits)
    names: set[str] = set()
    twice: list[str] = []

    def add(_: type, name: str) -> ColumnName:
        if name in names:
            twice.append(name)
        names.add(name)
        return ColumnName(name)

    try:
        with nullcontext() if is_small else _no_collection():
            found = msgspec.json.decode(body, type=kind, dec_hook=add)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DataError(f"{WHERE}: {str(error)[:500]}", expected) from None
    if twice:
        raise DataError(f"{WHERE}: column {twice[0][:80]!r} is given twice", "each column once")
    return found


def check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise DataError(f"{WHERE}: {count:,} {what}", f"at most {most:,}", hint="send those that the model reads")


def _check_parts(body: bytes | bytearray, limits: BodyLimits) -> None:
    """Refuse what would take long to decode."""
    if len(body) > limits.size_bytes:
        raise DataError(
            f"{WHERE}: {len(body):,} bytes of JSON",
            f"at most {limits.size_bytes:,}",
            hint="send fewer rows, or binary tensors, or Arrow",
        )
    parts = _count_parts(body)
    check_count("keys", parts.keys, KEYS_OF_A_COLUMN * limits.columns)
    values = parts.commas + LIST_AS_VALUES * (parts.lists + parts.objects)
    if values > limits.values:
        got = f"{WHERE}: its JSON has more than {limits.values:,} values, where a list counts as {LIST_AS_VALUES}"
        raise DataError(got, hint="send fewer rows, or binary tensors, or Arrow")


def _count_parts(body: bytes | bytearray) -> _JsonParts:
    """Commas, brackets and colons that are not in a text."""
    counts, is_inside, begin = np.zeros(4, np.int64), 0, 0
    while begin < len(body):
        text = body[begin : begin + PIECE_bytes]
        if b"\\" in text:
            escapes = len(text) - len(text.rstrip(b"\\"))
            text = text[: len(text) - escapes % 2]  # the last one belongs to the next character
            text = text.replace(rb"\\", b"__").replace(rb"\"", b"__")  # what is escaped ends no text
        begin += max(1, len(text))
        piece = np.frombuffer(text, np.uint8)
        if not len(piece):
            continue
        inside = (np.cumsum(piece == ord('"'), dtype=np.uint8) + np.uint8(is_inside)) & 1
        is_inside = int(inside[-1])
        outside = piece * (inside ^ 1)
        counts += [np.count_nonzero(outside == ord(character)) for character in ",[{:"]
    return _JsonParts(*counts.tolist())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without searches for cycles, which JSON has none of: they would take five times as long as all else."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kinds_of(values: Any) -> set[type]:
    """The types of values."""
    return set(map(type, values))
