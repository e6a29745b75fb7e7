"""What all frozen values have in common.

Its own file because those of `spec` and those that `spec` is made of both begin here.
"""

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the frozen values: unknown keys are refused when read from a file."""
