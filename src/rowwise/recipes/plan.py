"""The planner's input for a recipe: the tables of its model, built without memory for their rows.

Known limit: each feature counts as one id a sample, because the data is not read.
"""

from typing import NamedTuple

from msgspec import structs

from rowwise.perf.access import Access, Workload
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.place import step_samples, tables_of
from rowwise.recipes.recipe import Recipe, TwoTowerConfig, check_ranks
from rowwise.spec import Wire


class PlanInputs(NamedTuple):
    """Tables, global batch and wire of a recipe."""

    workloads: tuple[Workload, ...]
    batch: int  # global number of samples of a step
    wire: Wire


def plan_inputs(recipe: Recipe, world: int) -> PlanInputs:
    check_ranks(recipe, world)
    # The plan is for another machine, so this one may have no GPU.
    here = structs.replace(recipe, train=structs.replace(recipe.train, device="cpu"))
    resolved = resolve(here)
    two_towers = isinstance(resolved.recipe.model, TwoTowerConfig)  # whose tables are as the recipe lists them
    tables = resolved.tables if two_towers else tables_of(make_model(resolved, described=True))
    return PlanInputs(
        workloads=tuple(Workload(table=t, access=Access(pooling=float(len(t.feature_names)))) for t in tables),
        batch=step_samples(recipe),
        wire=recipe.wire,
    )
