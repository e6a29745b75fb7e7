"""A step on a GPU, without one: numbers on the meta device have no values, so a step that waits for them raises."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn
from trainings import work_of

from rowwise import Adam, Batch, Embeddings, Jagged, Pooling, RowWiseAdagrad, Table, make_embeddings
from rowwise.base.errors import DeviceError, IdError, TableMemoryError, UnknownIdWarning
from rowwise.ingest.batcher import Position
from rowwise.models.dlrm import DLRM
from rowwise.tables.batch import SharedBags
from rowwise.tables.idmaps import HashIds
from rowwise.tables.ids.mapped import MappedTable
from rowwise.tables.ops.faults import FaultWord
from rowwise.train.groups import UpdateGroups, check_and_pin
from rowwise.train.on_device import LateNumbers, check_on_host, clip_and_mask, to_device
from rowwise.train.optimizers import make_optimizer
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseSgd
from rowwise.train.step import step

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
    context = work_of(model, device="meta", optimizer=optimizer, clip=clip)
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
    context = work_of(model, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        step(context, [make_batch().to("meta")], 1)


def test_ids_are_checked_before_they_are_copied():
    model = make_model("cpu")
    with pytest.raises(IdError, match="table 'user': feature 'friend'"):
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
        clip_and_mask(loss.detach() * (math.inf if bad == "loss" else 1.0), list(layer.parameters()), optimizer, None)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert not FaultWord.of(torch.device("cpu")).begin().any()


@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
def test_judged_gradients_are_clipped_as_on_the_cpu(clip):
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        p.grad = torch.rand_like(p)
        q.grad = p.grad.clone()
    numbers = clip_and_mask(torch.tensor(0.5), list(layer.parameters()), torch.optim.SGD(layer.parameters()), clip)
    assert isinstance(numbers, LateNumbers)
    loss, norm = numbers.read()
    want = float(torch.nn.utils.get_total_norm([q.grad for q in other.parameters()]))
    assert (loss, norm) == (0.5, pytest.approx(want))
    factor = 1.0 if clip is None else min(1.0, clip / want)
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad * factor)


MAPPED = (
    Table(name="user", rows=5000, dim=8, features=("user", "friend"), id_map=HashIds(rows=50)),
    Table(name="item", rows=300, dim=8, pooling=Pooling.MEAN, id_map=HashIds(rows=20)),
)


class OneBatch:
    """A batcher of one batch again and again."""

    def __init__(self, batch, context):
        self.batch, self.change = batch, partial(check_and_pin, context)

    def __iter__(self):
        while True:
            yield self.change(self.batch)

    def state(self):
        return Position()


@pytest.mark.parametrize("tables", [TABLES, MAPPED])
def test_a_batch_is_checked_and_mapped_on_the_host(tables):
    """Read by the groups of a run, the step on it waits for nothing; maps stay on the host."""
    model = DLRM(make_embeddings(tables, device="meta"), dense_features=4, bottom=(8, 8), top=(8, 1)).to("meta")
    assert all(one.words.device.type == "cpu" for one in model.modules() if isinstance(one, MappedTable))
    context = work_of(model, device="meta")
    groups = UpdateGroups(OneBatch(make_batch(), context), context)
    for number in (1, 2):
        group = groups.read()
        assert groups.error is None
        step(context, group.batches, number)
    wrong = UpdateGroups(OneBatch(make_batch(friend=99_999), context), context)
    assert not wrong.read().batches
    assert isinstance(wrong.error, IdError)
    assert "feature 'friend', sample 0, position 0: id 99999" in str(wrong.error)


def test_a_batch_mapped_on_the_host_has_the_same_vectors():
    embeddings, batch = make_embeddings(MAPPED, seed=3), make_batch()
    copied = batch.map_tensors(torch.clone)
    embeddings.map_on_host(batch.sparse, copied.sparse, torch.clone)
    ahead = embeddings(copied.sparse)
    assert torch.equal(ahead.matrix_BS, embeddings(batch.sparse).matrix_BS)


def test_the_last_row_of_a_table_past_32_bits_replaces_a_narrow_id():
    table = Table(name="t", rows=1 << 33, dim=8, unknown="last_row")
    tables = make_embeddings([table], device="meta")
    sparse = Jagged(features=("t",), values_N=torch.tensor([-1, 5], dtype=torch.int32), lengths_FB=torch.tensor([1, 1]))
    batch = Batch(dense_BF=torch.zeros(2, 1), sparse=sparse, labels_BK=torch.zeros(2, 1))
    with pytest.warns(UnknownIdWarning):
        assert check_on_host([tables], batch).sparse.values_N.tolist() == [(1 << 33) - 1, 5]


def test_a_batch_of_an_evaluation_is_checked_like_one_of_a_step():
    model = DLRM(make_embeddings(TABLES), dense_features=4, bottom=(8, 8), top=(8, 1))
    with pytest.warns(UnknownIdWarning):
        assert to_device(make_batch(item=77), model, "meta").sparse.values_N.is_meta
    assert model.embeddings.unknown_ids == {"item": 18}
    with pytest.raises(IdError, match="feature 'friend', sample 0"):
        to_device(make_batch(friend=50), model, "meta")
    assert to_device(make_batch(friend=50), model, "cpu").sparse.values_N.tolist() == [4] * 6 + [50] * 12 + [4] * 18
    mapped = DLRM(make_embeddings(MAPPED), dense_features=4, bottom=(8, 8), top=(8, 1))
    assert to_device(make_batch(friend=4999), mapped, "meta").sparse.values_N.is_meta  # the map checks its ids


def test_shared_bags_are_expanded_before_they_are_copied():
    batch = make_batch()
    distinct = Jagged(features=("item",), values_N=torch.tensor([4, 5]), lengths_FB=torch.ones(2, dtype=torch.int64))
    own = Jagged(
        features=("user",), values_N=torch.full((6,), 4), lengths_FB=torch.ones(6, dtype=torch.int64),
        shared=SharedBags(jagged=distinct, inverse_B=torch.tensor([0, 0, 0, 1, 1, 1])),
    )  # fmt: skip
    checked = check_on_host([make_model("cpu").embeddings], dataclasses.replace(batch, sparse=own))
    assert checked.sparse.shared is None
    assert checked.sparse.values_N.tolist() == [4] * 6 + [4] * 3 + [5] * 3


class FullDevice(torch.Tensor):
    """Memory whose device has no room for it."""

    def to(self, *_args):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_tables_that_a_gpu_has_no_room_for_are_named():
    arena = Embeddings(TABLES).arena
    arena.state = arena.state.as_subclass(FullDevice)
    with pytest.raises(TableMemoryError, match=r"2 tables need 0.0"):
        arena.to(torch.device("meta"))
