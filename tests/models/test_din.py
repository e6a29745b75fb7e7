"""DIN against its formula, sample by sample, and what it refuses."""

import pytest
import torch
from clicks import DENSE, step
from equations import check_equations
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_layers import plain_mlp

from rowwise import DIN, Batch, BatchError, Embeddings, Jagged, Pooling, SpecError, Table

HISTORIES = {"seen": "item", "bought": "item", "brands": "brand"}
IDS = st.lists(st.integers(0, 19), max_size=5)
BAGS = st.fixed_dictionaries(
    {name: IDS for name in HISTORIES} | {name: IDS.map(lambda x: x[:1]) for name in ("item", "brand")} | {"user": IDS}
)


def make_tables():
    item = Table(name="item", rows=20, dim=6, features=("item", "seen", "bought"), pooling=Pooling.SEQUENCE)
    brand = Table(name="brand", rows=20, dim=3, features=("brand", "brands"), pooling=Pooling.SEQUENCE)
    return [item, brand, Table(name="user", rows=20, dim=5, pooling=Pooling.MEAN)]


def make_din(tables=None, dense_features=DENSE, tasks=1, **options):
    options = {"histories": HISTORIES, "attention": (4,)} | options
    return DIN(Embeddings(tables or make_tables()), dense_features, (7, tasks), **options)


def make_batch(samples, dense_features=DENSE):
    bags = {name: [sample[name] for sample in samples] for name in samples[0]}
    return Batch(
        dense_BF=torch.randn(len(samples), dense_features, generator=torch.Generator().manual_seed(1)),
        sparse=Jagged.from_lists(bags),
        labels_BK=torch.zeros(len(samples), 1),
    )


def plain_din(model, sample, dense_F, rows):
    """The logits of one sample; `rows`: of each table."""
    user = rows["user"][sample["user"]].mean(0) if sample["user"] else torch.zeros(5)
    targets = {name: rows[name][sample[name]].sum(0) for name in ("item", "brand")}
    interests = []
    for unit, (name, target) in zip(model.attention, HISTORIES.items(), strict=True):
        total, t = torch.zeros_like(targets[target]), targets[target]
        for row in sample[name]:
            h = rows[target][row]
            total = total + plain_mlp(unit.unit, torch.cat([h, t, h - t, h * t])) * h
        interests.append(total)
    return plain_mlp(model.top, torch.cat([dense_F, user, *targets.values(), *interests]))


@settings(max_examples=30, deadline=None)
@given(samples=st.lists(BAGS, min_size=1, max_size=5), tasks=st.integers(1, 2))
def test_logits_and_gradients_are_those_of_the_formula(samples, tasks):
    torch.manual_seed(0)
    check_equations(make_din(tasks=tasks), make_batch(samples), samples, plain_din, tasks)


def test_a_step_changes_the_rows_of_targets_and_histories():
    sample = {"item": [3], "seen": [3, 4], "bought": [], "brand": [5], "brands": [6], "user": [1, 2]}
    model, batch = make_din(), make_batch([sample])
    before = {name: model.embeddings.table(name).clone() for name in ("item", "brand", "user")}
    step(model, model(batch).sum(), torch.optim.SGD(model.top.parameters(), lr=0.1))
    moved = {name: (model.embeddings.table(name) != rows).any(1).nonzero().flatten() for name, rows in before.items()}
    assert {name: set(rows.tolist()) for name, rows in moved.items()} == {
        "item": {3, 4},
        "brand": {5, 6},
        "user": {1, 2},
    }


def test_an_empty_batch_no_dense_numbers_and_no_histories():
    sample = {"item": [3], "seen": [3, 4], "bought": [], "brand": [5], "brands": [6], "user": [1, 2]}
    assert make_din()(make_batch([sample])).shape == (1, 1)
    empty = make_batch([sample, sample]).of_samples(torch.tensor([], dtype=torch.int64))
    assert make_din()(empty).shape == (0, 1)
    assert make_din(dense_features=0)(make_batch([sample], 0)).shape == (1, 1)
    assert make_din([make_tables()[2]], histories=None)(make_batch([sample])).shape == (1, 1)


def test_two_targets_in_a_sample_are_refused():
    sample = {"item": [3], "seen": [], "bought": [], "brand": [5], "brands": [], "user": []}
    two = sample | {"item": [1, 2]}
    with pytest.raises(BatchError, match="feature 'item' has 2"):
        make_din()(make_batch([sample, two, sample | {"item": []}]))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"histories": {"seen": "thing"}},
            "histories: 'thing': expected a feature of a table with pooling: sequence; there",
        ),
        ({"histories": {"user": "item"}}, "histories: 'user': expected a feature of a table with pooling: sequence"),
        ({"histories": HISTORIES | {"brands": "item"}}, "histories: 'brands' has dim 3 and 'item' 6: expected one dim"),
        ({"histories": {"seen": "item"}}, "sequence feature 'bought' is neither a history nor a target"),
        ({"attention": (0,)}, "an Mlp got sizes"),
        ({"dropout": 1.0}, "dropout=1.0: expected at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, error):
    with pytest.raises(SpecError, match=error):
        make_din(**options)
