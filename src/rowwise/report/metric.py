"""Facts of metrics by name: title, better direction, and baseline level.

The title of an unknown metric is its name; its values are never marked as better or worse.
"""

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The facts of a metric."""

    title: str
    better: Literal["lower", "higher", "one", "unknown"] = "unknown"
    level: float | None = None  # baseline, drawn as a horizontal line
    level_name: str = ""
    meaning: str = ""

    @property
    def hint(self) -> str:
        match self.better:
            case "unknown":
                return self.meaning
            case "one":
                direction = "1 is right"
            case "lower" | "higher":
                direction = f"{self.better} is better"
        return f"{self.meaning}; {direction}" if self.meaning else direction

    def cost(self, value: float) -> float | None:
        """A value whose minimum is best; None for unknown metrics."""
        match self.better:
            case "lower":
                return value
            case "higher":
                return -value
            case "one":
                return abs(value - 1)
            case "unknown":
                return None


FIRST_METRICS = ("auc", "ne", "rmse", "poisson_deviance", "loss", "calibration")  # the order of the first metrics
HIGHER_IS_BETTER = re.compile(r"(recall|ndcg|hit|hit_rate|precision|map|mrr|accuracy|r2)(@\d+)?")


def find_metric(name: str) -> Metric:
    match name:
        case "loss":
            return Metric(title="Loss", better="lower")
        case "ne":
            return Metric(
                title="Normalised entropy (NE)",
                better="lower",
                level=1.0,
                level_name="base rate alone",
                meaning="log loss over that of always predicting the average",
            )
        case "auc":
            return Metric(
                title="AUC",
                better="higher",
                level=0.5,
                level_name="chance",
                meaning="how often a positive ranks above a negative",
            )
        case "calibration":
            return Metric(title="Calibration", better="one", level=1.0, meaning="predicted over observed positives")
        case "base_rate":
            return Metric(title="Base rate", meaning="share of positives in the rows")
        case "poisson_deviance":
            return Metric(title="Poisson deviance", better="lower")
        case "mse" | "rmse" | "mae":
            return Metric(title=name.upper(), better="lower")
        case _ if HIGHER_IS_BETTER.fullmatch(name):
            return Metric(title=name.replace("ndcg", "NDCG").replace("mrr", "MRR"), better="higher")
        case _:
            return Metric(title=name or "(no name)")


def metric_position(name: str) -> int:
    """The sort key of a metric: main metrics first, the base rate last."""
    if name in FIRST_METRICS:
        return FIRST_METRICS.index(name)
    return len(FIRST_METRICS) + (name == "base_rate")
