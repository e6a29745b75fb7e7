"""What a request may ask for, and whether it can be answered in time; pure: times are arguments."""

from math import ceil, inf
from typing import final

from rowwise.base.errors import SpecError
from rowwise.tables.spec import Value

SAFE = 0.75  # of a request's time; the rest is for what the estimate does not know
MEMORY = 0.98  # weight that a batch keeps when another one is measured


class ServiceLimits(Value, frozen=True):
    """What a request may ask for, and a connection may take."""

    rows_at_once: int = 256  # most rows of a batch
    max_rows: int = 16_384  # of a request
    max_bytes: int = 64 << 20  # of a request's body
    timeout_s: float = 5.0  # of a request that names none
    max_json_bytes: int = 16 << 20  # of a body of JSON
    max_json_values: int = 1 << 20  # in a body of JSON; a list counts as two
    max_list_values: int = 1 << 15  # in a list of one row
    bodies_bytes: int = 256 << 20  # of all requests that a worker has
    head_bytes: int = 64 << 10  # of a request
    head_s: float = 10.0  # from the first byte of a head to its end
    body_s: float = 30.0  # from the end of a head to that of the body; also for a client to read its answer
    idle_s: float = 75.0  # between two requests of a connection; load balancers keep theirs for 60
    connections: int = 1000  # that a worker has open
    load_s: float = 3600.0  # for the rows of a version

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) < inf:
                raise SpecError(f"{name}={getattr(self, name)}", "more than 0")

    def seconds(self, asked_s: float | None) -> float:
        """The time of a request, which may have asked for one."""
        return self.timeout_s if asked_s is None else asked_s


@final
class Admission:
    """Seconds of a batch as a line over its rows, fitted to the latest batches.

    Args:
        rows_at_once: most rows of a batch.
    """

    def __init__(self, rows_at_once: int) -> None:
        self._rows_at_once = rows_at_once
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0
        self._read: dict[str, tuple[float, float]] = {}  # bytes and rows of bodies, by their kind

    def observe_body(self, kind: str, size_bytes: int, rows: int) -> None:
        """Take into account how many rows a body of a kind had."""
        seen_bytes, seen_rows = self._read.get(kind, (0.0, 0.0))
        self._read[kind] = MEMORY * seen_bytes + size_bytes, MEMORY * seen_rows + rows

    def expected_rows(self, kind: str, size_bytes: int) -> int:
        """An estimate of the rows of a body that is not read yet; at least 1."""
        seen_bytes, seen_rows = self._read.get(kind, (1.0, 0.0))
        return max(1, int(size_bytes * seen_rows / seen_bytes))

    def doubt(self) -> None:
        """Halve what batches took; called for a request that is refused though nothing waits."""
        self._seconds, self._rows_seconds = self._seconds / 2, self._rows_seconds / 2

    def observe(self, rows: int, seconds: float) -> None:
        """Take a computed batch into account."""
        self._weight = MEMORY * self._weight + 1
        self._rows = MEMORY * self._rows + rows
        self._seconds = MEMORY * self._seconds + seconds
        self._rows_rows = MEMORY * self._rows_rows + rows * rows
        self._rows_seconds = MEMORY * self._rows_seconds + rows * seconds

    def seconds(self, rows: int) -> float:
        """An estimate for so many rows, in full batches; 0 before a batch was measured."""
        if not self._weight:
            return 0.0
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_rows / self._weight - mean_rows**2
        covariance = self._rows_seconds / self._weight - mean_rows * mean_s
        # A line through the origin where all batches are alike.
        row_s = covariance / variance if variance > 1e-3 * mean_rows**2 else mean_s / mean_rows
        row_s = min(max(row_s, 0.0), mean_s / mean_rows)
        return ceil(rows / self._rows_at_once) * (mean_s - row_s * mean_rows) + row_s * rows

    def delay_s(self, rows: int, waiting: int, left_s: float) -> float | None:
        """Seconds after which a request may come again that cannot be answered in the time left; None: it can."""
        needed_s = self.seconds(waiting + rows)
        usable_s = SAFE * left_s
        return None if needed_s <= usable_s else max(needed_s - usable_s, 1e-3)
