"""Learns the probe's vectors again, from all samples and without each fold: [Note: Folds] in `hashing/idmap.py`.

The probe has seen all samples. Its weights stay fixed, except for rows of the tables to compress, which restart at 0.
Takes one pass over the rows for each fold, and one for all samples.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from rowwise.batch import Batch
from rowwise.embedding import Embeddings
from rowwise.hashing.folds import assign_folds
from rowwise.hashing.methods import FoldedVectors
from rowwise.models.wide import ENDING
from rowwise.recipes.compose import ResolvedRecipe, make_batcher, make_model
from rowwise.recipes.recipe import Tables
from rowwise.row_optimizers import Sgd
from rowwise.train.objective import Clicks

FOLDS = 4
FROZEN = Sgd(lr=0.0)
Vectors = Any  # float32 [ids, d]
VectorsOf = Callable[[nn.Module, str], Vectors]


def refit(
    small: ResolvedRecipe, probe: nn.Module, names: Sequence[str], vectors_of: VectorsOf, tell: Callable[[float], None]
) -> dict[str, tuple[Vectors, FoldedVectors]]:
    """For each table the vectors from all samples, and those without each fold."""
    seed, features = small.recipe.seed, tuple(sparse.feature_name for sparse in small.columns.sparse)
    found: list[dict[str, Vectors]] = []
    for fold in (None, *range(FOLDS)):
        model = _reset_model(small, probe, names)
        batches = _batches(small, features, fold)
        for done, batch in batches:
            _step(small, model, batch)
            tell((len(found) + done) / (1 + FOLDS))
        found.append({name: vectors_of(model, name) for name in names})
    whole, *without = found
    return {
        name: (whole[name], FoldedVectors(features=features, seed=seed, vectors=tuple(one[name] for one in without)))
        for name in names
    }


def _reset_model(small: ResolvedRecipe, probe: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of the probe with rows of these tables at 0 and everything else frozen."""
    tables = tuple(t if t.name in names else structs.replace(t, optimizer=FROZEN) for t in small.tables)
    model = make_model(replace(small, recipe=structs.replace(small.recipe, tables=Tables(list=tables))))
    again = {*names, *(name + ENDING for name in names)}
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), probe.parameters(), strict=True):
            if mine.requires_grad:
                mine.copy_(theirs).requires_grad_(False)
        for mine, theirs in zip(_tables(model), _tables(probe), strict=True):
            for table in mine.tables:
                if table.name not in again:
                    mine.table(table.name).copy_(theirs.table(table.name))
    return model


def _tables(model: nn.Module) -> list[Embeddings]:
    return [module for module in model.modules() if isinstance(module, Embeddings)]


def _batches(small: ResolvedRecipe, features: Sequence[str], fold: int | None) -> Iterator[tuple[float, Batch]]:
    """Batches of one pass without the samples of a fold, each with the share of the pass that is done."""
    batcher, splits = make_batcher(small, small.parts.train), max(1, len(small.parts.train.reader.splits()))
    epochs = small.recipe.train.epochs
    for batch in (one for _ in range(epochs) for one in batcher):
        position = batcher.state()
        done = min(1.0, (position.epoch + position.split / splits) / epochs)
        if fold is None:
            yield done, batch
            continue
        folds_B = assign_folds(batch.sparse, features, FOLDS, small.recipe.seed)
        at_M = (folds_B != fold).nonzero().flatten()
        if len(at_M):
            yield done, _select_samples(batch, at_M)


def _select_samples(batch: Batch, at_M: Tensor) -> Batch:
    return Batch(
        dense_BF=batch.dense_BF[at_M],
        sparse=batch.sparse.expanded().of_samples(at_M),
        labels_BK=batch.labels_BK[at_M],
        weights_B=None if batch.weights_B is None else batch.weights_B[at_M],
    )


def _step(small: ResolvedRecipe, model: nn.Module, batch: Batch) -> None:
    """Update rows of the reset tables and their weights in the wide part; everything else has learning rate 0."""
    Clicks(model, small.recipe.train.task_weights)(batch.to(small.recipe.train.device)).loss.backward()
    for tables in _tables(model):
        tables.update()
