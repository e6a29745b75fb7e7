"""`SimulatedLink`: a slower link between ranks, for tests and benchmarks of overlap on one machine; loads no torch."""

import math
from dataclasses import dataclass

from rowwise.base.errors import SpecError


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """Latency of a collective, and bytes per second that a rank can send."""

    latency_s: float
    bytes_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bytes_s > 0):
            raise SpecError(
                f"simulated link: got latency_s={self.latency_s}, bytes_s={self.bytes_s}",
                "a finite latency_s >= 0, and bytes_s > 0",
            )
