"""Plans where tables live: tables, statistics and a machine in, a `Plan` out. Pure: no tensors, no processes.

Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.planning.planner.constraints import Constraints as Constraints
    from rowwise.planning.planner.explain import explain as explain
    from rowwise.planning.planner.export import torchrec_json as torchrec_json
    from rowwise.planning.planner.heuristic import simple_plan as simple_plan
    from rowwise.planning.planner.infeasible import InfeasibleError as InfeasibleError
    from rowwise.planning.planner.layouts import column_wise as column_wise
    from rowwise.planning.planner.layouts import grid as grid
    from rowwise.planning.planner.layouts import replicated as replicated
    from rowwise.planning.planner.layouts import row_wise as row_wise
    from rowwise.planning.planner.layouts import table_row_wise as table_row_wise
    from rowwise.planning.planner.layouts import table_wise as table_wise
    from rowwise.planning.planner.machines import machine_named as machine_named
    from rowwise.planning.planner.pipeline import PlanResult as PlanResult
    from rowwise.planning.planner.pipeline import make_plan as make_plan
    from rowwise.planning.planner.problem import PlanRequest as PlanRequest
    from rowwise.planning.planner.replan import replan as replan

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
