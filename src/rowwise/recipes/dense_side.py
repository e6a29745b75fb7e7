"""The dense parameters of a recipe's model as the planner counts them."""

from dataclasses import replace

import torch
from msgspec import structs
from torch import nn

from rowwise.batch import Batch, Jagged
from rowwise.models.cost import activation_bytes
from rowwise.perf.dense_parallel import NO_ACTIVATIONS, ActivationBytes, DenseSide, DenseUnits
from rowwise.recipes.compose import ResolvedRecipe, make_model
from rowwise.recipes.model_configs import RankingModel
from rowwise.recipes.recipe import Tables
from rowwise.train.dense_parallel import find_units, unit_shapes
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd, Training
from rowwise.train.step import autocast

SAMPLES = 64  # of the forward that is measured


def dense_side_of(train: Training, model: nn.Module, activations: ActivationBytes = NO_ACTIVATIONS) -> DenseSide:
    """The dense side of a model whose dense parameters are not sharded yet."""
    units, own = unit_shapes(model)
    parallel = train.dense_parallel
    return DenseSide(
        shapes=DenseUnits(tuple(map(tuple, units)), tuple(own)),
        state_slots=_state_slots(train.optimizer),
        kind=parallel.kind,
        shards=parallel.shards,
        reshard=parallel.reshard,
        bf16=parallel.params == "bf16",
        prefetch=parallel.prefetch,
        recompute=parallel.recompute,
        activations=activations,
    )


def measure_activations(resolved: ResolvedRecipe) -> ActivationBytes:
    """Those of a forward of made-up samples, with tables of one row.

    They are not known for id maps, managed tables and models that rank items, whose logits depend on the batch.
    """
    recipe, tables = resolved.recipe, resolved.tables
    if isinstance(recipe.model, RankingModel) or any(table.id_map or table.managed for table in tables):
        return NO_ACTIVATIONS
    one_row = Tables(list=tuple(structs.replace(table, rows=1) for table in tables))
    model = make_model(replace(resolved, recipe=structs.replace(recipe, tables=one_row)))
    features = [name for table in tables for name in table.feature_names]
    batch = Batch(
        dense_BF=torch.zeros(SAMPLES, len(resolved.columns.dense)),
        sparse=Jagged.from_lists({name: [[0]] * SAMPLES for name in features}),
        labels_BK=torch.zeros(SAMPLES, len(resolved.tasks)),
    )
    with autocast(recipe.train):
        return ActivationBytes(*activation_bytes(model, batch, find_units(model)))


def _state_slots(optimizer: DenseOptimizer) -> int:
    """Optimizer state values for each weight."""
    match optimizer:
        case DenseSgd(momentum=momentum):
            return 1 if momentum else 0
        case DenseAdagrad():
            return 1
        case DenseAdam():
            return 2
