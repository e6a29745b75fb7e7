"""The user's local hour of the day or day of the week, from a time and a time zone or an offset.

Known limits: Arrow has no daylight saving time after 2037.
"""

from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest.block import Ints
from rowwise.ingest.kinds import NUMBERS, TIMES
from rowwise.ingest.transform.arrays import either_null, nulls, to_numbers
from rowwise.ingest.transform.transform import Arrays, Kinds, RowPosition, Transform

FARTHEST_S = 28_000 * 31_556_952
Unit = Literal["s", "ms", "us", "ns"]
PER_SECOND: dict[Unit, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class GetLocalHour(Transform, frozen=True, kw_only=True, tag="get_local_hour", tag_field="kind"):
    """The local hour of the day, 0 to 23, in a time zone, or at an offset in minutes east of UTC.

    Times without a zone, and whole numbers, are in UTC, the latter counted from 1970. A null time, and an offset that
    is null, NaN or infinite, give null, and so does a time 28,000 years from 1970: it is in another unit.
    """

    column: str
    to: str
    zone: str | None = None  # such as Europe/Vienna, with its summer time; UTC without zone and offset
    offset: str | None = None  # a column of minutes east of UTC: 120 is UTC+2
    unit: Unit = "s"  # of whole numbers

    def __post_init__(self) -> None:
        if self.zone is not None and self.offset is not None:
            raise self.spec_error("got both zone and offset: expected only one")
        if self.unit not in PER_SECOND:
            raise self.spec_error(f"unit={self.unit!r}: expected 's', 'ms', 'us' or 'ns'")
        if self.zone is not None:
            try:
                ZoneInfo(self.zone)
            except (ZoneInfoNotFoundError, ValueError, OSError):
                raise self.spec_error(
                    f"zone={self.zone!r}: unknown time zone: expected a zone such as Europe/Vienna"
                ) from None

    @property
    def reads(self) -> tuple[str, ...]:
        """The time, and the offset."""
        return (self.column,) + (() if self.offset is None else (self.offset,))

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.to,)

    @property
    def wants(self) -> tuple[str, ...]:
        return (TIMES, NUMBERS)[: len(self.reads)]

    def types(self, kinds: Kinds) -> Kinds:
        return (pa.int64(),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        null_R, seconds_R = nulls(arrays[0]), _seconds(arrays[0], self.unit)
        far_R = (seconds_R < -FARTHEST_S) | (seconds_R > FARTHEST_S)
        if far_R.any():  # beyond the range of Arrow's calendar, whose hours are wrong there
            null_R, seconds_R = either_null(null_R, far_R), np.where(far_R, 0, seconds_R)
        if self.zone is not None:
            local = pa.array(seconds_R, pa.timestamp("s", self.zone))
            return (pa.array(self._of_local(local).to_numpy(zero_copy_only=False), mask=null_R),)
        if self.offset is not None:
            numbers = to_numbers(arrays[1])
            minutes_R = numbers.x_N.astype(np.float64)
            finite_R = np.isfinite(minutes_R)
            null_R = either_null(either_null(null_R, numbers.null_N), None if finite_R.all() else ~finite_R)
            seconds_R = seconds_R + np.floor(np.where(finite_R, minutes_R, 0) * 60).astype(np.int64)
        return (pa.array(self._of_seconds(seconds_R), mask=null_R),)

    def _of_local(self, times: pa.Array) -> pa.Array:
        return pc.call_function("hour", [times])

    def _of_seconds(self, seconds_R: Ints) -> Ints:
        return seconds_R // 3600 % 24


class GetLocalWeekday(GetLocalHour, frozen=True, kw_only=True, tag="get_local_weekday", tag_field="kind"):
    """The local day of the week, 0 (Monday) to 6, in a time zone, or at an offset in minutes east of UTC.

    Zones, units and missing values are those of `get_local_hour`.
    """

    def _of_local(self, times: pa.Array) -> pa.Array:
        return pc.call_function("day_of_week", [times])

    def _of_seconds(self, seconds_R: Ints) -> Ints:
        return (seconds_R // 86_400 + 3) % 7  # 1970 began on a Thursday


def _seconds(array: pa.Array, unit: Unit) -> Ints:
    """Whole seconds since 1970; 0 for missing values."""
    kind = array.type
    if types.is_date(kind):
        array, unit = array.cast(pa.timestamp("ms")), "ms"
    elif types.is_timestamp(kind):
        unit = kind.unit
    counts = array.cast(pa.int64(), safe=False).fill_null(0)
    return counts.to_numpy(zero_copy_only=False) // PER_SECOND[unit]
