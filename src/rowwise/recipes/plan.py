"""The planner's input for a recipe: the tables of its model, built without memory for their rows.

Known limit: access is assumed uniform, by one id for each feature of a sample, because the data is not read.
"""

from typing import NamedTuple

from msgspec import structs

from rowwise.perf.access import Workload
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.disk_tables import uniform_workloads
from rowwise.recipes.recipe import Recipe, check_ranks
from rowwise.recipes.sharding import step_samples, tables_of
from rowwise.spec import Wire


class PlanInputs(NamedTuple):
    """Tables, global batch and wire of a recipe."""

    workloads: tuple[Workload, ...]
    batch: int  # global number of samples of a step
    wire: Wire


def plan_inputs(recipe: Recipe, world: int) -> PlanInputs:
    check_ranks(recipe, world)
    # The plan is for another machine, so this one may have no GPU.
    on_cpu = structs.replace(recipe, train=structs.replace(recipe.train, device="cpu"))
    resolved = resolve(on_cpu)
    tables = tables_of(make_model(resolved, on_meta=True))
    return PlanInputs(workloads=uniform_workloads(tables), batch=step_samples(recipe), wire=recipe.wire)
