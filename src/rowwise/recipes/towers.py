"""The user and item towers of a served model, each bound to the raw columns that it reads.

Two towers read columns of users and of items. A sequence model encodes a list in place of a user; its item vectors are
rows of the table that lists look up.
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
    """The columns and settings that a version's towers are bound to."""

    parts: ModelParts
    transforms: LoadedTransforms
    schema: pa.Schema  # schema of the raw columns
    precision: str
    blocks: RowBlocks

    @property
    def is_sequence(self) -> bool:
        """Whether queries are lists of items in place of users."""
        return family_of(self.parts.model).retrieves == "lists"


class ItemTower(NamedTuple):
    """Computes the vectors of a table of items."""

    forward: Forward
    schema: pa.Schema  # schema of the table: the key, one per row, then the other columns that the tower reads
    is_sequence: bool  # the data has lists of keys

    @property
    def key(self) -> str:
        return self.schema.names[0]

    def arrays(self, items: pa.Table) -> dict[str, pa.Array]:
        """The columns of a table of items for the preparation; each key of a sequence model is a list."""
        arrays = arrays_of(items)
        if self.is_sequence:
            arrays[self.key] = pa.LargeListArray.from_arrays(pa.array(np.arange(len(items) + 1)), arrays[self.key])
        return arrays

    def has_row(self, items: pa.Table) -> np.ndarray:
        """Whether each item has a row: a transform may drop ids of lists."""
        if not self.is_sequence:
            return np.ones(len(items), np.bool_)
        return self.forward.preparation(self.arrays(items), np.arange(len(items))).lengths_FB > 0


def user_vectors(model: nn.Module, inputs: TowerInput) -> Forward:
    """The forward from raw columns to vectors of users, or of lists."""
    if inputs.is_sequence:
        return _bind(model, next_item_of(model).vectors, inputs, inputs.parts.columns, REQUEST)
    config = _config_of(inputs.parts)
    columns = _columns_of(inputs.parts, config.user_features, config.user_dense)
    return _bind(model, _towers_of(model).user, inputs, columns, REQUEST)


def item_tower(model: nn.Module, inputs: TowerInput) -> ItemTower:
    """The item tower; raises if no raw column has the keys of items."""
    if inputs.is_sequence:
        key, kind = _key_of_lists(inputs)
        inputs = inputs._replace(blocks=RowBlocks())  # single lookups need no blocks
        forward = _bind(model, next_item_of(model).item_vectors, inputs, inputs.parts.columns, ALL_ITEMS)
        return ItemTower(forward, pa.schema([(key, kind)]), is_sequence=True)
    config, key = _config_of(inputs.parts), _key_of_towers(inputs)
    columns = _columns_of(inputs.parts, (config.item, *config.item_features), config.item_dense)
    forward = _bind(model, _towers_of(model).item, inputs, columns, ALL_ITEMS)
    names = dict.fromkeys((key, *forward.preparation.names))
    return ItemTower(forward, pa.schema([inputs.schema.field(name) for name in names]), is_sequence=False)


def _key_of_towers(inputs: TowerInput) -> str:
    item = _config_of(inputs.parts).item
    column = next(sparse.column for sparse in inputs.parts.columns.sparse if sparse.feature_name == item)
    expected = "a column of the data, with one whole number or text in each row"
    if column not in inputs.schema.names:
        raise SpecError(f"model.item={item!r}: a transform makes column {column!r}", expected)
    kind = inputs.schema.field(column).type
    if not _is_key(kind):
        raise SpecError(f"model.item={item!r}: column {column!r} holds {kind}", expected)
    return column


def _key_of_lists(inputs: TowerInput) -> tuple[str, pa.DataType]:
    """The raw column of the lists, and the type of their values."""
    (column,), expected = (sparse.column for sparse in inputs.parts.columns.sparse), "lists of whole numbers or text"
    for step in reversed(inputs.transforms.steps):
        if column in step.transform.makes:
            if not isinstance(step.transform, HIDING):  # these keep the position of each id
                raise SpecError(f"a transform makes column {column!r}", f"a column of the data, with {expected}")
            (column,) = step.transform.reads
    kind = inputs.schema.field(column).type
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
    assert isinstance(model, NextItem)
    return model


def _columns_of(parts: ModelParts, features: tuple[str, ...], dense: tuple[str, ...]) -> Columns:
    return structs.replace(
        parts.columns,
        sparse=tuple(column for column in parts.columns.sparse if column.feature_name in features),
        dense=tuple(column for name in dense for column in parts.columns.dense if column.column == name),
        shared=(),
    )


def _bind(
    model: nn.Module, tower: Callable[[Batch], Tensor], inputs: TowerInput, columns: Columns, named: Split
) -> Forward:
    parts = inputs.parts
    preparation = parts.bind(inputs.schema, inputs.transforms, columns, named)

    def vectors(batch: Batch) -> Tensor:
        with torch.inference_mode(), autocast(parts.device, inputs.precision):
            return tower(to_device(batch, model, parts.device)).float().cpu()

    return Forward(preparation, vectors, inputs.blocks)
