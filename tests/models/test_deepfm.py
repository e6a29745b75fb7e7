"""DeepFM against its equation."""

import copy

import pytest
import torch
from clicks import DENSE, make_clicks, make_tables, randomize
from hypothesis import given
from hypothesis import strategies as st
from plain_layers import plain_mlp

from rowwise import DeepFM, Embeddings, SpecError, Table
from rowwise.models.deepfm import pair_dots


def literal_pairs(dense_BF, vectors_FD, pooled_BS):
    """Every pair by itself, in float64."""
    dim = vectors_FD.shape[1]
    out = torch.zeros(len(pooled_BS), 1, dtype=torch.float64)
    for b in range(len(pooled_BS)):
        vectors = [x * v_D for x, v_D in zip(dense_BF[b].double(), vectors_FD.double(), strict=True)]
        vectors += list(pooled_BS[b].double().split(dim))
        for i in range(len(vectors)):
            for j in range(i):
                out[b] += vectors[i] @ vectors[j]
    return out


@given(
    st.integers(0, 3), st.integers(0, 4), st.integers(1, 4), st.integers(1, 9), st.sampled_from(["float32", "float64"])
)
def test_the_dots_of_all_pairs(batch, dense, tables, dim, dtype):
    torch.manual_seed(batch + dense)
    kind = getattr(torch, dtype)
    inputs = [torch.randn(shape, dtype=kind) for shape in ((batch, dense), (dense, dim), (batch, tables * dim))]
    wanted = literal_pairs(*inputs)
    torch.testing.assert_close(
        pair_dots(*inputs).double(), wanted, rtol=1e-4, atol=1e-4 if kind == torch.float32 else 1e-12
    )


def test_dots_under_autocast_are_not_rounded():
    torch.manual_seed(0)
    inputs = torch.randn(4, 3), torch.randn(3, 8), torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = pair_dots(inputs[0].bfloat16(), *inputs[1:])
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, pair_dots(inputs[0].bfloat16().float(), *inputs[1:]))


def test_the_equation():
    torch.manual_seed(0)
    model, batch = DeepFM(Embeddings(make_tables(4), seed=1), DENSE, deep=(6, 2)), make_clicks(5)
    randomize(model.first)
    vectors, weights = model.embeddings(batch.sparse), model.first.embeddings(batch.sparse)
    first = batch.dense_BF.double() @ model.first.weight.double().t() + model.first.bias.double()
    first = first + sum(weights[f].double() for f in ("user", "item", "said", "read"))
    pooled_BS = vectors.values()
    deep = plain_mlp(copy.deepcopy(model.deep).double(), torch.cat((batch.dense_BF, pooled_BS), 1).double())
    wanted = first + literal_pairs(batch.dense_BF, model.dense_vectors, pooled_BS) + deep
    torch.testing.assert_close(model(batch).double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_first_order_has_its_own_tables():
    tables = make_tables(4)
    model = DeepFM(Embeddings(tables), DENSE, deep=(6, 2))
    first = model.first.embeddings.tables
    assert [t.name for t in first] == ["user_wide", "item_wide", "word_wide"]
    for table, wide in zip(tables, first, strict=True):
        assert (wide.rows, wide.dim, wide.feature_names) == (table.rows, 2, table.feature_names)
        assert (wide.pooling, wide.optimizer) == (table.pooling, table.optimizer)


def test_tables_that_do_not_fit():
    tables = [Table(name="a", rows=20, dim=4), Table(name="b", rows=20, dim=8)]
    with pytest.raises(SpecError, match="'b' has dim 8"):
        DeepFM(Embeddings(tables), DENSE)
