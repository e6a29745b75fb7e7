"""The planner's input for a recipe: the tables of its model, built without memory for their rows.

Known limit: access is assumed uniform, because the data is not read (`workloads_of`).
"""

from msgspec import structs

from rowwise.planning.perf.hardware import Machine
from rowwise.planning.planner.inputs import PlanInputs
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.dense_side import dense_side_of, measure_activations
from rowwise.recipes.recipe import Recipe, check_ranks
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.sharding import step_samples, tables_of, workloads_of
from rowwise.recipes.wires import decide_wire
from rowwise.tables.spec import Topology
from rowwise.train.dense_parallel import shards_of


def plan_inputs(recipe: Recipe, machine: Machine) -> PlanInputs:
    return resolve_for(recipe, machine)[1]


def resolve_for(recipe: Recipe, machine: Machine) -> tuple[ResolvedRecipe, PlanInputs]:
    """The recipe resolved for the ranks of a machine, and the planner's input."""
    world = machine.topology.world
    check_ranks(recipe, world)
    # The plan is for another machine, so this one may have no GPU.
    on_cpu = structs.replace(recipe, train=structs.replace(recipe.train, device="cpu"))
    resolved = decide_wire(resolve(on_cpu), machine.topology, hardware=machine.hardware)
    model = make_model(resolved, on_meta=True, reads=False)
    shards_of(recipe.train.dense_parallel, Topology(devices=world))  # raises for a number that does not divide ranks
    dense = dense_side_of(recipe, model, measure_activations(resolved))
    workloads = workloads_of(resolved.recipe, tables_of(model), world)
    return resolved, PlanInputs(workloads, step_samples(recipe), resolved.recipe.wire_types, dense)
