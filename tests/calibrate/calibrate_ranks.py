"""What ranks do in the tests of calibration; apart, as processes find functions by their module."""

from rowwise.calibrate.links import draw_exchange, measure_exchange


def exchanges(comm, count):
    """The first so many, each as this rank tells of it."""
    return [measure_exchange(comm, 0, number, repeats=3) for number in range(count)]


def skewed(comm, numbers):
    """Exchanges that some ranks begin later."""
    world = len(comm.ranks)
    return [(draw_exchange(0, n, world), measure_exchange(comm, 0, n, repeats=5)) for n in numbers]
