"""The number of workers as a pure rule on the measurements of an interval.

Trainers ask for so many splits a second as long as they do not wait, and a worker makes so many: the quotient is how
many workers there have to be. Workers are added at once when trainers waited, and let go one by one, when for some
intervals they were not needed and splits were ready all the time.
"""

from typing import Self

from msgspec import structs

from rowwise.spec import Value

WAITED = 0.01  # share of an interval that trainers may wait
SPARE = 1.1  # more than it takes on average: splits are not all alike
PATIENCE = 5  # intervals without need before a worker goes
QUICKEST = 0.02  # share of an interval in which splits are used, at least: trainers that only wait tell no rate
MEMORY = 0.3  # weight of the newest measurement


class ServiceLoad(Value, frozen=True):
    """Counters since the last scaling decision, and the state of the controller."""

    since_s: float = 0.0
    splits: int = 0  # that clients have taken
    waited_s: float = 0.0  # of them, for splits
    busy_s: float | None = None  # that a split takes a worker, on average; None: not known yet
    demand: float | None = None  # splits a second that clients take while they need not wait
    unneeded: int = 0  # intervals in a row with more workers than it takes
    interval_s: float = 0.0
    ready: int = 0

    def taken(self, waited_s: float, now_s: float) -> Self:
        """A client has taken a split. The wait for the first one is the start, and tells nothing."""
        known = self.demand is not None or self.splits > 0
        waited_s = max(waited_s, 0.0) if known else 0.0
        since_s = self.since_s if known else now_s
        return structs.replace(self, splits=self.splits + 1, waited_s=self.waited_s + waited_s, since_s=since_s)

    def made(self, busy_s: float) -> Self:
        """A worker has made one."""
        before = self.busy_s
        return structs.replace(self, busy_s=busy_s if before is None else before + MEMORY * (busy_s - before))

    def until(self, now_s: float, ready: int) -> Self:
        return structs.replace(self, interval_s=now_s - self.since_s, ready=ready)


def wanted_workers(present: int, seen: ServiceLoad, least: int, most: int) -> tuple[int, ServiceLoad]:
    used_s = seen.interval_s - seen.waited_s
    begun = structs.replace(seen, since_s=seen.since_s + seen.interval_s, splits=0, waited_s=0.0)
    if seen.splits < 2 or seen.busy_s is None:
        # Too few to tell: splits that take long, which are counted on; or a pause, in which splits lay ready.
        return present, begun if seen.ready and not seen.splits else seen
    rate = seen.splits / max(used_s, QUICKEST * seen.interval_s)
    demand = rate if seen.demand is None else seen.demand + MEMORY * (rate - seen.demand)
    needed = _round_up(SPARE * demand * seen.busy_s)
    waited = seen.waited_s > WAITED * seen.interval_s
    if waited and needed >= present:
        target, unneeded = min(max(needed, present + 1), 2 * present), 0
    elif not waited and needed < present and seen.ready:
        target, unneeded = (present - 1, 0) if seen.unneeded + 1 >= PATIENCE else (present, seen.unneeded + 1)
    else:
        target, unneeded = present, 0
    remembered = structs.replace(begun, demand=demand, unneeded=unneeded)
    return min(max(target, least), most), remembered


def _round_up(x: float) -> int:
    return int(-(-x // 1))
