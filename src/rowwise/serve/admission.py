"""Limits of requests, and admission control by deadline; pure: times are arguments."""

from math import ceil, inf
from typing import final

from rowwise.base.errors import SpecError
from rowwise.tables.spec import Value

SAFE_SHARE = 0.75  # of the time of a request; the rest is slack for errors of the estimate
DECAY = 0.98  # exponential decay of the weight of a batch per later batch


class ServiceLimits(Value, frozen=True):
    """Limits of a request and of a connection."""

    rows_at_once: int = 256  # maximum rows of a batch
    max_rows: int = 16_384  # per request
    max_bytes: int = 64 << 20  # per body
    timeout_s: float = 5.0  # default of a request
    max_json_bytes: int = 16 << 20  # per JSON body
    max_json_values: int = 1 << 20  # per JSON body; a list counts as two
    max_list_values: int = 1 << 15  # per list of one row
    bodies_bytes: int = 256 << 20  # of all requests in flight in a worker
    head_bytes: int = 64 << 10  # per request
    head_s: float = 10.0  # from the first byte of a head to its last
    body_s: float = 30.0  # from the end of a head to the end of the body; also to read the response
    idle_s: float = 75.0  # keep-alive timeout, above the 60 s of load balancers
    connections: int = 1000  # open per worker
    load_s: float = 3600.0  # timeout for loading the rows of a version
    starved_s: float = 10.0  # time for which loading a version may wait for an idle processor

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) < inf:
                raise SpecError(f"{name}={getattr(self, name)}", "more than 0")

    def seconds(self, requested_s: float | None) -> float:
        """The timeout of a request: the requested one, or the default."""
        return self.timeout_s if requested_s is None else requested_s


@final
class Admission:
    """Linear model of batch seconds over rows, fitted to the latest batches by decayed least squares.

    Args:
        rows_at_once: maximum rows of a batch.
    """

    def __init__(self, rows_at_once: int) -> None:
        self._rows_at_once = rows_at_once
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0
        self._bodies: dict[str, tuple[float, float]] = {}  # decayed bytes and rows of bodies, by format

    def observe_body(self, body_format: str, size_bytes: int, rows: int) -> None:
        """Update the estimate of rows per byte for a body format."""
        total_bytes, total_rows = self._bodies.get(body_format, (0.0, 0.0))
        self._bodies[body_format] = DECAY * total_bytes + size_bytes, DECAY * total_rows + rows

    def expected_rows(self, body_format: str, size_bytes: int) -> int:
        """Estimated rows of a body before it is received; at least 1."""
        total_bytes, total_rows = self._bodies.get(body_format, (1.0, 0.0))
        return max(1, int(size_bytes * total_rows / total_bytes))

    def doubt(self) -> None:
        """Halve the estimate; called for a refusal on an idle server, which would otherwise never measure again."""
        self._seconds, self._rows_seconds = self._seconds / 2, self._rows_seconds / 2

    def observe(self, rows: int, seconds: float) -> None:
        """Update the fit with a computed batch."""
        self._weight = DECAY * self._weight + 1
        self._rows = DECAY * self._rows + rows
        self._seconds = DECAY * self._seconds + seconds
        self._rows_rows = DECAY * self._rows_rows + rows * rows
        self._rows_seconds = DECAY * self._rows_seconds + rows * seconds

    def seconds(self, rows: int) -> float:
        """Estimated seconds for `rows` in full batches; 0 before the first measured batch."""
        if not self._weight:
            return 0.0
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_rows / self._weight - mean_rows**2
        covariance = self._rows_seconds / self._weight - mean_rows * mean_s
        # If all batches have about the same rows, a line through the origin.
        row_s = covariance / variance if variance > 1e-3 * mean_rows**2 else mean_s / mean_rows
        row_s = min(max(row_s, 0.0), mean_s / mean_rows)
        return ceil(rows / self._rows_at_once) * (mean_s - row_s * mean_rows) + row_s * rows

    def delay_s(self, rows: int, waiting: int, left_s: float) -> float | None:
        """Retry-After of a request that would miss its deadline, or None to admit it."""
        needed_s = self.seconds(waiting + rows)
        usable_s = SAFE_SHARE * left_s
        return None if needed_s <= usable_s else max(needed_s - usable_s, 1e-3)
