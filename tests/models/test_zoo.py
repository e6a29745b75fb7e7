"""What all models promise, whatever they compute."""

import copy

import pytest
import torch
from clicks import DENSE, learned_auc, make_clicks, make_tables, step
from torch import nn

from rowwise import (
    DCN,
    DHEN,
    DLRM,
    PLE,
    AutoInt,
    BatchError,
    DeepFM,
    Embeddings,
    FinalMLP,
    MaskNet,
    MMoE,
    Pooling,
    SpecError,
    Table,
    Tower,
    TwoTower,
    WideDeep,
    Wukong,
    XDeepFM,
)  # fmt: skip

INTERACTIONS = ("attention", "convolution", "cross", "factorization", "linear")
CLICK_MODELS = {  # the class, the layers of which the last has a logit for each task, and further options
    "dlrm": (DLRM, {"top": (5,)}, {"bottom": (6, 8)}),
    "deepfm": (DeepFM, {"deep": (5,)}, {}),
    "wide_deep": (WideDeep, {"deep": (5,)}, {}),
    "dcn": (DCN, {"deep": (5,)}, {}),
    "dcn_low_rank": (DCN, {"deep": (5,)}, {"rank": 2}),
    "dcn_parallel": (DCN, {"deep": (5,)}, {"structure": "parallel"}),
    "gdcn": (DCN, {"deep": (5,)}, {"gated": True}),
    "dhen": (DHEN, {"top": (24,)}, {"interactions": INTERACTIONS, "ensemble": "weighted_sum"}),
    "wukong": (Wukong, {"top": (5,)}, {"vectors": 4, "rank": 2, "hidden": (5,)}),
    "masknet": (MaskNet, {"top": (5,)}, {"blocks": (5, 6)}),
    "final_mlp": (FinalMLP, {}, {"first": (6, 4), "second": (4,)}),
    "autoint": (AutoInt, {"deep": (5,)}, {"width": 4}),
    "xdeepfm": (XDeepFM, {"deep": (5,)}, {"products": (4, 3)}),
    "mmoe": (MMoE, {}, {"expert_sizes": (24,), "experts": 2, "tower": (5,)}),
    "ple": (PLE, {}, {"expert_sizes": (24,), "levels": 2, "tower": (5,)}),
}


def make(name, tables, dense_features=DENSE, tasks=1):
    if name == "two_tower":
        user = Tower(Embeddings(tables[:1]), min(1, dense_features), (5, 4))
        return TwoTower(user, Tower(Embeddings(tables[1:] or tables), max(0, dense_features - 1), (5, 4)))
    kind, layers, options = CLICK_MODELS[name]
    last = {key: (*sizes, tasks) for key, sizes in layers.items()} or {"tasks": tasks}
    return kind(Embeddings(tables), dense_features, **last, **options)


MODELS = (*CLICK_MODELS, "two_tower")


def all_embeddings(model: nn.Module) -> list[Embeddings]:
    return [m for m in model.modules() if isinstance(m, Embeddings)]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_moves_all_weights_and_the_touched_rows_only(name):
    torch.manual_seed(0)
    model, batch = make(name, make_tables()), make_clicks(8)
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    learning = [p for p in model.parameters() if p.requires_grad]
    step(model, (model(batch) * torch.randn(8, 1)).sum(), torch.optim.SGD(learning, lr=0.1))
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert not torch.equal(parameter, before[key]), key
    bags = dict(zip(batch.sparse.features, batch.sparse.lengths_FB.view(-1, 8).sum(1).tolist(), strict=True))
    ids = dict(zip(bags, batch.sparse.values_N.split(list(bags.values())), strict=True))
    for embeddings in all_embeddings(model):
        for table in embeddings.tables:
            touched = set(torch.cat([ids[f] for f in table.feature_names]).tolist())
            prefix = next(key for key, module in model.named_modules() if module is embeddings)
            moved_R = (embeddings.table(table.name) != before[f"{prefix}.{table.name}"]).any(1)
            assert set(moved_R.nonzero().flatten().tolist()) == touched


