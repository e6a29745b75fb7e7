"""Relearns the probe's vectors of ids: once without each fold of the samples, and once from all samples.

[Note: Folds] in `tables/ids/idmap.py` gives the reason. The probe was trained on all samples; its weights stay fixed,
except for rows of the tables to compress, which restart at 0. Each set of vectors takes one pass over the rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import nn

from rowwise.models.wide import ENDING
from rowwise.recipes.compose import make_model
from rowwise.recipes.recipe import Tables
from rowwise.recipes.resolved import ResolvedRecipe, make_batcher
from rowwise.tables.batch import Batch
from rowwise.tables.embedding import Embeddings
from rowwise.tables.ids.folds import assign_folds
from rowwise.tables.ids.methods import FoldedVectors
from rowwise.tables.row_optimizers import Sgd
from rowwise.train.objective import Clicks

FOLDS = 4
FROZEN = Sgd(lr=0.0)
Vectors = Any  # float32 [ids, d]
VectorsOf = Callable[[nn.Module, str], Vectors]


def refit(
    small: ResolvedRecipe,
    probe: nn.Module,
    names: Sequence[str],
    vectors_of: VectorsOf,
    report: Callable[[float], None],
) -> dict[str, tuple[Vectors, FoldedVectors]]:
    """The vectors of each table from all samples, and without each fold."""
    seed, features = small.recipe.seed, tuple(sparse.feature_name for sparse in small.columns.sparse)
    passes: list[dict[str, Vectors]] = []
    for fold in (None, *range(FOLDS)):
        model = _reset_model(small, probe, names)
        for done, batch in _batches_without(small, features, fold):
            _step(small, model, batch)
            report((len(passes) + done) / (1 + FOLDS))
        passes.append({name: vectors_of(model, name) for name in names})
    from_all, *without = passes
    return {
        name: (from_all[name], FoldedVectors(features=features, seed=seed, vectors=tuple(v[name] for v in without)))
        for name in names
    }


def _reset_model(small: ResolvedRecipe, probe: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of the probe with rows of these tables at 0 and everything else frozen."""
    tables = tuple(t if t.name in names else structs.replace(t, optimizer=FROZEN) for t in small.tables)
    model = make_model(replace(small, recipe=structs.replace(small.recipe, tables=Tables(list=tables))))
    reset = {*names, *(name + ENDING for name in names)}
    with torch.no_grad():
        for parameter, trained in zip(model.parameters(), probe.parameters(), strict=True):
            if parameter.requires_grad:  # parameters of tables do not
                parameter.copy_(trained).requires_grad_(False)
        for embeddings, trained in zip(_embeddings(model), _embeddings(probe), strict=True):
            for table in embeddings.tables:
                if table.name not in reset:
                    embeddings.table(table.name).copy_(trained.table(table.name))
    return model


def _embeddings(model: nn.Module) -> list[Embeddings]:
    return [module for module in model.modules() if isinstance(module, Embeddings)]


def _batches_without(small: ResolvedRecipe, features: Sequence[str], fold: int | None) -> Iterator[tuple[float, Batch]]:
    """Batches of one pass without the samples of a fold, each with the completed fraction of the pass."""
    batcher, splits = make_batcher(small, small.rows.train), max(1, len(small.rows.train.reader.splits()))
    epochs = small.recipe.train.epochs
    for batch in (batch for _ in range(epochs) for batch in batcher):
        position = batcher.state()
        done = min(1.0, (position.epoch + position.split / splits) / epochs)
        if fold is None:
            yield done, batch
            continue
        folds_B = assign_folds(batch.sparse, features, FOLDS, small.recipe.seed)
        kept_M = (folds_B != fold).nonzero().flatten()
        if len(kept_M):
            yield done, batch.of_samples(kept_M)


def _step(small: ResolvedRecipe, model: nn.Module, batch: Batch) -> None:
    """Update rows of the reset tables, and their weights in the wide part; all other tables have learning rate 0."""
    Clicks(model, small.recipe.train.task_weights)(batch.to(small.recipe.train.device)).loss.backward()
    for embeddings in _embeddings(model):
        embeddings.update()
