"""Decides where tables live: specifications in, a `Plan` out. Pure, and without any tensor library.

Names are loaded when first used.
"""

from typing import TYPE_CHECKING

from rowwise.lazy import names_of

if TYPE_CHECKING:
    from rowwise.planner.layouts import column_wise as column_wise
    from rowwise.planner.layouts import grid as grid
    from rowwise.planner.layouts import replicated as replicated
    from rowwise.planner.layouts import row_wise as row_wise
    from rowwise.planner.layouts import table_column_wise as table_column_wise
    from rowwise.planner.layouts import table_row_wise as table_row_wise
    from rowwise.planner.layouts import table_wise as table_wise
    from rowwise.planner.simple import simple_plan as simple_plan

_LAYOUTS = (
    "column_wise", "grid", "replicated", "row_wise", "table_column_wise", "table_row_wise", "table_wise",
)  # fmt: skip
_HOMES = {"layouts": _LAYOUTS, "simple": ("simple_plan",)}
__all__, __getattr__ = names_of(__name__, _HOMES)
