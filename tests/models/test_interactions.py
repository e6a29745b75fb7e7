"""Interactions of DHEN against their formulas, spelled out; costs against closed forms."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_layers import plain_linear, plain_mlp, plain_norm
from torch import nn

from rowwise import SpecError
from rowwise.models.dhen import INTERACTIONS, DhenLayer
from rowwise.models.interactions import (
    AttentionInteraction,
    ConvolutionInteraction,
    CrossInteraction,
    DotInteraction,
    FactorizationInteraction,
    LinearInteraction,
)
from rowwise.models.interactions.attention import Attention
from rowwise.recipes.model_configs import Interaction


def plain_mix(module, x):
    return torch.stack([module.map.weight @ sample for sample in x])


def plain_dot(module, x):
    pairs = [(i, j) for i in range(x.shape[1]) for j in range(i)]
    dots = torch.stack([torch.stack([(s[i] * s[j]).sum() for i, j in pairs]) for s in x])
    return plain_mlp(module.mlp, dots).reshape(len(x), -1, x.shape[2])


def plain_map(module, x):
    for layer in [module] if isinstance(module, nn.Linear) else module:
        x = plain_linear(layer, x)
    return x


def plain_cross(module, x):
    flat = x.reshape(len(x), -1)
    y = (flat * plain_map(module.map, flat)).reshape(x.shape)
    return y if isinstance(module.mix, nn.Identity) else plain_mix(module.mix, y)


def plain_attention(module, x):
    """Of one sample after the other, head by head."""
    out = []
    for sample in x:
        q, k, v = plain_linear(module.maps, sample).chunk(3, 1)
        width, heads = q.shape[1] // module.heads, []
        for h in range(module.heads):
            part = slice(h * width, (h + 1) * width)
            heads.append((q[:, part] @ k[:, part].T / math.sqrt(width)).softmax(1) @ v[:, part])
        out.append(torch.cat(heads, 1))
    return torch.stack(out)


def plain_encoder(module, x):
    z = plain_norm(module.norms[0], x + plain_linear(module.project, plain_attention(module.attention, x)))
    return plain_mix(module.mix, plain_norm(module.norms[1], z + plain_mlp(module.feed_forward, z)))


def plain_convolution(module, x):
    weight = module.convolution.weight[0, 0]
    half = weight.shape[0] // 2
    padded = nn.functional.pad(x, (half,) * 4)
    rows = []
    for i in range(x.shape[1]):
        windows = [padded[:, i : i + 2 * half + 1, j : j + 2 * half + 1] for j in range(x.shape[2])]
        rows.append(torch.stack([(window * weight).sum((1, 2)) for window in windows], 1))
    return plain_mix(module.mix, torch.stack(rows, 1))


def plain_factorization(module, x):
    seen = torch.stack([(s @ s.T) @ module.directions for s in x]).reshape(len(x), -1)
    return plain_mlp(module.mlp, plain_norm(module.norm, seen)).reshape(len(x), -1, x.shape[2])


PLAIN = {
    "attention": plain_encoder,
    "convolution": plain_convolution,
    "cross": plain_cross,
    "dot": plain_dot,
    "factorization": plain_factorization,
    "linear": plain_mix,
}


def test_all_have_a_formula():
    assert set(PLAIN) == set(INTERACTIONS) == set(get_args(Interaction))


@pytest.mark.parametrize("kind", PLAIN)
@given(batch=st.integers(1, 4), vectors=st.integers(2, 5), out=st.integers(1, 5), dim=st.integers(1, 6))
def test_the_formula(kind, batch, vectors, out, dim):
    torch.manual_seed(dim)
    module = INTERACTIONS[kind](vectors, out, dim).double()
    x = torch.randn(batch, vectors, dim, dtype=torch.float64)
    assert module(x).shape == (batch, out, dim)
    torch.testing.assert_close(module(x), PLAIN[kind](module, x))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionInteraction(4, 2, 6, heads=3),
        lambda: ConvolutionInteraction(4, 2, 6, kernel=3),
        lambda: CrossInteraction(4, 4, 6, rank=2),
        lambda: DotInteraction(4, 2, 6, hidden=()),
        lambda: FactorizationInteraction(4, 2, 6, rank=2, hidden=(3,)),
        lambda: LinearInteraction(4, 2, 6),
    ],
    ids=lambda make: type(make()).__name__,
)
def test_gradients(make):
    torch.manual_seed(0)  # a rectifier has no gradient at 0, to which no value may be near
    module, x = make().double(), torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in module.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *module.parameters()))


@pytest.mark.parametrize("ensemble", ["concat", "sum", "weighted_sum"])
@given(vectors=st.integers(2, 4), out=st.integers(2, 5), dim=st.integers(2, 4))
def test_a_layer(ensemble, vectors, out, dim):
    torch.manual_seed(out)
    kinds = ("linear", "cross")
    layer = DhenLayer(vectors, out, dim, [INTERACTIONS[kind] for kind in kinds], ensemble).double()
    x = torch.randn(3, vectors, dim, dtype=torch.float64)
    found = [PLAIN[kind](module, x) for kind, module in zip(kinds, layer.interactions, strict=True)]
    if ensemble == "weighted_sum":
        layer.weights.data = torch.tensor([2.0, -0.5], dtype=torch.float64)
        found = [2 * found[0], -0.5 * found[1]]
    y = torch.cat(found, 1) if ensemble == "concat" else found[0] + found[1]
    assert isinstance(layer.shortcut, nn.Identity) == (out == vectors)
    shortcut = x if out == vectors else plain_mix(layer.shortcut, x)
    torch.testing.assert_close(layer(x), plain_norm(layer.norm, y + shortcut))


def test_the_order_of_interactions_does_not_matter_to_a_sum():
    torch.manual_seed(0)
    layer = DhenLayer(4, 4, 6, [INTERACTIONS[kind] for kind in PLAIN], "sum").double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    before = layer(x)
    layer.interactions = nn.ModuleList(reversed(layer.interactions))
    torch.testing.assert_close(layer(x), before)


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


@given(vectors=st.integers(2, 9), out=st.integers(1, 9), dim=st.integers(1, 9))
def test_parameters_of_closed_forms(vectors, out, dim):
    m, n, d = vectors, out, dim
    mix = 0 if m == n else n * m
    pairs = m * (m - 1) // 2
    assert parameters(LinearInteraction(m, n, d)) == n * m
    assert parameters(CrossInteraction(m, n, d)) == (m * d) ** 2 + m * d + mix
    assert parameters(CrossInteraction(m, n, d, rank=3)) == 2 * 3 * m * d + m * d + mix
    assert parameters(DotInteraction(m, n, d, hidden=(7,))) == 7 * pairs + 7 + (7 + 1) * n * d
    assert parameters(AttentionInteraction(m, n, d)) == 12 * d * d + 9 * d + 4 * d + n * m
    assert parameters(ConvolutionInteraction(m, n, d, kernel=3)) == 9 + n * m
    found = parameters(FactorizationInteraction(m, n, d, rank=5, hidden=(7,)))
    assert found == 5 * m + 2 * 5 * m + 7 * (5 * m + 1) + (7 + 1) * n * d


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DotInteraction(1, 2, 3), "1 vectors: expected at least 2"),
        (lambda: CrossInteraction(2, 2, 3, rank=0), "rank=0: expected at least 1"),
        (lambda: FactorizationInteraction(2, 2, 3, rank=0), "rank=0: expected at least 1"),
        (lambda: ConvolutionInteraction(2, 2, 3, kernel=4), "kernel=4: expected an odd number"),
        (lambda: Attention(6, 4), "heads=4: expected a divisor of 6"),
        (lambda: DhenLayer(2, 1, 3, [LinearInteraction] * 2), "2 interactions for 1 vectors"),
        (lambda: DhenLayer(2, 2, 3, [], "sum"), "0 interactions for 2 vectors"),
        (lambda: DhenLayer(2, 2, 3, [LinearInteraction], "mean"), "ensemble='mean': expected one of concat, sum"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(SpecError, match=message):
        make()
