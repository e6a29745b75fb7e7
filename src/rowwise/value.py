"""What all frozen values have in common."""

import msgspec

from rowwise.errors import SpecError

MOST_STEPS = 1 << 40  # of a run; also of samples, and of whatever is counted in steps
MOST_BATCH = 1 << 24  # samples; an update has 24 bits for a contribution
MOST_RANKS = 1 << 14
MOST_THREADS = 1024
MOST_DIM = 1 << 16  # columns of a table, and of a layer
MOST_LAYERS = 1000


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the frozen values: unknown keys are refused when read from a file."""


def check_most(where: str, value: msgspec.Struct, **most: int) -> None:
    """Refuse numbers that are larger than anything that can be made, of the fields with these names."""
    for name, limit in most.items():
        given = getattr(value, name)
        if isinstance(given, int | float) and given > limit:
            raise SpecError(f"{where}{name}={given}: want at most {limit:,}")


def check_layers(where: str, **layers: tuple[int, ...]) -> None:
    """Refuse layers that are more or wider than a model can have."""
    for name, widths in layers.items():
        wrong = [width for width in widths if not 1 <= width <= MOST_DIM]
        if wrong or len(widths) > MOST_LAYERS:
            got = f"{wrong[0]} is the width of a layer" if wrong else f"{len(widths)} layers"
            raise SpecError(f"{where}{name}: {got}: want at most {MOST_LAYERS:,} layers of 1 to {MOST_DIM:,} columns")
