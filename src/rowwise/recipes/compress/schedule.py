"""Which trials there are, and in which order: first every method at about the wanted size, then the best at others.

Pure. A trial costs a training run, so methods that are behind at the wanted size are not tried at other sizes. Among
those that go on is always one that learns, as these change most with the size, and one that does not, to compare with.
"""

import math
from collections.abc import Mapping, Sequence

from rowwise.spec import Value

STEPS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # sizes tried, around the wanted ratio
LEAST_RATIO = 1.5
BEST = 3
SEEDS = 3  # of the whole model: how much it differs by itself
LEARNED = "learned"


class TrialSpec(Value, frozen=True):
    """A trial: a table by a method, in its bytes over `ratio`; without a table, the model as it is."""

    table: str = ""
    method: str = ""
    ratio: float = 1.0
    seed: int = 0


def ratios_around(wanted: float) -> tuple[float, ...]:
    """The ratios to try, the wanted one first; to two digits, so that commands that ask for the like share trials.

    Rounded up: a single table by the wanted one fits its budget.
    """
    centre = _round(max(wanted, LEAST_RATIO))
    others = (_round(centre * step) for step in STEPS)
    return (centre, *(ratio for ratio in dict.fromkeys(others) if ratio >= LEAST_RATIO and ratio != centre))


def full_trials(seed: int) -> list[TrialSpec]:
    """The model as it is, by several seeds."""
    return [TrialSpec(seed=seed + k) for k in range(SEEDS)]


def trials_at_goal(tables: Sequence[str], methods: Sequence[str], ratio: float, seed: int) -> list[TrialSpec]:
    """Every method, at one size."""
    return [TrialSpec(table=table, method=method, ratio=ratio, seed=seed) for table in tables for method in methods]


def trials_at_other_sizes(
    losses: Mapping[str, Mapping[str, float]], ratios: Sequence[float], seed: int
) -> list[TrialSpec]:
    """The best methods of each table at other sizes; `losses`: at the wanted size, by table and method."""
    return [
        TrialSpec(table=table, method=method, ratio=ratio, seed=seed)
        for table, by_method in losses.items()
        for ratio in ratios
        for method in best_of(by_method)
    ]


def best_of(losses: Mapping[str, float], count: int = BEST) -> tuple[str, ...]:
    """The methods that lose least, with one that learns and one that does not among them, if there are."""
    ranked = sorted(losses, key=lambda method: (losses[method], method))
    learned = [method for method in ranked if method.startswith(LEARNED)]
    others = [method for method in ranked if method not in learned]
    firm = [*learned[:1], *others[:1]]
    return tuple([*firm, *(method for method in ranked if method not in firm)][:count])


def _round(ratio: float) -> float:
    digit = 10.0 ** (math.floor(math.log10(ratio)) - 1)
    return float(f"{math.ceil(ratio / digit - 1e-9) * digit:.6g}")
