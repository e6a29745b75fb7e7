"""Counts ids, and learns a vector for each with the probe: the recipe's model with dim 4 and layers half as wide.

Rows of the tables to compress start at 0, so a vector has no random part. Memory per id: 8 bytes for its count, and 4
floats for all samples and for each fold of them (see `refit`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from rowwise.base.errors import DataError, SpecError
from rowwise.base.textfile import open_regular
from rowwise.models.wide import ENDING
from rowwise.recipes.compose import make_job, make_model
from rowwise.recipes.compress import refit
from rowwise.recipes.compress.trials import done_fraction
from rowwise.recipes.model_configs import MLP_WIDTHS, Model, layers_of
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.recipe import Tables
from rowwise.recipes.resolved import ResolvedRecipe, make_batcher
from rowwise.tables.batch import Jagged
from rowwise.tables.embedding import Embeddings
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ids.methods import FoldedVectors, IdHistory
from rowwise.tables.spec import Constant, RowType, Table, Value
from rowwise.train.settings import Saving
from rowwise.train.trainer import Settings, Trainer

DIM = 4
COUNTS, VECTORS, FOLDS = "counts/", "vectors/", "folds"
REFIT_PASSES = 1 + refit.FOLDS  # over the rows, after training
Histories = dict[str, IdHistory]


def probe(resolved: ResolvedRecipe, names: Sequence[str], path: Path, report: Callable[[float], None]) -> Histories:
    """Counts and vectors of the tables' ids: from the file if it exists, else learned and written to it."""
    if path.exists():
        return read_histories(path, resolved.tables, names)
    histories = learn(resolved, names, report)
    _write(path, histories)
    return histories


def learn(resolved: ResolvedRecipe, names: Sequence[str], report: Callable[[float], None]) -> Histories:
    """Train the small model for one epoch and count ids meanwhile, then refit the vectors of the tables."""
    small = shrink_recipe(resolved, names)
    model = make_model(small)
    counts = _count_ids(model, [table for table in small.tables if table.name in names])
    job = make_job(small, model, lambda position: make_batcher(small, small.rows.train, position))
    settings = Settings(train=small.recipe.train, save=Saving())
    training = 1 / (REFIT_PASSES + 1)  # fraction of the work
    Trainer(job, settings, on_step=lambda display: report(training * done_fraction(display))).run()
    unseen = [name for name in names if not int(counts[name].sum())]
    if unseen:
        raise DataError(
            f"table {unseen[0]!r}: the history has none of its ids",
            "a history with some of them, or a recipe without the table",
        )
    vectors = refit.refit(small, model, names, learned_vectors, lambda done: report(training + (1 - training) * done))
    return {
        name: IdHistory(counts_N=counts[name].numpy(), vectors_ND=from_all, folded=folded)
        for name, (from_all, folded) in vectors.items()
    }


def shrink_recipe(resolved: ResolvedRecipe, names: Sequence[str]) -> ResolvedRecipe:
    """The recipe with small tables and layers, for one epoch."""
    recipe = resolved.recipe
    plain = {"dim": DIM, "row_type": RowType.FP32, "column_group": None}
    zero = plain | {"init": Constant(0.0)}
    tables = tuple(structs.replace(table, **(zero if table.name in names else plain)) for table in resolved.tables)
    train = structs.replace(recipe.train, epochs=1, steps=None)
    changed = structs.replace(
        recipe, tables=Tables(list=tables), model=_halve_layers(resolved.parts.model), train=train
    )
    return replace(resolved, recipe=changed, rows=replace(resolved.rows, valid=None))


def read_histories(path: Path, tables: Sequence[Table], names: Sequence[str]) -> Histories:
    """Read a file that `probe` wrote."""
    rows = {table.name: table.rows for table in tables}
    try:
        open_regular(path).close()  # raises for a FIFO instead of blocking
        with safe_open(path, "numpy") as file:
            folds = msgspec.json.decode((file.metadata() or {}).get(FOLDS, "{}"), type=_Folds)
            histories = {name: _read_history(file, name, folds) for name in names}
    except (SafetensorError, OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}", hint="delete the file to rebuild it") from None
    for name, history in histories.items():
        if len(history.counts_N) != rows[name]:
            raise DataError(
                f"{path}: {len(history.counts_N):,} ids of table {name!r}, which has {rows[name]:,}",
                hint="delete the file to rebuild it",
            )
    return histories


