"""Autoscaling of workers to the demand of the trainers: a pure rule on the counters of one interval.

The number of workers needed is the demand (splits a second that trainers take while they do not wait) divided by the
throughput of one worker. Workers are added at once when trainers waited. They are retired one by one, after several
intervals in a row with spare capacity and a backlog of ready splits.
"""

from math import ceil
from typing import Self

from msgspec import structs

from rowwise.tables.spec import Value

WAITED = 0.01  # tolerated share of an interval that trainers wait
SPARE = 1.1  # spare capacity, as splits differ in size
PATIENCE = 5  # intervals in a row with too many workers before one is retired
MIN_USED = 0.02  # lower bound of the training share of an interval: trainers that only wait have no measurable rate
SMOOTHING = 0.3  # weight of the newest measurement in the moving averages


class ServiceLoad(Value, frozen=True):
    """Counters since the last scaling decision, and the averages that the next one starts from."""

    since_s: float = 0.0
    splits: int = 0  # taken by clients
    waited_s: float = 0.0  # by clients, for these splits
    busy_s: float | None = None  # moving average of worker seconds per split; None before the first split
    demand: float | None = None  # moving average of splits a second that clients take while they do not wait
    unneeded: int = 0  # intervals in a row with more workers than needed
    interval_s: float = 0.0
    ready: int = 0

    def count_taken(self, waited_s: float, now_s: float) -> Self:
        """Add a split taken by a client. The very first wait is the start of the workers, and does not count."""
        started = self.demand is not None or self.splits > 0
        waited_s = max(waited_s, 0.0) if started else 0.0
        since_s = self.since_s if started else now_s
        return structs.replace(self, splits=self.splits + 1, waited_s=self.waited_s + waited_s, since_s=since_s)

    def count_prepared(self, busy_s: float) -> Self:
        before = self.busy_s
        return structs.replace(self, busy_s=busy_s if before is None else before + SMOOTHING * (busy_s - before))

    def end_interval(self, now_s: float, ready: int) -> Self:
        return structs.replace(self, interval_s=now_s - self.since_s, ready=ready)


def wanted_workers(workers: int, load: ServiceLoad, min_workers: int, max_workers: int) -> tuple[int, ServiceLoad]:
    """The number of workers for the next interval, and the load with reset counters."""
    reset = structs.replace(load, since_s=load.since_s + load.interval_s, splits=0, waited_s=0.0)
    if load.splits < 2 or load.busy_s is None:
        # Too few splits for a rate. Either splits take long: keep counting; or trainers paused with a backlog of ready
        # splits (an evaluation, a checkpoint): leave the pause out.
        return workers, reset if load.ready and not load.splits else load
    used_s = load.interval_s - load.waited_s
    rate = load.splits / max(used_s, MIN_USED * load.interval_s)
    demand = rate if load.demand is None else load.demand + SMOOTHING * (rate - load.demand)
    needed = ceil(SPARE * demand * load.busy_s)
    waited = load.waited_s > WAITED * load.interval_s
    target, unneeded = workers, 0
    if waited and needed >= workers:
        target = min(max(needed, workers + 1), 2 * workers)
    elif not waited and needed < workers and load.ready:
        target, unneeded = (workers - 1, 0) if load.unneeded + 1 >= PATIENCE else (workers, load.unneeded + 1)
    return min(max(target, min_workers), max_workers), structs.replace(reset, demand=demand, unneeded=unneeded)
