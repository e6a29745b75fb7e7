"""What is known of ids before they are put together: how often each comes, and what a small model learns of it.

Tables that are to be compressed begin at 0, so that whatever a row holds was learned. Known limits: memory: such a
table takes 4 floats an id, once for each fold of the samples (see `refit`) and once for all, and its counts 8 bytes.
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

from rowwise.batch import Jagged
from rowwise.embedding import Embeddings
from rowwise.errors import DataError, SpecError
from rowwise.hashing.embeddings import AnyTables, MappedEmbeddings
from rowwise.hashing.methods import FoldedVectors, IdHistory
from rowwise.models.wide import ENDING
from rowwise.recipes.compose import ResolvedRecipe, make_batcher, make_job, make_model
from rowwise.recipes.compress import refit
from rowwise.recipes.compress.trials import done_share
from rowwise.recipes.recipe import (
    DcnConfig,
    DeepFmConfig,
    DlrmConfig,
    Model,
    Tables,
    TwoTowerConfig,
    UserModel,
    WideDeepConfig,
)
from rowwise.spec import Constant, RowType, Table, Value
from rowwise.textfile import open_regular
from rowwise.train.settings import Saving
from rowwise.train.trainer import Settings, Trainer

DIM = 4
COUNTS, VECTORS, FOLDS = "counts/", "vectors/", "folds"
PASSES = 1 + refit.FOLDS  # over the rows, once the small model is trained
Histories = dict[str, IdHistory]


def probe(resolved: ResolvedRecipe, names: Sequence[str], path: Path, tell: Callable[[float], None]) -> Histories:
    """What is known of these tables: from the file, or by training on the recipe's rows once."""
    if path.exists():
        return read_histories(path, resolved.tables, names)
    found = learn(resolved, names, tell)
    _write(path, found)
    return found


def learn(resolved: ResolvedRecipe, names: Sequence[str], tell: Callable[[float], None]) -> Histories:
    """Train the small model, and count."""
    small = shrink_recipe(resolved, names)
    model = make_model(small)
    counted = _count(model, [table for table in small.tables if table.name in names])
    job = make_job(small, model, lambda position: make_batcher(small, small.parts.train, position))
    settings = Settings(train=small.recipe.train, save=Saving())
    first = 1 / (PASSES + 1)
    Trainer(job, settings, tell=lambda shown: tell(first * done_share(shown))).run()
    never = [name for name in names if not int(counted[name].sum())]
    if never:
        out = "want a history with rows that have some, or a recipe without the table"
        raise DataError(f"table {never[0]!r}: the history has none of its ids: {out}")
    learned = refit.refit(small, model, names, vectors_of, lambda share: tell(first + (1 - first) * share))
    return {
        name: IdHistory(counts_N=counted[name].numpy(), vectors_ND=vectors, folded=folded)
        for name, (vectors, folded) in learned.items()
    }


def shrink_recipe(resolved: ResolvedRecipe, names: Sequence[str]) -> ResolvedRecipe:
    """The recipe with small tables and layers, for one pass over its rows."""
    recipe = resolved.recipe
    assert not isinstance(recipe.model, str)
    plain = {"dim": DIM, "row_type": RowType.FP32, "column_group": None}
    zero = plain | {"init": Constant(0.0)}
    tables = tuple(structs.replace(table, **(zero if table.name in names else plain)) for table in resolved.tables)
    train = structs.replace(recipe.train, epochs=1, steps=None)
    changed = structs.replace(recipe, tables=Tables(list=tables), model=_halved(recipe.model), train=train)
    return replace(resolved, recipe=changed, parts=replace(resolved.parts, valid=None))


def read_histories(path: Path, tables: Sequence[Table], names: Sequence[str]) -> Histories:
    rows = {table.name: table.rows for table in tables}
    try:
        open_regular(path).close()  # a pipe is not waited for
        with safe_open(path, "numpy") as file:
            folds = msgspec.json.decode((file.metadata() or {}).get(FOLDS, "{}"), type=_Folds)
            found = {name: _history(file, name, folds) for name in names}
    except (SafetensorError, OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}; delete it, and it is made anew") from None
    for name, history in found.items():
        if len(history.counts_N) != rows[name]:
            got = f"{len(history.counts_N):,} ids of table {name!r}, which has {rows[name]:,}"
            raise DataError(f"{path}: {got}; delete it, and it is made anew")
    return found


