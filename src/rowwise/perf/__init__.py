"""Predicts the cost of a step before it is run: pure models of machines, without torch.

Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.perf.access import Access as Access
    from rowwise.perf.access import Workload as Workload
    from rowwise.perf.cost import CostModel as CostModel
    from rowwise.perf.cost import Phi as Phi
    from rowwise.perf.hardware import Hardware as Hardware
    from rowwise.perf.hardware import hardware_named as hardware_named
    from rowwise.perf.learned import LearnedModel as LearnedModel
    from rowwise.perf.learned import model_of as model_of
    from rowwise.perf.roofline import Roofline as Roofline
    from rowwise.perf.torchrec import TorchRecModel as TorchRecModel

_HOMES = {
    "access": ("Access", "Workload"),
    "cost": ("CostModel", "Phi"),
    "hardware": ("Hardware", "hardware_named"),
    "learned": ("LearnedModel", "model_of"),
    "roofline": ("Roofline",),
    "torchrec": ("TorchRecModel",),
}
__all__, __getattr__ = export_lazily(__name__, _HOMES)
