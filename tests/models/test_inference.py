"""A row's logit is the same bits in any batch, for every model; models for which that needs more are found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import nn

from rowwise import (
    Batch,
    GraphTower,
    Jagged,
    LightGCN,
    Pooling,
    Table,
    Tower,
    TwoTower,
    make_embeddings,
    user_item_graph,
)
from rowwise.models.inference import FIXED_ROWS, RowBlocks, choose_blocks, inference_mode
from rowwise.models.mlp import Linear
from rowwise.recipes.families import make_click_model
from rowwise.recipes.find import load, names
from rowwise.recipes.model_configs import (
    AutoIntConfig,
    DhenConfig,
    DienConfig,
    DinConfig,
    DlrmConfig,
    FinalMlpConfig,
    GraphConfig,
    MaskNetConfig,
    MmoeConfig,
    PleConfig,
    SequenceModel,
    TwoTowerConfig,
    WideDeepConfig,
    WukongConfig,
    XDeepFmConfig,
)

ROWS, DENSE, TASKS = 64, 5, 2
SIZES = (1, 2, 3, 5, 7, 15, 16, 17, 100, 1000, 4096)
OTHERS = (
    AutoIntConfig(),
    DhenConfig(interactions=("attention", "convolution", "cross", "dot", "factorization", "linear")),
    DienConfig(histories={"seen": "item"}),
    DinConfig(histories={"seen": "item"}),
    FinalMlpConfig(),
    MaskNetConfig(),
    MmoeConfig(),
    PleConfig(),
    WukongConfig(),
    XDeepFmConfig(),
)
SHIPPED = [recipe for recipe in map(load, names()) if not isinstance(recipe.model, SequenceModel)]


def rows_of(features, seed=0):
    """Bags of none to some ids for each row; of the first feature one id, as of both where there are two."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 25, (len(features), ROWS), generator=g)
    sizes[: 2 if len(features) == 2 else 1] = 1
    bags = [[torch.randint(0, 50, (int(n),), generator=g).tolist() for n in line] for line in sizes]
    return dict(zip(features, bags, strict=True)), torch.randn(ROWS, DENSE, generator=g)


def logits_of(model, features):
    bags, dense_RF = rows_of(features)

    def run(rows_B):
        rows_B = list(rows_B)
        sparse = Jagged.from_lists({name: [lines[row] for row in rows_B] for name, lines in bags.items()})
        return model(Batch(dense_BF=dense_RF[rows_B], sparse=sparse, labels_BK=torch.zeros(len(rows_B), TASKS)))

    return run


def model_of(config, dim):
    torch.manual_seed(0)
    names = ("item", "seen", "a", "b", "c")
    pooling = Pooling.MEAN
    if isinstance(config, (DienConfig, DinConfig)):
        pooling, config = Pooling.SEQUENCE, structs.replace(config, histories={"seen": "item"})
    tables = [Table(name=name, rows=50, dim=dim) for name in names[2:]]
    tables.append(Table(name="items", rows=50, dim=dim, features=names[:2], pooling=pooling))
    if isinstance(config, GraphConfig):
        nodes = [Table(name=name, rows=50, dim=dim) for name in (config.user, config.item)]
        graph = user_item_graph(torch.randint(50, (300,)), torch.randint(50, (300,)), 50, 50)
        return GraphTower(make_embeddings(nodes), graph, LightGCN(config.layers)), (config.user, config.item), 0
    if isinstance(config, TwoTowerConfig):
        towers = [Tower(make_embeddings(some), 0, config.sizes) for some in (tables[:3], tables[3:])]
        return TwoTower(*towers, config.temperature), names, 0
    return make_click_model(config, make_embeddings(tables), DENSE, TASKS), names, DENSE


