"""Multiplications per sample in a forward of the models of recipes, in closed form: no model is built.

Matrix products only. `models/cost.py` counts the operations of a built model; the tests compare both.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import structs

from rowwise.recipes.model_configs import (
    AutoIntConfig,
    DcnConfig,
    DeepFmConfig,
    DhenConfig,
    DlrmConfig,
    FinalMlpConfig,
    Interaction,
    MaskNetConfig,
    Model,
    TwoTowerConfig,
    WideDeepConfig,
    WukongConfig,
    XDeepFmConfig,
    layers_of,
)
from rowwise.tables.spec import Table

MLP_MODELS = (DlrmConfig, DeepFmConfig, DcnConfig, TwoTowerConfig, WideDeepConfig)
MLPS = ("bottom", "top", "deep", "sizes")  # keys of layer sizes
WUKONG: tuple[Interaction, ...] = ("factorization", "linear")


class SampleVectors(NamedTuple):
    """M vectors of dim D per sample."""

    count: int
    dim: int

    @property
    def numbers(self) -> int:
        return self.count * self.dim


def multiplications(model: Model, tables: Sequence[Table], dense: int) -> int | None:
    """Multiplications per sample; None if layers depend on user code or data, and for invalid settings."""
    if isinstance(model, MLP_MODELS):
        return _count_mlps(model, dense + sum(table.dim * len(table.feature_names) for table in tables))
    if not tables:
        return None
    features = sum(len(table.feature_names) for table in tables)
    x = SampleVectors(features + (dense > 0), tables[0].dim)
    match model:
        case DhenConfig(interactions=kinds, ensemble=ensemble):
            count = _count_layers(model, x, kinds, split=ensemble == "concat")
        case WukongConfig():
            count = _count_layers(model, x, WUKONG, split=True)
        case MaskNetConfig(blocks=blocks, top=top, reduction_ratio=ratio) if blocks:
            serial = model.structure == "serial"
            widths = (x.numbers, *blocks[:-1]) if serial else (x.numbers,) * len(blocks)
            pairs = list(zip(widths, blocks, strict=True))
            count = sum(mlp(x.numbers, ratio * width, width) + width * out for width, out in pairs)
            count += mlp(blocks[-1] if serial else sum(blocks), *top, 1)
        # Gates are computed once per batch, and not counted.
        case FinalMlpConfig(first=first, second=second, heads=heads) if first and second and heads > 0:
            joined = first[-1] * second[-1] // heads + first[-1] + 2 * second[-1]
            count = mlp(x.numbers, *first) + mlp(x.numbers, *second) + joined
        case AutoIntConfig(deep=deep, layers=layers, width=width):
            sizes = (x.dim, *(width,) * layers)
            count = sum(x.count * (4 * a * b + 2 * x.count * b) for a, b in pairwise(sizes))
            count += x.count * width + (mlp(x.numbers, *deep, 1) if deep else 0)
        case XDeepFmConfig(deep=deep, products=products):
            count = sum(x.numbers * a * b for a, b in pairwise((x.count, *products)))
            count += sum(products) + mlp(x.numbers, *deep, 1) + dense
        case _:
            return None
    return count + (mlp(dense, 4 * x.dim, x.dim) if dense else 0)


def mlp(*sizes: int) -> int:
    return sum(a * b for a, b in pairwise(sizes))


def _count_mlps(model: Model, inputs: int) -> int:
    """An estimate: each MLP counts as if it read all inputs."""
    count = sum(mlp(inputs, *sizes) for key, sizes in layers_of(model).items() if key in MLPS)
    if isinstance(model, DcnConfig):
        matrices = model.crosses * (1 + model.gated)
        count += matrices * inputs * (inputs if model.rank is None else 2 * model.rank)
    return count


def _count_layers(
    model: DhenConfig | WukongConfig, x: SampleVectors, kinds: Sequence[Interaction], *, split: bool
) -> int:
    """Layers of interactions and the MLP over them; `split`: the new vectors are divided among interactions."""
    out = x.count if model.vectors is None else model.vectors
    parts = [out // len(kinds) + (k < out % len(kinds)) if split else out for k in range(len(kinds))]
    count, settings = 0, structs.asdict(model)
    for _ in range(model.layers):
        count += sum(_count_interaction(kind, x, n, settings) for kind, n in zip(kinds, parts, strict=True))
        count += 0 if out == x.count else out * x.numbers
        x = SampleVectors(out, x.dim)
        count += len(kinds) * x.numbers if settings.get("ensemble") == "weighted_sum" else 0
    return count + mlp(x.numbers, *model.top, 1)


def _count_interaction(kind: Interaction, x: SampleVectors, out: int, settings: Mapping[str, Any]) -> int:
    (vectors, dim), mix = x, out * x.numbers
    match kind:
        case "attention":
            return (4 + 2 * settings["ffn_ratio"]) * vectors * dim * dim + 2 * vectors * vectors * dim + mix
        case "convolution":
            return settings["kernel"] ** 2 * x.numbers + mix
        case "cross":
            return x.numbers**2 + (0 if out == vectors else mix)
        case "dot":
            pairs = vectors * (vectors - 1) // 2
            return pairs * dim + mlp(pairs, *settings["hidden"], out * dim)
        case "factorization":
            rank = settings["rank"]
            return 2 * x.numbers * rank + mlp(vectors * rank, *settings["hidden"], out * dim)
        case "linear":
            return mix