class _Folds(Value, frozen=True):
    """The fold of each sample; see `FoldedVectors`."""

    features: tuple[str, ...]
    seed: int
    count: int


def _history(file: Any, name: str, folds: _Folds) -> IdHistory:
    without = tuple(file.get_tensor(f"{FOLDS}/{index}/{name}") for index in range(folds.count))
    return IdHistory(
        counts_N=file.get_tensor(COUNTS + name),
        vectors_ND=file.get_tensor(VECTORS + name),
        folded=FoldedVectors(features=folds.features, seed=folds.seed, vectors=without),
    )


def _write(path: Path, histories: Mapping[str, IdHistory]) -> None:
    tensors: dict[str, Any] = {}
    about: dict[str, str] = {}
    for name, history in histories.items():
        tensors[COUNTS + name], tensors[VECTORS + name] = history.counts_N, history.vectors_ND
        folded = history.folded
        assert folded is not None
        tensors |= {f"{FOLDS}/{index}/{name}": vectors for index, vectors in enumerate(folded.vectors)}
        folds = _Folds(features=folded.features, seed=folded.seed, count=len(folded.vectors))
        about[FOLDS] = msgspec.json.encode(folds).decode()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, part, about)
    part.replace(path)


def _halved(model: Model) -> Model:
    def half(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // 2) for size in sizes)

    match model:
        case DlrmConfig(bottom=bottom, top=top):
            return DlrmConfig(bottom=half(bottom), top=half(top))
        case DeepFmConfig(deep=deep) | DcnConfig(deep=deep) | WideDeepConfig(deep=deep):
            return structs.replace(model, deep=half(deep))
        case TwoTowerConfig() | UserModel():
            return model


def module_with_table(model: nn.Module, name: str) -> AnyTables | None:
    """The tables of a model among which one is, the outermost of those that are inside each other."""
    kinds = (Embeddings, MappedEmbeddings)
    found = (module for module in model.modules() if isinstance(module, kinds))
    return next((one for one in found if any(table.name == name for table in one.tables)), None)


def _count(model: nn.Module, tables: Sequence[Table]) -> dict[str, Tensor]:
    """How often each id comes, counted as batches are looked up."""
    counts = {table.name: torch.zeros(table.rows, dtype=torch.int64) for table in tables}
    for table in tables:
        inside = module_with_table(model, table.name)
        if inside is None:
            raise SpecError(f"table {table.name!r} is in no Embeddings of the model: want one that holds all tables")
        inside.register_forward_pre_hook(_counter(table, counts[table.name]), with_kwargs=True)
    return counts


def _counter(table: Table, counts_N: Tensor) -> Callable[..., None]:
    def see(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        jagged = Jagged.from_keyed(next(iter((*args, *kwargs.values())))).owning(table.feature_names)
        size = jagged.batch_size
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), jagged.lengths_FB.cumsum(0).cpu().long()])
        for feature in table.feature_names:
            at = jagged.features.index(feature)
            ids = jagged.values_N[int(ends[at * size]) : int(ends[(at + 1) * size])].cpu().long()
            # Those of no table are its last, if it takes them; if not, the lookup says so.
            ids = ids.masked_fill((ids < 0) | (ids >= table.rows), table.rows - 1)
            counts_N.index_add_(0, ids, torch.ones_like(ids))

    return see


def vectors_of(model: nn.Module, name: str) -> Any:
    """What was learned of each id: its row, and its weight in the wide part, if the model has one."""
    found = []
    for part in (name, name + ENDING):
        inside = module_with_table(model, part)
        if inside is not None:
            found.append(inside.weights(part).detach().float().cpu())
    return torch.cat(found, 1).numpy()
