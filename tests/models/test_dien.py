"""DIEN against its equations, sample by sample and step by step, and its auxiliary loss."""

import pytest
import torch
from clicks import DENSE, step
from equations import check_equations
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_layers import plain_mlp
from torch.nn import functional as F

from rowwise import DIEN, Batch, Embeddings, Jagged, Pooling, SpecError, Table
from rowwise.models.dien import next_item_losses
from rowwise.models.inference import inference_mode
from rowwise.train.objective import Clicks

HISTORIES = {"seen": "item", "brands": "brand"}
IDS = st.lists(st.integers(0, 19), max_size=5)
BAGS = st.fixed_dictionaries(
    {name: IDS for name in HISTORIES} | {name: IDS.map(lambda x: x[:1]) for name in ("item", "brand")} | {"user": IDS}
)
SAMPLE = {"item": [3], "seen": [3, 4, 9], "brand": [5], "brands": [6], "user": [1, 2]}


def make_dien(dim=6, tasks=1, dense_features=DENSE, **options):
    item = Table(name="item", rows=20, dim=dim, features=("item", "seen"), pooling=Pooling.SEQUENCE)
    brand = Table(name="brand", rows=20, dim=3, features=("brand", "brands"), pooling=Pooling.SEQUENCE)
    user = Table(name="user", rows=20, dim=5, pooling=Pooling.MEAN)
    options = {"histories": HISTORIES} | options
    return DIEN(Embeddings([item, brand, user]), dense_features, (7, tasks), **options)


def make_batch(samples, dense_features=DENSE, labels=0.0):
    bags = {name: [sample[name] for sample in samples] for name in samples[0]}
    return Batch(
        dense_BF=torch.randn(len(samples), dense_features, generator=torch.Generator().manual_seed(1)),
        sparse=Jagged.from_lists(bags),
        labels_BK=torch.full((len(samples), 1), labels),
    )


def plain_gru(gru, inputs, scales):
    """The states after each input; h_0 is 0."""
    (w, b), u = (gru.input.weight, gru.input.bias), gru.recurrent.weight
    states, h = [], torch.zeros(u.shape[1])
    for x, scale in zip(inputs, scales, strict=True):
        (wu, wr, wc), (bu, br, bc), (uu, ur, uc) = w.chunk(3), b.chunk(3), u.chunk(3)
        update = torch.sigmoid(wu @ x + uu @ h + bu) * scale
        reset = torch.sigmoid(wr @ x + ur @ h + br)
        h = (1 - update) * h + update * torch.tanh(wc @ x + reset * (uc @ h) + bc)
        states.append(h)
    return states


def plain_interest(layers, target, rows):
    """The last state of the AUGRU."""
    if not rows:
        return torch.zeros(len(target))
    states = plain_gru(layers.extractor, rows, [1.0] * len(rows))
    weights = torch.softmax(torch.stack([h @ layers.attention.weight @ target for h in states]), 0)
    return plain_gru(layers.evolution, states, weights)[-1]


def plain_dien(model, sample, dense_F, rows):
    """The logits of one sample; `rows`: of each table."""
    user = rows["user"][sample["user"]].mean(0) if sample["user"] else torch.zeros(5)
    targets = {name: rows[name][sample[name]].sum(0) for name in ("item", "brand")}
    interests = [
        plain_interest(layers, targets[target], list(rows[target][sample[name]]))
        for layers, (name, target) in zip(model.attention, HISTORIES.items(), strict=True)
    ]
    return plain_mlp(model.top, torch.cat([dense_F, user, *targets.values(), *interests]))


@settings(max_examples=30, deadline=None)
@given(samples=st.lists(BAGS, min_size=1, max_size=5), tasks=st.integers(1, 2))
def test_logits_and_gradients_are_those_of_the_equations(samples, tasks):
    torch.manual_seed(0)
    check_equations(make_dien(tasks=tasks, auxiliary=0.0), make_batch(samples), samples, plain_dien, tasks)


