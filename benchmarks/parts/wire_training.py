"""A recipe trained by ranks that are threads, for what narrower numbers between them cost in quality."""

import copy
from itertools import pairwise

from torch import nn

from parts.recipe_job import job_of
from rowwise import Batch, Topology
from rowwise.parallel.comm.interface import Comm
from rowwise.recipes.compose import make_evaluator, make_model, make_settings
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.tables.ops import jagged
from rowwise.tables.spec import FarType, Wire
from rowwise.train.breakdown import Breakdown
from rowwise.train.dense import DenseGradients
from rowwise.train.two_level import TwoLevelSum


def train(resolved: ResolvedRecipe, wire: Wire, world: Topology, *, feedback: bool = True) -> dict[str, float]:
    """NE and AUC of the test rows, with the epoch that was best on validation rows where there are such.

    Without `feedback`, sums in two levels forget what they round, also where a recipe may not ask for that.
    """
    from rowwise.parallel.comm.thread import run_threads

    # Made before there are threads: initial weights are drawn from the one generator that torch has.
    models = [make_model(resolved)]
    models += [copy.deepcopy(models[0]) for _ in range(world.world - 1)]
    return run_threads(world, lambda comm: train_rank(resolved, models[comm.rank], wire, comm, feedback=feedback))[0]


def train_rank(
    resolved: ResolvedRecipe, model: nn.Module, wire: Wire, comm: Comm, *, feedback: bool
) -> dict[str, float]:
    """As `Trainer` does, without its folder; every rank evaluates all rows, as a lookup takes all ranks."""
    from parts.shard_rowwise import plan_of
    from rowwise.parallel.shard.apply import shard
    from rowwise.train.step import StepContext, step

    model = shard(model, plan_of(resolved.tables, "row-wise", comm.topology), comm, wire=wire)
    job, settings = job_of(resolved, model), make_settings(resolved.recipe)
    work = StepContext.create(model, job.objective, settings.train, Breakdown(), comm=comm, wire=wire)
    if not feedback and wire.far is not None:
        assert isinstance(work.gradients, DenseGradients)
        work.gradients.coded = TwoLevelSum(comm, FarType.parse(wire.far), feedback=False)
    test = make_evaluator(resolved, model, resolved.rows.test)
    batcher, number, worse = job.batches(None), 0, 0
    best: float | None = None
    found: dict[str, float] = {}
    for _ in range(settings.train.epochs):
        for batch in batcher:
            number += 1
            step(work, [share_of(batch, comm)], number)
        value = None if job.evaluate is None else job.evaluate().tasks[job.tasks[0]][settings.evaluate.metric]
        if value is not None and not settings.evaluate.is_better(value, best):
            worse += 1
            if worse == settings.evaluate.patience:
                break
            continue
        best, worse = value, 0
        scores = test().tasks[job.tasks[0]]
        found = {name: scores[name] for name in ("ne", "auc")}
    return {**found, "steps": number}


def share_of(batch: Batch, comm: Comm) -> Batch:
    """One rank's part of the samples."""
    world, size = len(comm.ranks), len(batch.labels_BK)
    bounds = [size * w // world for w in range(world + 1)]
    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    sparse = jagged.split(batch.sparse, [end - begin for begin, end in pairwise(bounds)])[comm.rank]
    weights_B = None if batch.weights_B is None else batch.weights_B[mine]
    return Batch(dense_BF=batch.dense_BF[mine], sparse=sparse, labels_BK=batch.labels_BK[mine], weights_B=weights_B)