class _Folds(Value, frozen=True):
    """Features and seed that assign samples to folds, and the number of folds; see `FoldedVectors`."""

    features: tuple[str, ...]
    seed: int
    count: int


def _read_history(file: Any, name: str, folds: _Folds) -> IdHistory:
    folded = tuple(file.get_tensor(f"{FOLDS}/{index}/{name}") for index in range(folds.count))
    return IdHistory(
        counts_N=file.get_tensor(COUNTS + name),
        vectors_ND=file.get_tensor(VECTORS + name),
        folded=FoldedVectors(features=folds.features, seed=folds.seed, vectors=folded),
    )


def _write(path: Path, histories: Mapping[str, IdHistory]) -> None:
    tensors: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for name, history in histories.items():
        tensors[COUNTS + name], tensors[VECTORS + name] = history.counts_N, history.vectors_ND
        folded = history.folded
        assert folded is not None
        tensors |= {f"{FOLDS}/{index}/{name}": vectors for index, vectors in enumerate(folded.vectors)}
        folds = _Folds(features=folded.features, seed=folded.seed, count=len(folded.vectors))
        metadata[FOLDS] = msgspec.json.encode(folds).decode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, temporary, metadata)
    temporary.replace(path)


def _halve_layers(model: Model) -> Model:
    """The model with layers of half the width, except for towers, whose vectors must match."""
    if family_of(model).ranks_items:
        return model
    halves = {key: tuple(-(-n // 2) for n in sizes) for key, sizes in layers_of(model).items() if key in MLP_WIDTHS}
    return structs.replace(model, **halves)


def find_embeddings(model: nn.Module, table: str) -> Embeddings | MappedEmbeddings | None:
    """The outermost embedding module of the model that has the table."""
    modules = (module for module in model.modules() if isinstance(module, (Embeddings, MappedEmbeddings)))
    return next((module for module in modules if any(t.name == table for t in module.tables)), None)


def _count_ids(model: nn.Module, tables: Sequence[Table]) -> dict[str, Tensor]:
    """Tensors of id counts that hooks on the embedding modules fill during training."""
    counts = {table.name: torch.zeros(table.rows, dtype=torch.int64) for table in tables}
    for table in tables:
        embeddings = find_embeddings(model, table.name)
        if embeddings is None:
            raise SpecError(f"table {table.name!r} is in no Embeddings of the model", "all tables in Embeddings")
        embeddings.register_forward_pre_hook(_make_counter(table, counts[table.name]), with_kwargs=True)
    return counts


def _make_counter(table: Table, counts_N: Tensor) -> Callable[..., None]:
    def count(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        jagged = Jagged.from_keyed(next(iter((*args, *kwargs.values())))).expand_features(table.feature_names)
        size = jagged.batch_size
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), jagged.lengths_FB.cumsum(0).cpu().long()])
        for feature in table.feature_names:
            index = jagged.features.index(feature)
            ids = jagged.values_N[int(ends[index * size]) : int(ends[(index + 1) * size])].cpu().long()
            # Unknown ids use the last row with unknown: last_row; otherwise the lookup raises.
            ids = ids.masked_fill((ids < 0) | (ids >= table.rows), table.rows - 1)
            counts_N.index_add_(0, ids, torch.ones_like(ids))

    return count


def learned_vectors(model: nn.Module, name: str) -> Any:
    """Each id's learned row, with its weight in the wide part appended if the model has one."""
    vectors = []
    for table in (name, name + ENDING):
        embeddings = find_embeddings(model, table)
        if embeddings is not None:
            vectors.append(embeddings.weights(table).detach().float().cpu())
    return torch.cat(vectors, 1).numpy()
