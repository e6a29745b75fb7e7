"""What ranks do in the tests of calibration; apart, as processes find functions by their module."""

import time

from rowwise.planning.calibrate.links import draw_exchange, measure_exchange
from rowwise.planning.calibrate.trust import waited_s


def exchanges(comm, count):
    """The first so many, each as this rank tells of it."""
    return [measure_exchange(comm, 0, number, repeats=3) for number in range(count)]


def skewed(comm, numbers):
    """Exchanges that some ranks begin later, and what share of the time this rank waited for a processor."""
    found = []
    for n in numbers:
        begin, before_s = time.perf_counter(), waited_s()
        drawn, sample = draw_exchange(0, n, len(comm.ranks)), measure_exchange(comm, 0, n, repeats=5)
        found.append((drawn, sample, (waited_s() - before_s) / (time.perf_counter() - begin)))
    return found
