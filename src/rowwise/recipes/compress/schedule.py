"""Chooses the trials to run: first every method at about the target size, then the best methods at other sizes.

A trial is a full training, so only the best methods at the target size are tried at others. They always include a
learned method, as these depend most on the size, and one that is not learned.
"""

import math
from collections.abc import Mapping, Sequence

from rowwise.tables.spec import Value

STEPS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # ratios to try, relative to the target
MIN_RATIO = 1.5
BEST = 3  # methods to try at other sizes
SEEDS = 3  # trainings of the full model, to measure its noise
LEARNED = "learned"  # prefix of learned methods


class TrialSpec(Value, frozen=True):
    """A trial: a table compressed by a method to 1 / ratio of its bytes; without a table, the full model."""

    table: str = ""
    method: str = ""
    ratio: float = 1.0
    seed: int = 0


def ratios_around(target: float) -> tuple[float, ...]:
    """The ratios to try, the target first.

    Rounded to two digits, so that similar commands share trials, and up, so that a single table fits the budget.
    """
    centre = _round_up(max(target, MIN_RATIO))
    others = (_round_up(centre * step) for step in STEPS)
    return (centre, *(ratio for ratio in dict.fromkeys(others) if ratio >= MIN_RATIO and ratio != centre))


def full_model_trials(seed: int) -> list[TrialSpec]:
    return [TrialSpec(seed=seed + k) for k in range(SEEDS)]


def wanted_size_trials(tables: Sequence[str], methods: Sequence[str], ratio: float, seed: int) -> list[TrialSpec]:
    return [TrialSpec(table=table, method=method, ratio=ratio, seed=seed) for table in tables for method in methods]


def other_size_trials(losses: Mapping[str, Mapping[str, float]], ratios: Sequence[float], seed: int) -> list[TrialSpec]:
    """The best methods of each table at other ratios, chosen by `losses` at the target ratio, by table and method."""
    return [
        TrialSpec(table=table, method=method, ratio=ratio, seed=seed)
        for table, by_method in losses.items()
        for ratio in ratios
        for method in best_methods(by_method)
    ]


def best_methods(losses: Mapping[str, float], count: int = BEST) -> tuple[str, ...]:
    """The methods of least loss, with at least one learned method and one other if `losses` has both kinds."""
    ranked = sorted(losses, key=lambda method: (losses[method], method))
    learned = [method for method in ranked if method.startswith(LEARNED)]
    others = [method for method in ranked if method not in learned]
    first = [*learned[:1], *others[:1]]
    return tuple([*first, *(method for method in ranked if method not in first)][:count])


def _round_up(ratio: float) -> float:
    digit = 10.0 ** (math.floor(math.log10(ratio)) - 1)
    return float(f"{math.ceil(ratio / digit - 1e-9) * digit:.6g}")
