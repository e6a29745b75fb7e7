"""DCN-v2 against its equation."""

import copy

import pytest
import torch
from clicks import DENSE, make_clicks, make_tables
from hypothesis import given
from hypothesis import strategies as st
from plain_layers import plain_linear, plain_mlp

from rowwise import DCN, Embeddings, SpecError
from rowwise.models.dcn import Cross


@given(st.integers(0, 4), st.integers(1, 9), st.none() | st.integers(1, 4))
def test_one_cross_layer(batch, width, rank):
    torch.manual_seed(width)
    cross, first_BS, x_BS = Cross(width, rank), torch.randn(batch, width), torch.randn(batch, width)
    if rank is None:
        matrix_SS, bias_S = cross.map.weight.double(), cross.map.bias.double()
    else:
        thin, wide = cross.map
        matrix_SS, bias_S = wide.weight.double() @ thin.weight.double(), wide.bias.double()
        assert torch.linalg.matrix_rank(matrix_SS) <= rank
    wanted = torch.empty(batch, width, dtype=torch.float64)
    for b in range(batch):
        for s in range(width):
            mapped = sum(matrix_SS[s, k] * x_BS[b, k].double() for k in range(width)) + bias_S[s]
            wanted[b, s] = first_BS[b, s].double() * mapped + x_BS[b, s].double()
    torch.testing.assert_close(cross(first_BS, x_BS).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_the_equation(structure, rank):
    torch.manual_seed(0)
    model = DCN(Embeddings(make_tables(4), seed=1), DENSE, deep=(7, 6, 2), crosses=2, rank=rank, structure=structure)
    batch = make_clicks(5)
    found = model(batch)
    first_BS = x_BS = torch.cat((batch.dense_BF, model.embeddings(batch.sparse).values()), 1).double()
    plain = copy.deepcopy(model).double()
    for cross in plain.crosses:
        mapped = x_BS
        for layer in [cross.map] if rank is None else cross.map:
            mapped = plain_linear(layer, mapped)
        x_BS = first_BS * mapped + x_BS
    if structure == "stacked":
        wanted = plain_mlp(plain.deep, x_BS)
    else:
        wanted = plain_linear(plain.top, torch.cat((x_BS, plain_mlp(plain.deep, first_BS)), 1))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_what_cannot_be():
    embeddings = Embeddings(make_tables())
    with pytest.raises(SpecError, match="least 1, or None"):
        DCN(embeddings, DENSE, rank=0)
    with pytest.raises(SpecError, match="least one cross layer"):
        DCN(embeddings, DENSE, crosses=0)
    with pytest.raises(SpecError, match="one of 'stacked', 'parallel'"):
        DCN(embeddings, DENSE, structure="side")
