"""What all models promise, whatever they compute."""

import copy

import pytest
import torch
from clicks import DENSE, make_clicks, make_tables, step
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


def dlrm(tables, dense_features=DENSE, tasks=1):
    return DLRM(Embeddings(tables), dense_features, bottom=(6, tables[0].dim), top=(5, tasks))


def deepfm(tables, dense_features=DENSE, tasks=1):
    return DeepFM(Embeddings(tables), dense_features, deep=(5, tasks))


def wide_deep(tables, dense_features=DENSE, tasks=1):
    return WideDeep(Embeddings(tables), dense_features, deep=(5, tasks))


def dcn(tables, dense_features=DENSE, tasks=1):
    return DCN(Embeddings(tables), dense_features, deep=(5, tasks))


def dcn_low_rank(tables, dense_features=DENSE, tasks=1):
    return DCN(Embeddings(tables), dense_features, deep=(5, tasks), rank=2)


def dcn_parallel(tables, dense_features=DENSE, tasks=1):
    return DCN(Embeddings(tables), dense_features, deep=(5, tasks), structure="parallel")


def gdcn(tables, dense_features=DENSE, tasks=1):
    return DCN(Embeddings(tables), dense_features, deep=(5, tasks), gated=True)


def dhen(tables, dense_features=DENSE, tasks=1):
    kinds = ("attention", "convolution", "cross", "factorization", "linear")
    return DHEN(Embeddings(tables), dense_features, (24, tasks), interactions=kinds, ensemble="weighted_sum")


def wukong(tables, dense_features=DENSE, tasks=1):
    return Wukong(Embeddings(tables), dense_features, (5, tasks), vectors=4, rank=2, hidden=(5,))


def masknet(tables, dense_features=DENSE, tasks=1):
    return MaskNet(Embeddings(tables), dense_features, (5, tasks), blocks=(5, 6))


def final_mlp(tables, dense_features=DENSE, tasks=1):
    return FinalMLP(Embeddings(tables), dense_features, (6, 4), (4,), tasks=tasks)


def autoint(tables, dense_features=DENSE, tasks=1):
    return AutoInt(Embeddings(tables), dense_features, (5, tasks), width=4)


def xdeepfm(tables, dense_features=DENSE, tasks=1):
    return XDeepFM(Embeddings(tables), dense_features, (5, tasks), products=(4, 3))


def mmoe(tables, dense_features=DENSE, tasks=1):
    return MMoE(Embeddings(tables), dense_features, tasks, expert_sizes=(24,), experts=2, tower=(5,))


def ple(tables, dense_features=DENSE, tasks=1):
    return PLE(Embeddings(tables), dense_features, tasks, expert_sizes=(24,), levels=2, tower=(5,))


def two_tower(tables, dense_features=DENSE, tasks=1):
    assert tasks == 1
    user = Tower(Embeddings(tables[:1]), min(1, dense_features), (5, 4))
    return TwoTower(user, Tower(Embeddings(tables[1:] or tables), max(0, dense_features - 1), (5, 4)))


FIELD_MODELS = (dhen, wukong, masknet, final_mlp, autoint, xdeepfm)
RANKERS = (dlrm, deepfm, wide_deep, dcn, dcn_low_rank, dcn_parallel, gdcn, *FIELD_MODELS, mmoe, ple)
MODELS = (*RANKERS, two_tower)


def all_embeddings(model: nn.Module) -> list[Embeddings]:
    return [m for m in model.modules() if isinstance(m, Embeddings)]


@pytest.mark.parametrize("make", MODELS)
def test_a_step_moves_all_weights_and_the_touched_rows_only(make):
    torch.manual_seed(0)
    model, batch = make(make_tables()), make_clicks(8)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    learning = [p for p in model.parameters() if p.requires_grad]
    step(model, (model(batch) * torch.randn(8, 1)).sum(), torch.optim.SGD(learning, lr=0.1))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert not torch.equal(parameter, before[name]), name
    bags = dict(zip(batch.sparse.features, batch.sparse.lengths_FB.view(-1, 8).sum(1).tolist(), strict=True))
    ids = dict(zip(bags, batch.sparse.values_N.split(list(bags.values())), strict=True))
    for embeddings in all_embeddings(model):
        for table in embeddings.tables:
            touched = set(torch.cat([ids[f] for f in table.feature_names]).tolist())
            prefix = next(name for name, module in model.named_modules() if module is embeddings)
            moved_R = (embeddings.table(table.name) != before[f"{prefix}.{table.name}"]).any(1)
            assert set(moved_R.nonzero().flatten().tolist()) == touched


@pytest.mark.parametrize("make", RANKERS)
def test_several_tasks(make):
    model, batch = make(make_tables(), tasks=3), make_clicks(8, tasks=3)
    logits_BK = model(batch)
    assert logits_BK.shape == (8, 3)
    assert torch.equal(model(batch.dense_BF, batch.sparse), logits_BK)


@pytest.mark.parametrize("make", MODELS)
def test_copies_and_state(make):
    model, other, batch = make(make_tables()), make(make_tables()), make_clicks(8)
    wanted = model.eval()(batch)
    assert torch.equal(model(batch), wanted)
    assert torch.equal(copy.deepcopy(model)(batch), wanted)
    missing, unexpected = other.load_state_dict(model.state_dict())
    assert not missing
    assert not unexpected
    assert torch.equal(other(batch), wanted)


@pytest.mark.parametrize("make", MODELS)
def test_no_dense_numbers(make):
    batch = make_clicks(8)
    model = make(make_tables(), dense_features=0)
    logits_BK = model(batch.dense_BF[:, :0], batch.sparse)
    assert logits_BK.shape == (8, 1)
    assert bool(logits_BK.isfinite().all())
    logits_BK.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.numel())


@pytest.mark.parametrize("make", MODELS)
def test_an_empty_batch(make):
    model = make(make_tables())
    logits_BK = model(make_clicks(0))
    assert logits_BK.shape == (0, 1)
    logits_BK.sum().backward()


@pytest.mark.parametrize("make", [wide_deep, dcn, dcn_low_rank, dcn_parallel, two_tower])
def test_tables_of_different_dims(make):
    tables = [Table(name="user", rows=20, dim=4), Table(name="item", rows=30, dim=7)]
    assert make(tables)(make_clicks(8)).shape == (8, 1)


@pytest.mark.parametrize("make", MODELS)
def test_bad_batches(make):
    model, batch = make(make_tables()), make_clicks(8)
    with pytest.raises(BatchError, match="Batch, or dense numbers"):
        model(batch.dense_BF)
    with pytest.raises(BatchError, match=r"dense numbers \(8, 2\)"):
        model(batch.dense_BF[:, 1:], batch.sparse)


@pytest.mark.parametrize("make", MODELS)
def test_bad_tables(make):
    with pytest.raises(SpecError, match="table 's' keeps sequences"):
        make([Table(name="s", rows=20, dim=8, pooling=Pooling.SEQUENCE)])


@pytest.mark.parametrize("make", [m for m in MODELS if m is not two_tower])
def test_bad_sizes(make):
    with pytest.raises(SpecError, match=r"dense_features=-1|an Mlp got sizes"):
        make(make_tables(), dense_features=-1)


@pytest.mark.parametrize("model", [DeepFM, WideDeep, DCN])
def test_no_layers(model):
    with pytest.raises(SpecError, match="an Mlp got sizes"):
        model(Embeddings(make_tables()), DENSE, deep=())
