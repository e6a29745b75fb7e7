"""Decides whether a calibration can be trusted: disturbances, and the quality of its networks.

Linux counts how long a thread has waited for a processor that others use. Sets that waited are measured again. If they
wait again, they are left out, unless too few others remain. Other doubts come from quality: repeats that disagree, a
machine whose speed varies, predictions that do not rank held-out sets.
"""

from collections.abc import Sequence
from pathlib import Path

from rowwise.planning.calibrate.samples import SetSample

SCHEDULED = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, nanoseconds waiting for one, turns
MAX_WAITED = 0.05  # fraction of its time that an undisturbed measurement may wait
MAX_DISTURBED = 0.5  # fraction of the sets
MIN_TAU, MAX_ERROR, MAX_NOISE, MAX_DRIFT = 0.8, 0.25, 0.25, 0.25


def waited_s(counters: Path = SCHEDULED) -> float:
    """Seconds that this thread has waited for a processor since it began; 0 if the system reports none."""
    try:
        return int(counters.read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def select_undisturbed(sets: Sequence[SetSample], fewest: int) -> list[SetSample]:
    """The sets that hardly waited for a processor, if they are enough to learn from; else all."""
    undisturbed = [sample for sample in sets if sample.waited <= MAX_WAITED]
    return undisturbed if len(undisturbed) >= max(fewest, (1 - MAX_DISTURBED) * len(sets)) else list(sets)


def find_doubts(*, disturbed: float, tau: float, error: float, noise: float, drift: float) -> tuple[str, ...]:
    """Reasons not to trust a profile, the strongest first.

    `disturbed` is the fraction of training sets that waited for a processor; for the others see `ProfileQuality`.
    """
    conditions = (
        (disturbed > MAX_DISTURBED, f"other processes had the processors during {disturbed:.0%} of the measurements"),
        (noise > MAX_NOISE, f"a set that is measured twice differs by {noise:.0%}"),
        (drift > MAX_DRIFT, f"the machine's speed varied by {drift:.0%}"),
        (tau < MIN_TAU, f"rank correlation with sets held out is {tau:.2f}, less than {MIN_TAU}"),
        (error > MAX_ERROR, f"the error on sets held out is {error:.0%}, more than {MAX_ERROR:.0%}"),
    )
    return tuple(line for applies, line in conditions if applies)
