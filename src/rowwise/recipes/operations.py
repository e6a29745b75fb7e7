"""Multiplications of matrix products for a sample in a forward of the models of recipes; no weight takes memory.

Layers of MLPs and of xDeepFM are in closed form. Other models over fields are made on the meta device, and counted.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from msgspec import structs
from torch import nn

from rowwise.embedding import Embeddings
from rowwise.errors import SpecError
from rowwise.models.cost import count_flops
from rowwise.models.fields import FieldModel
from rowwise.recipes.families import make_click_model
from rowwise.recipes.model_configs import (
    AutoIntConfig,
    DcnConfig,
    DeepFmConfig,
    DhenConfig,
    DlrmConfig,
    FinalMlpConfig,
    MaskNetConfig,
    Model,
    TwoTowerConfig,
    WideDeepConfig,
    WukongConfig,
    XDeepFmConfig,
    layers_of,
)
from rowwise.spec import Table

MLP_MODELS = (DlrmConfig, DeepFmConfig, DcnConfig, TwoTowerConfig, WideDeepConfig)
FIELD_MODELS = (AutoIntConfig, DhenConfig, FinalMlpConfig, MaskNetConfig, WukongConfig)
MLPS = ("bottom", "top", "deep", "sizes")  # keys of layer sizes


def multiplications(model: Model, tables: Sequence[Table], dense: int) -> int | None:
    """For a sample; None for models whose layers depend on code or on the data, and for those that are refused."""
    if isinstance(model, MLP_MODELS):
        return _of_mlps(model, dense + sum(table.dim * len(table.feature_names) for table in tables))
    if isinstance(model, XDeepFmConfig) and tables:
        return _of_xdeepfm(model, tables, dense)
    if not isinstance(model, FIELD_MODELS) or not tables:
        return None
    plain = [structs.replace(table, id_map=None, managed=None) for table in tables]
    embeddings = Embeddings(plain, device="meta")
    try:
        with torch.device("meta"):
            made = make_click_model(model, embeddings, dense, 1)
    except SpecError:
        return None
    one, two = (_count(made, dense, samples) for samples in (1, 2))
    return (two - one) // 2  # without what is computed once for a batch, such as gates


def _count(model: nn.Module, dense: int, samples: int) -> int:
    assert isinstance(model, FieldModel)

    def forward() -> None:
        if model.dense is not None:
            model.dense(torch.empty(samples, dense, device="meta"))
        model.logits(torch.empty(samples, model.fields, model.dim, device="meta"))

    return count_flops(forward)


def _mlp(*sizes: int) -> int:
    return sum(a * b for a, b in pairwise(sizes))


def _of_mlps(model: Model, inputs: int) -> int:
    """As if each MLP were over all inputs."""
    found = sum(_mlp(inputs, *sizes) for key, sizes in layers_of(model).items() if key in MLPS)
    if isinstance(model, DcnConfig):
        matrices = model.crosses * (1 + model.gated)
        found += matrices * inputs * (inputs if model.rank is None else 2 * model.rank)
    return found


def _of_xdeepfm(model: XDeepFmConfig, tables: Sequence[Table], dense: int) -> int:
    dim, vectors = tables[0].dim, sum(len(table.feature_names) for table in tables) + (dense > 0)
    products = sum(vectors * dim * a * b for a, b in pairwise((vectors, *model.products))) + sum(model.products)
    return products + dense + _mlp(vectors * dim, *model.deep, 1) + (_mlp(dense, 4 * dim, dim) if dense else 0)
