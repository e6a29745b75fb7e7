"""The tables that a recipe trains, as a planner asks for them: without training, and without memory for their rows.

Known limits: how often rows are asked for, which the data would have to be read for; each feature counts as one id a
sample.
"""

from typing import NamedTuple

from msgspec import structs

from rowwise.perf.access import Access, Workload
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.place import step_samples, tables_of
from rowwise.recipes.recipe import Recipe, TwoTowerConfig, check_ranks
from rowwise.spec import Wire


class PlanInputs(NamedTuple):
    """The tables, batch and wire of a recipe, as planning needs them."""

    workloads: tuple[Workload, ...]
    batch: int  # samples of a step, of all ranks together
    wire: Wire


def plan_inputs(recipe: Recipe, world: int) -> PlanInputs:
    """The tables and the batch of a recipe on so many ranks."""
    check_ranks(recipe, world)
    # Plans are made for machines that this one is not, and may be without their devices.
    here = structs.replace(recipe, train=structs.replace(recipe.train, device="cpu"))
    resolved = resolve(here)
    two_towers = isinstance(resolved.recipe.model, TwoTowerConfig)  # whose tables are as the recipe lists them
    tables = resolved.tables if two_towers else tables_of(make_model(resolved, described=True))
    return PlanInputs(
        workloads=tuple(Workload(table=t, access=Access(pooling=float(len(t.feature_names)))) for t in tables),
        batch=step_samples(recipe),
        wire=recipe.wire,
    )
