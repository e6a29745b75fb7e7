"""Operations and parameters of models are those of closed forms."""

from itertools import pairwise

import pytest
import torch
from clicks import DENSE, make_clicks, make_tables

from rowwise import DHEN, DLRM, DeepFM, Embeddings, FinalMLP, WideDeep
from rowwise.models.cost import activation_bytes, model_cost
from rowwise.models.dhen import INTERACTIONS

M, D, SIZE = 5, 8, 7  # a vector of dense numbers and four features


def mlp(*sizes):
    return 2 * sum(a * b for a, b in pairwise(sizes))


FLOPS = {  # of an interaction of M vectors of D into N
    "attention": lambda n: 2 * M * (3 * D * D + D * D + 8 * D * D) + 4 * M * M * D + 2 * n * M * D,
    "convolution": lambda n: 2 * 25 * M * D + 2 * n * M * D,
    "cross": lambda n: 2 * (M * D) ** 2 + (0 if n == M else 2 * n * M * D),
    "dot": lambda n: M * (M - 1) // 2 * 2 * D + mlp(M * (M - 1) // 2, 128, n * D),
    "factorization": lambda n: 2 * 2 * M * D * 8 + mlp(M * 8, 128, n * D),
    "linear": lambda n: 2 * n * M * D,
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", FLOPS)
@pytest.mark.parametrize("out", [3, M])
def test_a_layer_of_each_interaction(kind, out):
    torch.manual_seed(0)
    model = DHEN(Embeddings(make_tables(D)), DENSE, top=(9, 1), layers=1, interactions=(kind,), vectors=out)
    dense, shortcut = mlp(DENSE, 4 * D, D), 0 if out == M else 2 * out * M * D
    found = model_cost(model, make_clicks(SIZE))
    assert found.flops == dense + FLOPS[kind](out) + shortcut + mlp(out * D, 9, 1)
    assert found.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_all_interactions_have_a_closed_form():
    assert set(FLOPS) == set(INTERACTIONS)


def test_a_module_that_returns_a_parameter():
    model = FinalMLP(Embeddings(make_tables(D)), DENSE, (6,), (4,), gate=3)
    gates, streams = 2 * mlp(D, 3, M * D), mlp(M * D, 6) + mlp(M * D, 4)
    bilinear = 2 * 2 * 3 * 2 + 2 * 2 * 2  # two heads
    wanted = SIZE * (mlp(DENSE, 4 * D, D) + streams + mlp(10, 1) + bilinear) + gates
    assert model_cost(model, make_clicks(SIZE)).flops == wanted // SIZE


@pytest.mark.usefixtures("library")
def test_pairs_of_other_models():
    dlrm = DLRM(Embeddings(make_tables(D)), DENSE, bottom=(6, D), top=(5, 1))
    assert model_cost(dlrm, make_clicks(SIZE)).flops == mlp(DENSE, 6, D) + 10 * 2 * D + mlp(D + 10, 5, 1)
    deepfm = DeepFM(Embeddings(make_tables(D)), DENSE, deep=(5, 1))
    pairs = 2 * DENSE * D + 2 * (D + 4 * D) + 2 * DENSE
    assert model_cost(deepfm, make_clicks(SIZE)).flops == mlp(DENSE + 4 * D, 5, 1) + pairs


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("hidden", [(6,), (6, 5), (20, 7, 3)])
def test_an_mlp_keeps_the_inputs_of_its_layers(hidden):
    """Beside what is kept without hidden layers; nothing of them, if the MLP runs again, until it does."""
    least, found, again = (
        activation_bytes(model, make_clicks(64), [model.deep] if is_unit else [])
        for sizes, is_unit in (((1,), False), ((*hidden, 1), False), ((*hidden, 1), True))
        for model in [WideDeep(Embeddings(make_tables(D)), DENSE, deep=sizes)]
    )
    assert found[0] - least[0] == 4 * sum(hidden)
    assert again == found == (found[0], found[0])  # the only layer that runs again is the largest one


def test_stacked_layers_keep_less_if_they_run_again():
    """Each of four equal layers keeps some inside; at a time one of them has it."""
    torch.manual_seed(0)
    model = DHEN(Embeddings(make_tables(D)), DENSE, top=(1,), layers=4, interactions=("attention",))
    layers = list(model.layers)
    found = activation_bytes(model, make_clicks(64), layers)
    three = DHEN(Embeddings(make_tables(D)), DENSE, top=(1,), layers=3, interactions=("attention",))
    less = activation_bytes(three, make_clicks(64), list(three.layers))
    output = 4 * M * D
    assert found[1] - less[1] == output  # of one layer more, its input
    assert found[0] - less[0] > 10 * output
