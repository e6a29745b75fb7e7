"""What a trainer trains on for a recipe, in this process: without the workers and the folder that a run has."""

from torch import nn

from rowwise.recipes.compose import make_job
from rowwise.recipes.resolved import ResolvedRecipe, make_batcher
from rowwise.train.trainer import TrainingJob


def job_of(resolved: ResolvedRecipe, model: nn.Module) -> TrainingJob:
    return make_job(resolved, model, lambda position: make_batcher(resolved, resolved.rows.train, position))
