"""Predicts the cost of a step before it is run: pure models of machines, without torch.

Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.planning.perf.access import Access as Access
    from rowwise.planning.perf.access import Workload as Workload
    from rowwise.planning.perf.cost import CostModel as CostModel
    from rowwise.planning.perf.cost import Phi as Phi
    from rowwise.planning.perf.hardware import Hardware as Hardware
    from rowwise.planning.perf.hardware import hardware_named as hardware_named
    from rowwise.planning.perf.learned import LearnedModel as LearnedModel
    from rowwise.planning.perf.learned import model_of as model_of
    from rowwise.planning.perf.roofline import Roofline as Roofline
    from rowwise.planning.perf.torchrec import TorchRecModel as TorchRecModel

_HOMES = {
    "access": ("Access", "Workload"),
    "cost": ("CostModel", "Phi"),
    "hardware": ("Hardware", "hardware_named"),
    "learned": ("LearnedModel", "model_of"),
    "roofline": ("Roofline",),
    "torchrec": ("TorchRecModel",),
}
__all__, __getattr__ = export_lazily(__name__, _HOMES)
