"""Plans where tables live: tables, statistics and a machine in, a `Plan` out. Pure: no tensors, no processes.

Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.planner.constraints import Constraints as Constraints
    from rowwise.planner.explain import explain as explain
    from rowwise.planner.export import torchrec_json as torchrec_json
    from rowwise.planner.heuristic import simple_plan as simple_plan
    from rowwise.planner.infeasible import InfeasibleError as InfeasibleError
    from rowwise.planner.layouts import column_wise as column_wise
    from rowwise.planner.layouts import grid as grid
    from rowwise.planner.layouts import replicated as replicated
    from rowwise.planner.layouts import row_wise as row_wise
    from rowwise.planner.layouts import table_row_wise as table_row_wise
    from rowwise.planner.layouts import table_wise as table_wise
    from rowwise.planner.machines import machine_named as machine_named
    from rowwise.planner.pipeline import PlanResult as PlanResult
    from rowwise.planner.pipeline import make_plan as make_plan
    from rowwise.planner.problem import PlanRequest as PlanRequest
    from rowwise.planner.replan import replan as replan

_LAYOUTS = (
    "column_wise", "grid", "replicated", "row_wise", "table_row_wise", "table_wise",
)  # fmt: skip
_HOMES = {
    "constraints": ("Constraints",),
    "explain": ("explain",),
    "export": ("torchrec_json",),
    "infeasible": ("InfeasibleError",),
    "layouts": _LAYOUTS,
    "machines": ("machine_named",),
    "pipeline": ("PlanResult", "make_plan"),
    "problem": ("PlanRequest",),
    "replan": ("replan",),
    "heuristic": ("simple_plan",),
}
__all__, __getattr__ = export_lazily(__name__, _HOMES)
