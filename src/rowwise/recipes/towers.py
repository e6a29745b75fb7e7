"""The towers of a served model, each bound to the raw columns that it reads."""

from typing import NamedTuple

import pyarrow as pa
import torch
from msgspec import structs
from pyarrow import types
from torch import Tensor, nn

from rowwise.batch import Batch
from rowwise.errors import SpecError
from rowwise.ingest.batcher import table_rows_for_ids
from rowwise.ingest.bound import REQUEST, BoundPreparation
from rowwise.ingest.kinds import is_text
from rowwise.ingest.reader import Split
from rowwise.ingest.transform import LoadedTransforms
from rowwise.models.inference import RowBlocks, autocast
from rowwise.models.two_tower import Tower, TwoTower
from rowwise.recipes.model_configs import TwoTowerConfig
from rowwise.recipes.resolved import ModelParts
from rowwise.recipes.retrieval import RetrievalModel
from rowwise.serve.forward import Forward

ALL_ITEMS = Split(source="items", start=0, stop=0, first_row=0)  # named in errors


class TowerInput(NamedTuple):
    """What a version's towers are bound with."""

    parts: ModelParts
    transforms: LoadedTransforms
    schema: pa.Schema  # of the raw columns
    precision: str
    blocks: RowBlocks


def user_vectors(model: nn.Module, given: TowerInput) -> Forward:
    """From raw columns to vectors of users."""
    config, towers = _config_of(given.parts), _towers_of(model)
    return _bind(towers.user, given, config.user_features, config.user_dense, REQUEST)


def item_vectors(model: nn.Module, given: TowerInput) -> Forward:
    """From raw columns to vectors of items."""
    config, towers = _config_of(given.parts), _towers_of(model)
    return _bind(towers.item, given, (config.item, *config.item_features), config.item_dense, ALL_ITEMS)


def item_key(parts: ModelParts, schema: pa.Schema) -> str:
    """The raw column that names an item; raises where there is none."""
    config = _config_of(parts)
    column = next(one.column for one in parts.columns.sparse if one.feature_name == config.item)
    expected = "a column of the data, with one whole number or text in each row"
    if column not in schema.names:
        raise SpecError(f"model.item={config.item!r}: a transform makes column {column!r}", expected)
    kind = schema.field(column).type
    if not types.is_integer(kind) and not is_text(kind):
        raise SpecError(f"model.item={config.item!r}: column {column!r} holds {kind}", expected)
    return column


def _config_of(parts: ModelParts) -> TwoTowerConfig:
    assert isinstance(parts.model, TwoTowerConfig)
    return parts.model


def _towers_of(model: nn.Module) -> TwoTower:
    assert isinstance(model, RetrievalModel)
    assert isinstance(model.towers, TwoTower)
    return model.towers


def _bind(tower: Tower, given: TowerInput, features: tuple[str, ...], dense: tuple[str, ...], named: Split) -> Forward:
    parts = given.parts
    columns = structs.replace(
        parts.columns,
        sparse=tuple(one for one in parts.columns.sparse if one.feature_name in features),
        dense=tuple(one for name in dense for one in parts.columns.dense if one.column == name),
        shared=(),
    )
    preparation = BoundPreparation(
        given.schema, given.transforms, columns, table_rows_for_ids(columns, parts.tables), named
    )

    def vectors(batch: Batch) -> Tensor:
        with torch.inference_mode(), autocast(parts.device, given.precision):
            return tower(batch).float()

    return Forward(preparation, vectors, given.blocks)
