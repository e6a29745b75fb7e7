"""What makes vectors of users and of items of a served model, each bound to the raw columns that it reads.

Two towers read columns of users and of items. A model of lists has a list in place of a user, and for each item the row
of its table that the lists look up, too.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from pyarrow import types
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.ingest.bound import REQUEST
from rowwise.ingest.columns import Columns
from rowwise.ingest.kinds import is_list
from rowwise.ingest.reader import Split
from rowwise.ingest.transform import LoadedTransforms
from rowwise.models.inference import RowBlocks, autocast
from rowwise.models.next_item import NextItem
from rowwise.models.two_tower import TwoTower
from rowwise.recipes.id_names import HIDING
from rowwise.recipes.model_configs import TwoTowerConfig
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.resolved import ModelParts
from rowwise.recipes.retrieval import RetrievalModel
from rowwise.serve.forward import Forward, arrays_of
from rowwise.tables.batch import Batch
from rowwise.train.on_device import to_device

ALL_ITEMS = Split(source="items", start=0, stop=0, first_row=0)  # named in errors


class TowerInput(NamedTuple):
    """What a version's towers are bound with."""

    parts: ModelParts
    transforms: LoadedTransforms
    schema: pa.Schema  # of the raw columns
    precision: str
    blocks: RowBlocks

    @property
    def of_lists(self) -> bool:
        """Whether lists of items are in place of users."""
        return family_of(self.parts.model).retrieves == "lists"


class ItemTower(NamedTuple):
    """From a table of items to their vectors."""

    forward: Forward
    schema: pa.Schema  # of the table: the key, one in each row, then the other columns that are read
    of_lists: bool  # rows of the data have lists of keys

    @property
    def key(self) -> str:
        return self.schema.names[0]

    def arrays(self, items: pa.Table) -> dict[str, pa.Array]:
        """The columns of a table of items as the preparation reads them: each key as a list of its own."""
        arrays = arrays_of(items)
        if self.of_lists:
            arrays[self.key] = pa.LargeListArray.from_arrays(pa.array(np.arange(len(items) + 1)), arrays[self.key])
        return arrays

    def has_row(self, items: pa.Table) -> np.ndarray:
        """Whether each item is looked up: a transform may leave ids of lists out."""
        if not self.of_lists:
            return np.ones(len(items), np.bool_)
        return self.forward.preparation(self.arrays(items), np.arange(len(items))).lengths_FB > 0


def user_vectors(model: nn.Module, given: TowerInput) -> Forward:
    """From raw columns to vectors of users, or of lists."""
    if given.of_lists:
        return _bind(model, next_item_of(model).vectors, given, given.parts.columns, REQUEST)
    config = _config_of(given.parts)
    columns = _columns_of(given.parts, config.user_features, config.user_dense)
    return _bind(model, _towers_of(model).user, given, columns, REQUEST)


def item_tower(model: nn.Module, given: TowerInput) -> ItemTower:
    """From a table of items to their vectors; raises where no raw column names an item."""
    if given.of_lists:
        key, kind = _key_of_lists(given)
        given = given._replace(blocks=RowBlocks())  # rows of a table as they are
        forward = _bind(model, next_item_of(model).item_vectors, given, given.parts.columns, ALL_ITEMS)
        return ItemTower(forward, pa.schema([(key, kind)]), of_lists=True)
    config, key = _config_of(given.parts), _key_of_towers(given)
    columns = _columns_of(given.parts, (config.item, *config.item_features), config.item_dense)
    forward = _bind(model, _towers_of(model).item, given, columns, ALL_ITEMS)
    names = dict.fromkeys((key, *forward.preparation.names))
    return ItemTower(forward, pa.schema([given.schema.field(name) for name in names]), of_lists=False)


def _key_of_towers(given: TowerInput) -> str:
    item = _config_of(given.parts).item
    column = next(one.column for one in given.parts.columns.sparse if one.feature_name == item)
    expected = "a column of the data, with one whole number or text in each row"
    if column not in given.schema.names:
        raise SpecError(f"model.item={item!r}: a transform makes column {column!r}", expected)
    kind = given.schema.field(column).type
    if not _is_key(kind):
        raise SpecError(f"model.item={item!r}: column {column!r} holds {kind}", expected)
    return column


def _key_of_lists(given: TowerInput) -> tuple[str, pa.DataType]:
    """The raw column of the lists, and the type of what is in them."""
    (column,), expected = (one.column for one in given.parts.columns.sparse), "lists of whole numbers or text"
    for step in reversed(given.transforms.steps):
        if column in step.transform.makes:
            if not isinstance(step.transform, HIDING):  # which keep the place of each id
                raise SpecError(f"a transform makes column {column!r}", f"a column of the data, with {expected}")
            (column,) = step.transform.reads
    kind = given.schema.field(column).type
    if not is_list(kind) or not _is_key(kind.value_type):
        raise SpecError(f"column {column!r} holds {kind}", expected)
    return column, kind.value_type


def _is_key(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)


def _config_of(parts: ModelParts) -> TwoTowerConfig:
    assert isinstance(parts.model, TwoTowerConfig)
    return parts.model


def _towers_of(model: nn.Module) -> TwoTower:
    assert isinstance(model, RetrievalModel)
    assert isinstance(model.towers, TwoTower)
    return model.towers


def next_item_of(model: nn.Module) -> NextItem:
    """The model of lists that a recipe has made."""
    assert isinstance(model, NextItem)
    return model


def _columns_of(parts: ModelParts, features: tuple[str, ...], dense: tuple[str, ...]) -> Columns:
    return structs.replace(
        parts.columns,
        sparse=tuple(one for one in parts.columns.sparse if one.feature_name in features),
        dense=tuple(one for name in dense for one in parts.columns.dense if one.column == name),
        shared=(),
    )


def _bind(
    model: nn.Module, tower: Callable[[Batch], Tensor], given: TowerInput, columns: Columns, named: Split
) -> Forward:
    parts = given.parts
    preparation = parts.bind(given.schema, given.transforms, columns, named)

    def vectors(batch: Batch) -> Tensor:
        with torch.inference_mode(), autocast(parts.device, given.precision):
            return tower(to_device(batch, model, parts.device)).float().cpu()

    return Forward(preparation, vectors, given.blocks)
