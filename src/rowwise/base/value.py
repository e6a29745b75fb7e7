"""`Value`: base class of the frozen values that are read from files; limits of their numbers."""

from typing import TypeVar

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.textfile import decode_json

T = TypeVar("T")
MAX_STEPS = 1 << 40  # steps of a run; also samples, and other counts
MAX_BATCH = 1 << 24  # samples of a batch; the update kernel has 24 bits for the index of a contribution
MAX_RANKS = 1 << 14
MAX_THREADS = 1024
MAX_DIM = 1 << 16  # columns of a table, and of a layer
MAX_LAYERS = 1000


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the frozen values; files with unknown keys are rejected."""


def parse_json(text: str | bytes, kind: type[T], what: str) -> T:
    """Decode a value; `what` names the expected content in the error."""
    try:
        return decode_json(text, kind)
    except msgspec.DecodeError as error:
        raise SpecError(f"not {what}: {error}") from None


def check_max(where: str, value: msgspec.Struct, **limits: int) -> None:
    """Raise if a field exceeds its limit; `where` begins the message."""
    for name, limit in limits.items():
        number = getattr(value, name)
        if isinstance(number, int | float) and number > limit:
            raise SpecError(f"{where}{name}={number}", f"at most {limit:,}")


def check_layers(where: str, **layers: tuple[int, ...]) -> None:
    """Raise for too many or too wide layers; `where` begins the message."""
    for name, widths in layers.items():
        invalid = [width for width in widths if not 1 <= width <= MAX_DIM]
        if invalid or len(widths) > MAX_LAYERS:
            got = f"{invalid[0]} is the width of a layer" if invalid else f"{len(widths)} layers"
            raise SpecError(f"{where}{name}: {got}", f"at most {MAX_LAYERS:,} layers of 1 to {MAX_DIM:,} columns")