def check(config, dim):
    """By the blocks that are chosen for a model, all batch sizes give the bits of the largest."""
    model, features, dense = model_of(config, dim)
    run = logits_of(model, features)
    if not dense:
        with_dense = run
        towers, model.forward = model.forward, lambda batch: towers(batch.dense_BF[:, :0], batch.sparse)
        run = with_dense
    with inference_mode(model):
        blocks = choose_blocks(run, ROWS)
        known = {}
        for size in SIZES:
            rows_B = [(11 * size + 3 * place) % ROWS for place in range(size)]
            for begin, end, padding in blocks.cut(size, 1024):
                span = rows_B[begin:end] + rows_B[end - 1 : end] * padding
                for row, logits in zip(
                    rows_B[begin:end], run(span)[: end - begin].view(torch.int32).tolist(), strict=True
                ):
                    assert known.setdefault(row, logits) == logits
    return blocks


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda recipe: recipe.name)
def test_rows_of_shipped_recipes_keep_their_bits(recipe):
    blocks = check(recipe.model, recipe.tables.all.dim or 16)
    assert blocks.kind == "padded"
    assert blocks.rows == 1 or not isinstance(recipe.model, (DlrmConfig, WideDeepConfig))


@pytest.mark.few(1)
@pytest.mark.parametrize("config", OTHERS, ids=lambda config: type(config).__name__)
def test_rows_of_other_models_keep_their_bits(config):
    assert check(config, 16).kind == "padded"


class Neighbours(nn.Module):
    """Logits that depend on the batch: on its size, on the other rows, or for the largest rows on being alone."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, batch):
        x_B1 = batch.dense_BF[:, :1]
        if self.of == "company":
            return x_B1 + (x_B1 > 2) * (len(x_B1) == 1)
        return x_B1 + (len(x_B1) if self.of == "size" else x_B1.mean())


@pytest.mark.parametrize(("of", "kind"), [("size", "fixed"), ("rows", "alone"), ("company", "padded")])
def test_a_model_that_sees_its_batch_is_found(of, kind):
    model = Neighbours(of)
    with inference_mode(model):
        blocks = choose_blocks(logits_of(model, ("item",)), ROWS)
    assert blocks.kind == kind
    assert blocks == RowBlocks(rows=16) if of == "company" else blocks.describe() != RowBlocks().describe()


@given(st.sampled_from(["padded", "fixed", "alone"]), st.integers(1, 3000), st.integers(1, 600))
def test_blocks_cover_rows_once(kind, rows, most):
    spans = list(RowBlocks(kind=kind, rows=FIXED_ROWS if kind == "fixed" else 16).cut(rows, most))
    assert [row for begin, end, _ in spans for row in range(begin, end)] == list(range(rows))
    sizes = {end - begin + padding for begin, end, padding in spans}
    assert sizes == {FIXED_ROWS} if kind == "fixed" else all(size % 16 == 0 for size in sizes)
    assert kind != "alone" or sizes == {16}
    assert all(end - begin <= most for begin, end, _ in spans) or kind == "fixed"


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(0, 7), (1, 7), (16, 7), (33, 7), (2, 5, 7)])
def test_packed_layers_equal_plain_ones(shape, relu):
    layer, x = Linear(7, 5, relu=relu), torch.randn(shape)
    with torch.no_grad():
        wanted = layer(x)
    with inference_mode(layer):
        with inference_mode(layer):
            packed = layer.packed
        assert layer.packed is packed is not None
        torch.testing.assert_close(layer(x), wanted)
        assert not wanted.numel() or layer(x * torch.nan).isnan().all()
    assert layer.packed is None
    assert layer(x).requires_grad


def test_weights_that_changed_are_packed_again():
    layer, x = Linear(7, 5), torch.ones(16, 7)
    with inference_mode(layer):
        before = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with inference_mode(layer):
        torch.testing.assert_close(layer(x), before + 7)


def test_bfloat16_products_keep_their_bits_too():
    model, features, _ = model_of(load("dlrm-synthetic").model, 16)
    run = logits_of(model, features)
    with inference_mode(model, "cpu", "bf16"):
        assert next(model.modules()) is model
        assert model.packed is model.bottom.layers[0].packed is None
        choose_blocks(run, ROWS)


def test_a_chain_of_layers_is_packed_once():
    model, features, _ = model_of(load("dlrm-synthetic").model, 16)
    run = logits_of(model, features)
    with torch.no_grad():
        apart = run(range(ROWS))
    with inference_mode(model):
        assert model.packed is not None
        assert model.bottom.packed is model.top.packed is model.top.layers[0].packed is None
        torch.testing.assert_close(run(range(ROWS)), apart)
    assert model.packed is None
