"""Models over vectors of one dim against their equations, spelled out, with gradients."""

import math

import pytest
import torch
from clicks import DENSE, make_clicks, make_tables
from models.test_interactions import plain_attention
from plain_layers import plain_linear, plain_mlp, plain_norm

from rowwise import DHEN, PLE, AutoInt, Embeddings, FinalMLP, MaskNet, MMoE, SpecError, Wukong, XDeepFM
from rowwise.models.experts import ExpertLevel, chain_rates
from rowwise.models.interactions import LinearInteraction


def small(kind, **options):
    torch.manual_seed(0)
    return kind(Embeddings(make_tables(4), seed=1), DENSE, **options)


def plain_dhen(model, x):
    for layer in model.layers:
        x = layer(x)  # its own test has the formula
    return plain_mlp(model.top, x.reshape(len(x), -1))


def plain_block(block, x, y):
    return plain_norm(block.norm, plain_linear(block.map, plain_mlp(block.mask, x) * y)).clamp(min=0)


def plain_masknet(model, x):
    flat = x.reshape(len(x), -1)
    y = torch.cat([plain_norm(norm, x[:, k]) for k, norm in enumerate(model.norms)], 1)
    if model.serial:
        for block in model.blocks:
            y = plain_block(block, flat, y)
        return plain_mlp(model.top, y)
    return plain_mlp(model.top, torch.cat([plain_block(block, flat, y) for block in model.blocks], 1))


def plain_final_mlp(model, x):
    flat, out = x.reshape(len(x), -1), []
    for gate, stream in zip(model.gates, model.streams, strict=True):
        vector, mlp = gate
        out.append(plain_mlp(stream, flat * 2 / (1 + (-plain_mlp(mlp, vector.vector[None])).exp())))
    logits = plain_linear(model.linear, torch.cat(out, 1))
    heads, tasks = model.heads, logits.shape[1]
    for head, (one, other) in enumerate(zip(*(o.chunk(heads, 1) for o in out), strict=True)):
        for k in range(tasks):
            width = other.shape[1]
            matrix = model.bilinear[head][:, k * width : (k + 1) * width]
            logits = (
                logits + torch.nn.functional.one_hot(torch.tensor(k), tasks) * ((one @ matrix) * other).sum(1)[:, None]
            )
    return logits


def plain_autoint(model, x):
    y = x
    for layer in model.layers:
        y = (plain_attention(layer.attention, y) + plain_linear(layer.shortcut, y)).clamp(min=0)
    logits = plain_linear(model.top, y.reshape(len(x), -1))
    return logits if model.deep is None else logits + plain_mlp(model.deep, x.reshape(len(x), -1))


def plain_xdeepfm(model, x):
    y, sums = x, []
    for layer in model.layers:
        weights = layer.map.weight.reshape(-1, y.shape[1], x.shape[1])
        new = []
        for matrix in weights:
            pairs = [(i, j) for i in range(y.shape[1]) for j in range(x.shape[1])]
            new.append(sum(matrix[i, j] * y[:, i] * x[:, j] for i, j in pairs))
        y = torch.stack(new, 1)
        sums.append(y.sum(2))
    return plain_linear(model.top, torch.cat(sums, 1)) + plain_mlp(model.deep, x.reshape(len(x), -1))


CASES = [
    (DHEN, {"top": (5, 2), "layers": 2, "vectors": 3}, plain_dhen),
    (DHEN, {"top": (5, 2), "interactions": ("dot", "attention"), "ensemble": "weighted_sum"}, plain_dhen),
    (Wukong, {"top": (5, 2), "hidden": (6,), "rank": 3}, plain_dhen),
    (MaskNet, {"top": (5, 2), "blocks": (4, 6)}, plain_masknet),
    (MaskNet, {"top": (5, 2), "blocks": (4, 6), "structure": "serial"}, plain_masknet),
    (FinalMLP, {"first": (7, 6), "second": (4,), "tasks": 2, "gate": 3}, plain_final_mlp),
    (AutoInt, {"deep": (5, 2), "width": 6, "heads": 3}, plain_autoint),
    (AutoInt, {"deep": (2,), "width": 6, "layers": 1}, plain_autoint),
    (XDeepFM, {"deep": (5, 2), "products": (3, 2)}, plain_xdeepfm),
]


@pytest.mark.parametrize(("kind", "options", "plain"), CASES)
def test_the_equation(kind, options, plain):
    model = small(kind, **options)
    for name, module in model.named_children():
        if name != "embeddings":
            module.double()
    for parameter in model.parameters(recurse=False):
        parameter.data = parameter.data.double()
    x = torch.randn(3, model.fields, model.dim, dtype=torch.float64)
    torch.testing.assert_close(model.logits(x), plain(model, x))


@pytest.mark.parametrize(("kind", "options", "plain"), CASES)
def test_gradients(kind, options, plain):
    model = small(kind, **options).requires_grad_(True)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    x = torch.randn(2, model.fields, model.dim, dtype=torch.float64, requires_grad=True)
    inner = [p for name, p in model.named_parameters() if not name.startswith(("embeddings", "first", "dense."))]
    found = torch.autograd.grad(model.logits(x).square().sum(), [x, *inner])
    wanted = torch.autograd.grad(plain(model, x).square().sum(), [x, *inner])
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)
    assert torch.autograd.gradcheck(model.logits, x)


