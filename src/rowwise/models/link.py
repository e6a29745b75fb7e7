"""From the outputs of a model to amounts in the unit of its labels. Needs no torch to be imported."""

import math
from typing import TYPE_CHECKING, Literal

from rowwise.base.errors import SpecError
from rowwise.tables.spec import Value

if TYPE_CHECKING:
    from torch import Tensor


class AmountLink(Value, frozen=True):
    """Maps a model's outputs z to amounts, label by label: offset + unit * z, or unit * exp(z)."""

    kind: Literal["linear", "exp"]
    offset: tuple[float, ...]  # one per label
    unit: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = (*self.offset, *self.unit)
        if len(self.offset) != len(self.unit) or not all(map(math.isfinite, numbers)) or min(self.unit, default=1) <= 0:
            raise SpecError(
                f"amounts: offset={list(self.offset)}, unit={list(self.unit)}",
                "finite numbers, one for each label, and units above 0",
            )

    def check(self, labels: int) -> None:
        if len(self.unit) != labels:
            raise SpecError(f"amounts of {len(self.unit)} labels, and {labels} outputs", "one for each label")

    def targets(self, labels_BK: "Tensor") -> "Tensor":
        """Training targets [B, K]: (label - offset) / unit."""
        self.check(labels_BK.shape[1])
        return (labels_BK - labels_BK.new_tensor(self.offset)) / labels_BK.new_tensor(self.unit)

    def amounts(self, outputs_BK: "Tensor") -> "Tensor":
        """Predictions [B, K] in the unit of the labels."""
        self.check(outputs_BK.shape[1])
        unit_K = outputs_BK.new_tensor(self.unit)
        return (
            unit_K * outputs_BK.exp()
            if self.kind == "exp"
            else outputs_BK.new_tensor(self.offset) + unit_K * outputs_BK
        )
