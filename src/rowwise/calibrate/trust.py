"""Whether a calibration is to be trusted: what disturbed it, and how well its networks predict.

Linux counts how long a thread has waited for a processor that other processes had. Sets that waited are measured again;
those that waited all the same are left out where enough others are left. What else makes a profile useless shows in its
quality: repeats that disagree, a machine whose speed varies, predictions that do not rank sets which were held out.
"""

from collections.abc import Sequence
from pathlib import Path

from rowwise.calibrate.samples import SetSample

SCHEDULED = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, nanoseconds waiting for one, turns
WAITED = 0.05  # share of a measurement, from which on it is disturbed
LEFT_OUT = 0.5  # of the sets at most
LEAST_TAU, MOST_ERROR, MOST_NOISE, MOST_DRIFT = 0.8, 0.25, 0.25, 0.25


def waited_s() -> float:
    """Seconds that this thread has waited for a processor since it began; 0 where the system does not say."""
    try:
        return int(SCHEDULED.read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def undisturbed_sets(sets: Sequence[SetSample], fewest: int) -> list[SetSample]:
    """The sets that had their processors, if these are enough to learn from; else all."""
    quiet = [one for one in sets if one.waited <= WAITED]
    return quiet if len(quiet) >= max(fewest, (1 - LEFT_OUT) * len(sets)) else list(sets)


def reasons(*, disturbed: float, tau: float, error: float, noise: float, drift: float) -> tuple[str, ...]:
    """Why a profile is not to be trusted, most telling first; none: it is.

    `disturbed` is the share of the sets learned from that waited for a processor; the others are those of `Quality`.
    """
    found = (
        (disturbed > LEFT_OUT, f"other processes had the processors during {disturbed:.0%} of the measurements"),
        (noise > MOST_NOISE, f"a set that is measured twice differs by {noise:.0%}"),
        (drift > MOST_DRIFT, f"the machine's speed varied by {drift:.0%}"),
        (tau < LEAST_TAU, f"rank correlation with sets held out is {tau:.2f}, less than {LEAST_TAU}"),
        (error > MOST_ERROR, f"the error on sets held out is {error:.0%}, more than {MOST_ERROR:.0%}"),
    )
    return tuple(line for holds, line in found if holds)
