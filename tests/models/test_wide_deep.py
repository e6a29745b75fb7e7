"""Wide & Deep against its equation, and that each part learns."""

import copy
import dataclasses

import pytest
import torch
from clicks import DENSE, learned_auc, make_clicks, make_tables, randomize
from plain_layers import plain_mlp
from torch import nn

from rowwise import Constant, Embeddings, Ftrl, Jagged, Pooling, RowType, Sgd, SpecError, Table, WideDeep, wide_tables


def test_wide_tables():
    table = Table(
        name="t", rows=9, dim=32, pooling=Pooling.MEAN, optimizer=Sgd(lr=2.0), row_type=RowType.INT8, column_group=16
    )
    want = Table(
        name="t_wide", rows=9, dim=2, features=("t",), pooling=Pooling.MEAN, optimizer=Sgd(lr=2.0), init=Constant()
    )
    assert wide_tables([table], 2) == [want]
    assert wide_tables([table], optimizer=Ftrl())[0].optimizer == Ftrl()


def test_the_equation():
    torch.manual_seed(0)
    model, batch = WideDeep(Embeddings(make_tables(4), seed=1), DENSE, deep=(6, 2)), make_clicks(5)
    randomize(model.wide)
    tables = model.wide.embeddings
    size, ids = 5, batch.sparse
    wanted = batch.dense_BF.double() @ model.wide.weight.double().t() + model.wide.bias.double()
    offsets = ids.offsets().tolist()
    for f, name in enumerate(ids.features):
        table = "word_wide" if name in ("said", "read") else f"{name}_wide"
        for b in range(size):
            bag = ids.values_N[offsets[f * size + b] : offsets[f * size + b + 1]]
            for i in bag:  # the mean of one id is itself
                wanted[b] += tables.table(table)[i].double() / len(bag)
    x_BS = torch.cat((batch.dense_BF, model.embeddings(ids).values()), 1).double()
    wanted = wanted + plain_mlp(copy.deepcopy(model.deep).double(), x_BS)
    torch.testing.assert_close(model(batch).double(), wanted, rtol=1e-5, atol=1e-5)


def with_cross(batch):
    """The batch with a feature for user and item together."""
    ids, size = batch.sparse, len(batch.dense_BF)
    crossed_B = ids.values_N[:size] * 30 + ids.values_N[size : 2 * size]
    sparse = Jagged(
        features=("user_x_item", *ids.features),
        values_N=torch.cat((crossed_B, ids.values_N)),
        lengths_FB=torch.cat((torch.ones(size, dtype=torch.int64), ids.lengths_FB)),
    )
    return dataclasses.replace(batch, sparse=sparse)


class Crossed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(with_cross(batch))


@pytest.mark.slow
def test_it_learns():
    torch.manual_seed(0)
    tables, ftrl = make_tables(), Ftrl(lr=0.1, beta=1e-6)
    assert learned_auc(WideDeep(Embeddings(tables), DENSE, deep=(16, 1))) > 0.85
    # The linear part alone knows nothing of pairs, until they have ids of their own.
    alone = WideDeep(Embeddings(tables), DENSE, deep=(1,), wide=wide_tables(tables, optimizer=ftrl))
    cross = Table(name="user_x_item", rows=600, dim=1, optimizer=ftrl, init=Constant())
    crossed = WideDeep(Embeddings(tables), DENSE, deep=(1,), wide=[*wide_tables(tables, optimizer=ftrl), cross])
    linear = learned_auc(alone)
    assert 0.7 < linear < 0.8
    assert learned_auc(Crossed(crossed)) > 0.85


def test_l1_makes_weights_sparse():
    torch.manual_seed(0)
    tables = make_tables()
    model = WideDeep(Embeddings(tables), DENSE, deep=(4, 1), wide=wide_tables(tables, optimizer=Ftrl(lr=0.5, l1=1e3)))
    learned_auc(model, batches=3)
    assert all(not p.any() for p in model.wide.embeddings.parameters())


def test_wide_tables_that_do_not_fit():
    embeddings = Embeddings(make_tables())
    with pytest.raises(SpecError, match="'user' has dim 8"):
        WideDeep(embeddings, DENSE, deep=(4, 2), wide=make_tables())