LEARNERS = [
    (DeepFM, {"deep": (16, 1)}),
    (DCN, {"deep": (16, 1), "crosses": 2}),
    (DCN, {"deep": (16, 1), "crosses": 2, "rank": 4, "structure": "parallel"}),
    (DHEN, {"top": (16, 1)}),
    (Wukong, {"top": (16, 1), "hidden": (16,)}),
    (MaskNet, {"top": (16, 1), "blocks": (16, 16)}),
    (FinalMLP, {"first": (32, 16), "second": (32, 16)}),
    (AutoInt, {"deep": (16, 1), "width": 16}),
    (XDeepFM, {"deep": (16, 1), "products": (8, 8)}),
    (PLE, {"tasks": 1, "expert_sizes": (32, 16), "tower": ()}),
    (MMoE, {"tasks": 1, "expert_sizes": (32, 16), "tower": ()}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), LEARNERS, ids=lambda x: getattr(x, "__name__", ""))
def test_it_learns(kind, options):
    torch.manual_seed(0)
    assert learned_auc(kind(Embeddings(make_tables()), DENSE, **options)) > 0.85


@pytest.mark.parametrize("name", CLICK_MODELS)
def test_several_tasks(name):
    model, batch = make(name, make_tables(), tasks=3), make_clicks(8, tasks=3)
    logits_BK = model(batch)
    assert logits_BK.shape == (8, 3)
    assert torch.equal(model(batch.dense_BF, batch.sparse), logits_BK)


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_state(name):
    model, other, batch = make(name, make_tables()), make(name, make_tables()), make_clicks(8)
    wanted = model.eval()(batch)
    assert torch.equal(model(batch), wanted)
    assert torch.equal(copy.deepcopy(model)(batch), wanted)
    missing, unexpected = other.load_state_dict(model.state_dict())
    assert not missing
    assert not unexpected
    assert torch.equal(other(batch), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_no_dense_numbers(name):
    batch = make_clicks(8)
    model = make(name, make_tables(), dense_features=0)
    logits_BK = model(batch.dense_BF[:, :0], batch.sparse)
    assert logits_BK.shape == (8, 1)
    assert bool(logits_BK.isfinite().all())
    logits_BK.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.numel())


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_batch(name):
    model = make(name, make_tables())
    logits_BK = model(make_clicks(0))
    assert logits_BK.shape == (0, 1)
    logits_BK.sum().backward()


@pytest.mark.parametrize("name", ["wide_deep", "dcn", "dcn_low_rank", "dcn_parallel", "two_tower"])
def test_tables_of_different_dims(name):
    tables = [Table(name="user", rows=20, dim=4), Table(name="item", rows=30, dim=7)]
    assert make(name, tables)(make_clicks(8)).shape == (8, 1)


@pytest.mark.parametrize("name", MODELS)
def test_bad_batches(name):
    model, batch = make(name, make_tables()), make_clicks(8)
    with pytest.raises(BatchError, match="Batch, or dense numbers"):
        model(batch.dense_BF)
    with pytest.raises(BatchError, match=r"dense numbers \(8, 2\)"):
        model(batch.dense_BF[:, 1:], batch.sparse)


@pytest.mark.parametrize("name", MODELS)
def test_bad_tables(name):
    with pytest.raises(SpecError, match="table 's' keeps sequences"):
        make(name, [Table(name="s", rows=20, dim=8, pooling=Pooling.SEQUENCE)])


@pytest.mark.parametrize("name", CLICK_MODELS)
def test_bad_sizes(name):
    with pytest.raises(SpecError, match=r"dense_features=-1|an Mlp got sizes"):
        make(name, make_tables(), dense_features=-1)


@pytest.mark.parametrize("model", [DeepFM, WideDeep, DCN])
def test_no_layers(model):
    with pytest.raises(SpecError, match="an Mlp got sizes"):
        model(Embeddings(make_tables()), DENSE, deep=())
