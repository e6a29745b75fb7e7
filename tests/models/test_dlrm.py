"""DLRM against its equation in plain torch."""

import copy

import pytest
import torch
from plain_layers import plain_mlp
from torch import nn

from rowwise import DLRM, Batch, Embeddings, Jagged, Pooling, Sgd, SpecError, Table
from rowwise.tables.ops import reference


def make(top: tuple[int, ...] = (16, 1)) -> DLRM:
    torch.manual_seed(0)
    tables = [
        Table(name="a", rows=20, dim=8, optimizer=Sgd(lr=0.1)),
        Table(name="b", rows=30, dim=8, features=("x", "y"), pooling=Pooling.MEAN, optimizer=Sgd(lr=0.1)),
    ]
    return DLRM(Embeddings(tables, seed=1), 5, bottom=(12, 8), top=top)


def make_batch() -> Batch:
    sparse = Jagged.from_lists({"x": [[1, 2], [], [3]], "a": [[4], [5], [6]], "y": [[7], [8, 9], [0]]})
    return Batch(dense_BF=torch.randn(3, 5), sparse=sparse, labels_BK=torch.tensor([[1.0], [0.0], [1.0]]))


def spelled_out(model: DLRM, batch: Batch) -> torch.Tensor:
    bottom_BD = plain_mlp(model.bottom, batch.dense_BF)
    return plain_mlp(model.top, reference.interact(bottom_BD, model.embeddings(batch.sparse).values()))


def test_the_equation():
    model, batch = make(), make_batch()
    other = copy.deepcopy(model)
    torch.testing.assert_close(model(batch), spelled_out(other, batch))
    for one, logits_BK in ((model, model(batch)), (other, spelled_out(other, batch))):
        nn.functional.binary_cross_entropy_with_logits(logits_BK, batch.labels_BK).backward()
        one.embeddings.update()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert (mine.grad is None) == name.startswith("embeddings.")
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.slow
def test_it_learns_under_autocast():
    model, batch = make(), make_batch()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BK = model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_BK.float(), batch.labels_BK)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.embeddings.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_tables_that_do_not_fit():
    narrow = Embeddings([Table(name="a", rows=20, dim=4, optimizer=Sgd())])
    with pytest.raises(SpecError, match="'a' has dim 4"):
        DLRM(narrow, 5, bottom=(12, 8))


def test_without_dense_numbers_the_first_vector_is_learned():
    batch = make_batch()
    model = DLRM(Embeddings(make().embeddings.tables, seed=1), 0, bottom=(12, 8), top=(1,))
    vector_D = model.bottom.vector
    pooled_BS = model.embeddings(batch.sparse).values()
    (last,) = model.top.layers
    expected = nn.functional.linear(reference.interact(vector_D.expand(3, 8), pooled_BS), last.weight, last.bias)
    torch.testing.assert_close(model(batch.dense_BF[:, :0], batch.sparse), expected)
    model(batch.dense_BF[:, :0], batch.sparse).sum().backward()
    assert vector_D.grad.count_nonzero() == 8