def test_wukong_is_dhen_with_two_kinds():
    layer = small(Wukong, layers=1, vectors=7).layers[0]
    assert [module.mlp.layers[-1].out_features // 4 for module in layer.interactions[:1]] == [4]
    assert isinstance(layer.interactions[1], LinearInteraction)
    assert layer.interactions[1].map.out_features == 3


@pytest.mark.parametrize(
    ("levels", "own", "shared"), [(1, 1, 2), (2, 1, 2), (1, 2, 0), (2, 2, 0), (1, 0, 1), (1, 0, 3)]
)
def test_progressive_layered_extraction(levels, own, shared):
    """MMoE is a level of shared experts."""
    torch.manual_seed(0)
    embeddings, sizes = Embeddings(make_tables(4), seed=1), {"expert_sizes": (6, 5), "tower": (4,)}
    if own:
        model = PLE(embeddings, DENSE, 3, task_experts=own, shared_experts=shared, levels=levels, **sizes)
    else:
        model = MMoE(embeddings, DENSE, 3, experts=shared, **sizes)
    batch = make_clicks(5, tasks=3)
    x = torch.cat((batch.dense_BF, model.embeddings(batch.sparse).values()), 1)
    tasks, common = [x] * 3, x
    for number, level in enumerate(model.levels):
        mine = [[plain_mlp(expert, tasks[t]) for expert in level.own[t * own : (t + 1) * own]] for t in range(3)]
        ours = [plain_mlp(expert, common) for expert in level.shared]
        new = []
        for t in range(3):
            shares = plain_linear(level.gates[t], tasks[t]).softmax(1)
            new.append(sum(shares[:, [e]] * out for e, out in enumerate([*mine[t], *ours])))
        if number + 1 < levels:
            everyone = [out for experts in mine for out in experts] + ours
            shares = plain_linear(level.shared_gate, common).softmax(1)
            common = sum(shares[:, [e]] * out for e, out in enumerate(everyone))
        tasks = new
    wanted = torch.cat([plain_mlp(tower, out) for tower, out in zip(model.towers, tasks, strict=True)], 1)
    torch.testing.assert_close(model(batch), wanted)


@pytest.mark.parametrize("kind", [MMoE, PLE])
def test_rates_in_a_chain(kind):
    torch.manual_seed(0)
    embeddings, batch = Embeddings(make_tables(4), seed=1), make_clicks(5, tasks=3)
    model = kind(embeddings, DENSE, 3)
    rates = model(batch).double().sigmoid()
    model.chain = True
    chained = model(batch)
    torch.testing.assert_close(chained.double().sigmoid(), rates.cumprod(1), rtol=1e-5, atol=1e-7)
    assert kind(embeddings, DENSE, 3, chain=True).chain


def test_chains_of_any_logits_are_finite():
    logits = torch.tensor([[-90.0, 90.0], [90.0, 90.0], [90.0, -90.0], [0.0, 0.0]], requires_grad=True)
    chained = chain_rates(logits)
    torch.nn.functional.binary_cross_entropy_with_logits(chained, torch.tensor([[0.0, 0.0]] * 4)).backward()
    assert bool(chained.isfinite().all())
    assert bool(logits.grad.isfinite().all())
    torch.testing.assert_close(chained[3], torch.tensor([0.0, -math.log(3.0)]))
    assert torch.autograd.gradcheck(chain_rates, torch.randn(3, 4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda e: DHEN(e, DENSE, layers=0), "layers=0: expected at least one"),
        (
            lambda e: DHEN(e, DENSE, interactions=("dots",)),
            "interaction 'dots': expected one of attention, convolution",
        ),
        (lambda e: DHEN(e, DENSE, interactions=()), "0 interactions for 5 vectors: expected at least one"),
        (lambda e: MaskNet(e, DENSE, blocks=()), "blocks=.*expected the size of at least one"),
        (lambda e: MaskNet(e, DENSE, structure="both"), "structure='both': expected one of parallel, serial"),
        (lambda e: FinalMLP(e, DENSE, (6,), (6,), heads=4), "heads=4: expected a divisor of the last sizes, 6 and 6"),
        (lambda e: AutoInt(e, DENSE, layers=0), "layers=0: expected at least one"),
        (lambda e: AutoInt(e, DENSE, width=5), "heads=2: expected a divisor of 5"),
        (lambda e: XDeepFM(e, DENSE, products=()), "products=.*expected the size of at least one layer"),
        (lambda e: PLE(e, DENSE, 0), "levels=1, tasks=0, expert_sizes=.128, 64.: expected at least one of each"),
        (lambda e: PLE(e, DENSE, 2, expert_sizes=()), "expected at least one of each"),
        (lambda e: FinalMLP(e, DENSE, ()), "expected at least one size of each"),
        (lambda e: PLE(e, DENSE, 2, task_experts=0, shared_experts=0), "0 experts of each task, 0 shared ones"),
        (lambda e: PLE(e, DENSE, 2, task_experts=0, levels=2), "several levels of shared experts only"),
        (lambda e: ExpertLevel(3, (), 2, own=1, shared=1, last=True), "of sizes .*expected at least one"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(SpecError, match=message):
        make(Embeddings(make_tables(4)))