@settings(max_examples=30, deadline=None)
@given(lists=st.lists(IDS, min_size=1, max_size=5))
def test_the_auxiliary_loss_asks_for_the_next_item_and_not_for_a_drawn_one(lists):
    ids_N = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64)
    lengths_B = torch.tensor([len(ids) for ids in lists])
    draws = torch.Generator().manual_seed(1)
    states_ND, rows_ND = torch.randn(2, len(ids_N), 4, generator=draws, dtype=torch.float64)  # 1 - p has its digits
    torch.manual_seed(7)
    losses_B = next_item_losses(states_ND, rows_ND, ids_N, lengths_B)
    torch.manual_seed(7)
    drawn = torch.randint(max(1, len(ids_N)), (len(ids_N),)).tolist()
    begin = 0
    for ids, loss in zip(lists, losses_B, strict=True):
        wanted = torch.zeros((), dtype=torch.float64)
        for t in range(begin, begin + len(ids) - 1):
            wanted = wanted - torch.log(torch.sigmoid(states_ND[t] @ rows_ND[t + 1]))
            if ids_N[drawn[t]] != ids_N[t + 1]:
                wanted = wanted - torch.log(1 - torch.sigmoid(states_ND[t] @ rows_ND[drawn[t]]))
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
        begin += len(ids)


def test_the_objective_adds_the_auxiliary_loss_of_its_own_forward():
    samples = [SAMPLE, SAMPLE | {"seen": [7, 8, 9, 1], "brands": [1, 2]}, SAMPLE | {"seen": [], "brands": [4]}]
    batch = make_batch(samples, labels=1.0)
    torch.manual_seed(0)
    model = make_dien(auxiliary=0.5)
    torch.manual_seed(3)
    outcome = Clicks(model)(batch)
    rows = {name: model.embeddings.table(name) for name in ("item", "brand")}
    torch.manual_seed(3)
    more_B = torch.zeros(len(samples))
    for layers, (name, target) in zip(model.attention, HISTORIES.items(), strict=True):
        lists = [sample[name] for sample in samples]
        ids_N = torch.tensor([i for ids in lists for i in ids])
        states = [h for ids in lists for h in plain_gru(layers.extractor, list(rows[target][ids]), [1.0] * len(ids))]
        lengths_B = torch.tensor([len(ids) for ids in lists])
        more_B = more_B + next_item_losses(torch.stack(states), rows[target][ids_N], ids_N, lengths_B)
    logits_loss = F.binary_cross_entropy_with_logits(outcome.logits_BK, batch.labels_BK)
    torch.testing.assert_close(outcome.loss, logits_loss + 0.5 * more_B.mean(), rtol=1e-4, atol=1e-5)
    assert model.take_auxiliary() is None
    weighted = Batch(dense_BF=batch.dense_BF, sparse=batch.sparse, labels_BK=batch.labels_BK, weights_B=torch.zeros(3))
    assert Clicks(model)(weighted).loss.detach() == 0
    model.eval()
    torch.testing.assert_close(Clicks(model)(batch).loss, logits_loss)


def test_a_step_trains_extractor_and_rows_by_the_next_item():
    model, batch = make_dien(auxiliary=1.0), make_batch([SAMPLE])
    before = {name: model.embeddings.table(name).clone() for name in ("item", "brand", "user")}
    step(model, Clicks(model)(batch).loss, torch.optim.SGD(model.top.parameters(), lr=0.1))
    moved = {name: (model.embeddings.table(name) != rows).any(1).nonzero().flatten() for name, rows in before.items()}
    assert {name: set(rows.tolist()) for name, rows in moved.items()} == {
        "item": {3, 4, 9},
        "brand": {5, 6},
        "user": {1, 2},
    }
    assert all(p.grad is not None for p in model.attention.parameters())


def test_a_sample_has_the_same_bits_beside_longer_histories():
    torch.manual_seed(0)
    model = make_dien(16, dense_features=0)
    draws = torch.Generator().manual_seed(2)
    longer = [SAMPLE | {"seen": torch.randint(20, (n,), generator=draws).tolist()} for n in (*range(31), 200)]
    with inference_mode(model):
        alone = model(make_batch([SAMPLE] * 16, 0))[0]
        for others in (longer[:15], longer[17:], longer[1:]):
            assert torch.equal(model(make_batch([*others, SAMPLE], 0))[-1], alone)


def test_an_empty_batch_and_empty_histories():
    empty = SAMPLE | {"seen": [], "brands": []}
    model = make_dien()
    assert Clicks(model)(make_batch([empty])).loss.isfinite()
    assert model(make_batch([SAMPLE, SAMPLE]).of_samples(torch.tensor([], dtype=torch.int64))).shape == (0, 1)


@pytest.mark.parametrize("auxiliary", [-0.1, float("inf"), float("nan")])
def test_a_factor_that_is_no_factor_is_refused(auxiliary):
    with pytest.raises(SpecError, match=r"auxiliary=.*: expected a finite number, at least 0"):
        make_dien(auxiliary=auxiliary)
