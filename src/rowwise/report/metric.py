"""What is known of a metric by its name: how it is called, which way is better, what it would be for no model at all.

A metric that is not known is shown under its own name and never marked as better or worse.
"""

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The name, unit and direction of a metric."""

    title: str
    better: Literal["lower", "higher", "one", "unknown"] = "unknown"
    level: float | None = None  # a value worth a line of its own
    level_name: str = ""

    @property
    def hint(self) -> str:
        match self.better:
            case "unknown":
                return ""
            case "one":
                return "1 is right"
            case "lower" | "higher":
                return f"{self.better} is better"

    def cost(self, value: float) -> float | None:
        """The less, the better; None where nobody can say."""
        match self.better:
            case "lower":
                return value
            case "higher":
                return -value
            case "one":
                return abs(value - 1)
            case "unknown":
                return None


FIRST = ("auc", "ne", "loss", "calibration")  # what people look for
HIGHER = re.compile(r"(recall|ndcg|hit|hit_rate|precision|map|mrr|accuracy|r2)(@\d+)?")


def metric(name: str) -> Metric:
    """The metric of a name."""
    match name:
        case "loss":
            return Metric(title="Log loss", better="lower")
        case "ne":
            return Metric(title="Normalised entropy", better="lower", level=1.0, level_name="base rate alone")
        case "auc":
            return Metric(title="AUC", better="higher", level=0.5, level_name="chance")
        case "calibration":
            return Metric(title="Calibration", better="one", level=1.0)
        case "base_rate":
            return Metric(title="Base rate")
        case "mse" | "rmse" | "mae":
            return Metric(title=name.upper(), better="lower")
        case _ if HIGHER.fullmatch(name):
            return Metric(title=name.replace("ndcg", "NDCG").replace("mrr", "MRR"), better="higher")
        case _:
            return Metric(title=name or "(no name)")


def order(name: str) -> int:
    """Known metrics first; the base rate, which is the data's and not the model's, last."""
    if name in FIRST:
        return FIRST.index(name)
    return len(FIRST) + (name == "base_rate")
