"""The planner's input for a recipe: the tables of its model, built without memory for their rows.

Known limit: access is assumed uniform, by one id for each feature of a sample or by full lists of a sequence model,
because the data is not read.
"""

from msgspec import structs

from rowwise.perf.hardware import Machine
from rowwise.planner.inputs import PlanInputs
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.dense_side import dense_side_of, measure_activations
from rowwise.recipes.disk_tables import uniform_workloads
from rowwise.recipes.recipe import Recipe, check_ranks
from rowwise.recipes.sharding import ids_of_feature, step_samples, tables_of
from rowwise.recipes.wires import decide_wire
from rowwise.spec import Topology
from rowwise.train.dense_parallel import shards_of


def plan_inputs(recipe: Recipe, machine: Machine) -> PlanInputs:
    world = machine.topology.world
    check_ranks(recipe, world)
    # The plan is for another machine, so this one may have no GPU.
    on_cpu = structs.replace(recipe, train=structs.replace(recipe.train, device="cpu"))
    resolved = decide_wire(resolve(on_cpu), machine.topology, hardware=machine.hardware)
    model = make_model(resolved, on_meta=True, reads=False)
    shards_of(recipe.train.dense_parallel, Topology(devices=world))  # raises for a number that does not divide ranks
    dense = dense_side_of(recipe, model, measure_activations(resolved))
    tables = tables_of(model)
    workloads = uniform_workloads(tables, ids_of_feature(resolved.recipe, tables, world))
    return PlanInputs(workloads, step_samples(recipe), resolved.recipe.wire_types, dense)
