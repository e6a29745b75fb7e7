"""A step on a GPU, without one: numbers on the meta device have no values, so a step that waits for them raises."""

import math

import pytest
import torch
from torch import nn

from rowwise import Adam, Batch, Embeddings, Jagged, Pooling, RowWiseAdagrad, Table
from rowwise.errors import DeviceError, IdError, UnknownIdWarning
from rowwise.models.dlrm import DLRM
from rowwise.ops.faults import FaultWord
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.on_device import LateNumbers, check_on_host, judge
from rowwise.train.optimizers import make_optimizer
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseSgd, Training
from rowwise.train.step import StepContext, step

TABLES = (
    Table(name="user", rows=50, dim=8, features=("user", "friend"), optimizer=RowWiseAdagrad()),
    Table(name="item", rows=30, dim=8, pooling=Pooling.MEAN, optimizer=Adam(), unknown="last_row"),
)


def make_batch(samples=6, **ids):
    features = {"user": 1, "friend": 2, "item": 3}
    values = [torch.full((samples * n,), ids.get(name, 4)) for name, n in features.items()]
    lengths = [torch.full((samples,), n) for n in features.values()]
    sparse = Jagged(features=tuple(features), values_N=torch.cat(values), lengths_FB=torch.cat(lengths))
    return Batch(dense_BF=torch.rand(samples, 4), sparse=sparse, labels_BK=torch.ones(samples, 1))


def make_model(device):
    return DLRM(Embeddings(TABLES, device=device), dense_features=4, bottom=(8, 8), top=(8, 1)).to(device)


@pytest.mark.parametrize("optimizer", [DenseSgd(lr=0.1), DenseAdagrad(lr=0.1), DenseAdam(lr=0.1)])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_waits_for_nothing(optimizer, clip):
    model = make_model("meta")
    settings = Training(device="meta", optimizer=optimizer, clip=clip)
    context = StepContext.create(model, Clicks(model), settings, Breakdown())
    assert context.runs_ahead
    batch = context.copies.start(make_batch())
    for number in (1, 2):
        stepped = step(context, [batch], number)
        assert stepped.samples == 6


def test_a_wait_is_found():
    """The objective of this model looks at a number of the batch."""

    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.dlrm = make_model("meta")

        def forward(self, batch):
            return self.dlrm(batch) * float(batch.dense_BF.sum())

    model = Waiting()
    context = StepContext.create(model, Clicks(model), Training(device="meta"), Breakdown())
    with pytest.raises(RuntimeError, match="meta"):
        step(context, [make_batch().to("meta")], 1)


def test_ids_are_checked_before_they_are_copied():
    model = make_model("cpu")
    with pytest.raises(IdError, match=r"table 'user': feature 'friend', sample 0, position 0: id 50 is not in 0\.\.49"):
        check_on_host([model.embeddings], make_batch(friend=50))


def test_unknown_ids_become_the_last_row_where_a_table_allows_it():
    model, batch = make_model("cpu"), make_batch(item=77)
    with pytest.warns(UnknownIdWarning, match="18 ids of feature 'item'"):
        checked = check_on_host([model.embeddings], batch)
    assert checked.sparse.values_N[-18:].tolist() == [29] * 18
    assert batch.sparse.values_N[-18:].tolist() == [77] * 18
    assert model.embeddings.unknown_ids == {"item": 18}
    assert check_on_host([model.embeddings], make_batch()).sparse.values_N.tolist() == [4] * 36


@pytest.mark.parametrize("settings", [DenseSgd(lr=0.1), DenseAdagrad(lr=0.1), DenseAdam(lr=0.1, weight_decay=0.1)])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_no_dense_weight(settings, bad):
    """On the CPU the words raise at once; on a GPU at the next operator."""
    layer = nn.Linear(3, 2)
    optimizer = make_optimizer(settings, list(layer.parameters()))
    before = [p.detach().clone() for p in layer.parameters()]
    loss = layer(torch.ones(4, 3)).sum()
    loss.backward()
    if bad == "gradient":
        layer.weight.grad[0, 0] = math.nan
    with pytest.raises(DeviceError, match="not finite"):
        judge(loss.detach() * (math.inf if bad == "loss" else 1.0), list(layer.parameters()), optimizer, None)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert not FaultWord.of(torch.device("cpu")).begin().any()


@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
def test_judged_gradients_are_clipped_as_on_the_cpu(clip):
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        p.grad = torch.rand_like(p)
        q.grad = p.grad.clone()
    numbers = judge(torch.tensor(0.5), list(layer.parameters()), torch.optim.SGD(layer.parameters()), clip)
    assert isinstance(numbers, LateNumbers)
    loss, norm = numbers.read()
    want = float(torch.nn.utils.get_total_norm([q.grad for q in other.parameters()]))
    assert (loss, norm) == (0.5, pytest.approx(want))
    factor = 1.0 if clip is None else min(1.0, clip / want)
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad * factor)
