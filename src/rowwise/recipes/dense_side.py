"""The planner's input on the dense parameters of a recipe's model."""

import torch
from torch import nn

from rowwise.models.cost import activation_bytes
from rowwise.models.inference import autocast
from rowwise.planning.perf.dense_parallel import NO_ACTIVATIONS, ActivationBytes, DenseSide, DenseUnits
from rowwise.recipes.code import file_of
from rowwise.recipes.compose import make_small_model
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.tables.batch import Batch, Jagged
from rowwise.tables.spec import Pooling
from rowwise.train.dense_parallel import check_parameters, find_units, has_id_maps, unit_shapes
from rowwise.train.loss_settings import CoTeaching
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd

SAMPLES = 64  # samples of the measured forward


def dense_side_of(recipe: Recipe, model: nn.Module, activations: ActivationBytes = NO_ACTIVATIONS) -> DenseSide:
    """The dense side of a model whose dense parameters are not sharded yet."""
    units, own = unit_shapes(model)
    train, parallel = recipe.train, recipe.train.dense_parallel
    elastic = train.determinism == "elastic"
    second = isinstance(train.objective, CoTeaching)  # refuses `dense_parallel`
    can_shard = not elastic and not second and recipe.wire_types.has_exact_sums and all(own) and not has_id_maps(model)
    if parallel.kind != "replicate":
        check_parameters(model)
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
        passes=train.accumulate,
        can_shard=can_shard,
        can_recompute=not second and getattr(recipe.model, "norm", None) != "batch",
    )


def measure_activations(resolved: ResolvedRecipe) -> ActivationBytes:
    """Activation bytes of a forward of zeros, with tables of one row and one id per feature.

    Unknown for models that rank items, whose logits depend on the batch, lists of vectors, id maps and
    managed tables, elastic steps, and user code that does not take such samples.
    """
    recipe = resolved.recipe
    unsupported = any(table.id_map or table.managed or table.pooling is Pooling.SEQUENCE for table in resolved.tables)
    if unsupported or family_of(recipe.model).ranks_items or recipe.train.determinism == "elastic":
        return NO_ACTIVATIONS
    try:
        model = make_small_model(resolved)
        with autocast(recipe.train.device, recipe.train.precision):
            return ActivationBytes(*activation_bytes(model, made_up_samples(resolved), find_units(model)))
    except Exception:  # user code may raise anything for such samples
        if file_of(recipe.model) is not None:
            return NO_ACTIVATIONS
        raise


def made_up_samples(resolved: ResolvedRecipe) -> Batch:
    """A batch of zeros with one id per feature, for tables of one row."""
    features = [name for table in resolved.tables for name in table.feature_names]
    return Batch(
        dense_BF=torch.zeros(SAMPLES, len(resolved.columns.dense)),
        sparse=Jagged.from_lists({name: [[0]] * SAMPLES for name in features}),
        labels_BK=torch.zeros(SAMPLES, len(resolved.tasks)),
    )


def _state_slots(optimizer: DenseOptimizer) -> int:
    """Optimizer state values for each weight."""
    match optimizer:
        case DenseSgd(momentum=momentum):
            return 1 if momentum else 0
        case DenseAdagrad():
            return 1
        case DenseAdam():
            return 2
