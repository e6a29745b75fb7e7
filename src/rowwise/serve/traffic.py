"""The traffic split between versions: the content of current.json."""

from typing import Annotated

import msgspec

from rowwise.base.errors import SpecError
from rowwise.tables.spec import Value

GOLDEN_SHARE = 0.6180339887498949  # multiples of the golden ratio, modulo 1, are evenly distributed


def is_chosen(number: int, share: float) -> bool:
    """Deterministic sampling by number: any run of numbers has about this share."""
    return share >= 1 or number * GOLDEN_SHARE % 1 < share


def parse_share(text: str) -> float:
    """A share as `0.05` or `5%`; raises ValueError."""
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


class Canary(Value, frozen=True):
    """A version that answers a share of the requests."""

    version: Annotated[int, msgspec.Meta(ge=1)]
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise SpecError(f"canary: a share of {self.share}", "more than 0 and less than 1, such as 5%")


class Traffic(Value, frozen=True, omit_defaults=True):
    """The current version, and a canary that takes a share of the requests."""

    current: int
    canary: Canary | None = None

    def __post_init__(self) -> None:
        if self.canary is not None and self.canary.version == self.current:
            raise SpecError(f"canary: version {self.current} is the current one", "another version")

    @property
    def versions(self) -> tuple[int, ...]:
        return (self.current,) if self.canary is None else (self.current, self.canary.version)

    def version_of(self, request: int) -> int:
        """The version for the request with this number."""
        if self.canary is not None and is_chosen(request, self.canary.share):
            return self.canary.version
        return self.current
