"""Evaluation in batches finds what scikit-learn finds over all samples at once."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainings import COLUMNS, Net, make_rows, make_tables

from rowwise import BatchError, Embeddings, Table
from rowwise.ingest import Batcher, Batching, Columns, FrameReader, Sparse
from rowwise.models.inference import evaluation_mode
from rowwise.models.two_tower import Tower, TwoTower
from rowwise.train.evaluate import NONE, ClickEvaluator, Slicing, ids_or_none
from rowwise.train.metrics import METRICS
from rowwise.train.retrieve import RetrievalEvaluator
from rowwise.train.settings import Training

CLOSE = {"rel": 1e-6, "abs": 1e-9, "nan_ok": True}
TABLES = make_tables()


def batches(rows, size):
    return Batcher(FrameReader(rows), COLUMNS, TABLES, Batching(size=size, shuffle=False))


def evaluator_of(model, rows, size=16, training=Training(), slicing=None):  # noqa: B008 - frozen
    return ClickEvaluator(model, lambda: batches(rows, size), COLUMNS.labels, training, slicing)


def all_at_once(model, rows):
    """Predictions, labels, weights of all samples, and the batch."""
    batch = next(iter(batches(rows, rows.num_rows)))
    model.eval()
    with torch.no_grad():
        logits_BK = model(batch).double()
    model.train()
    return logits_BK.numpy(), batch.labels_BK.numpy(), batch.weights_B.double().numpy(), batch


def expected(logits, labels, weights):
    """The metrics of one task, by scikit-learn, which takes three seconds to import."""
    from sklearn.metrics import log_loss, roc_auc_score

    rate = np.average(labels, weights=weights) if len(labels) else math.nan
    predicted = 1 / (1 + np.exp(-logits))
    loss = log_loss(labels, predicted, sample_weight=weights, labels=[0, 1]) if len(labels) else math.nan
    both = 0 < rate < 1
    return {
        "loss": loss,
        "base_rate": rate,
        "count": len(labels),
        "ne": loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)) if both else math.nan,
        "auc": roc_auc_score(labels, logits, sample_weight=weights) if both else math.nan,
        "calibration": (predicted * weights).sum() / (labels * weights).sum() if rate > 0 else math.nan,
    }


@pytest.mark.slow
@settings(max_examples=15)
@given(count=st.integers(2, 200), size=st.integers(1, 300), seed=st.integers(0, 50))
def test_metrics_are_those_of_scikit_learn(count, size, seed):
    rows, model = make_rows(count, seed), Net(TABLES, seed=seed)
    scores = evaluator_of(model, rows, size)()
    logits, labels, weights, _ = all_at_once(model, rows)
    assert list(scores.tasks) == ["click", "buy"]
    for k, values in enumerate(scores.tasks.values()):
        assert tuple(sorted(values)) == tuple(sorted(METRICS))
        for name, value in expected(logits[:, k], labels[:, k], weights).items():
            assert values[name] == pytest.approx(value, **CLOSE), name
        assert values["auc_bound"] == (0.0 if values["auc"] == values["auc"] else pytest.approx(math.nan, nan_ok=True))
    assert not scores.slices


@pytest.mark.slow
@settings(max_examples=15)
@given(count=st.integers(2, 120), size=st.sampled_from((16, 50, 500)), seed=st.integers(0, 50), ids=st.integers(1, 20))
def test_slices_are_metrics_of_filtered_rows(count, size, seed, ids):
    rows, model = make_rows(count, seed), Net(TABLES, seed=seed)
    evaluator = evaluator_of(model, rows, size, slicing=Slicing(("user", "words"), ids))
    numbers = lambda name: None if name is None else int(name)  # noqa: E731
    found = {(row.feature, numbers(row.value), row.task): row.values for row in evaluator().slices}
    logits, labels, weights, batch = all_at_once(model, rows)
    users, words = np.array(rows["user"]), rows["words"].to_pylist()
    # Words are hashed to rows of their table; a sample with none or several is of no slice of its own.
    hashed = ids_or_none(batch, "words").numpy()
    assert [i == NONE for i in hashed] == [len(bag) != 1 for bag in words]
    for feature, column in (("user", users), ("words", hashed)):
        first = column[:size][column[:size] != NONE]
        counts = {i: int((first == i).sum()) for i in first}
        chosen = sorted(counts, key=lambda i: (-counts[i], i))[:ids]
        masks = {value: column == value for value in chosen} | {None: ~np.isin(column, chosen)}
        masks = {value: mask for value, mask in masks.items() if (weights[mask] > 0).any()}
        assert {value for f, value, _ in found if f == feature} == masks.keys()
        for value, mask in masks.items():
            for k, task in enumerate(COLUMNS.labels):
                values = found[feature, value, task]
                for name, want in expected(logits[mask, k], labels[mask, k], weights[mask]).items():
                    if name == "auc":  # of a histogram
                        assert abs(values["auc"] - want) <= values["auc_bound"] + 1e-9 or math.isnan(want)
                    else:
                        assert values[name] == pytest.approx(want, **CLOSE), (feature, value, task, name)


def test_the_model_is_left_as_it_was():
    rows, model = make_rows(50), Net(TABLES)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    seen = []
    model.top.register_forward_hook(lambda m, _, out: seen.append((m.training, out.requires_grad)))
    evaluator = evaluator_of(model, rows)
    for mode in (True, False):
        model.train(mode)
        random = torch.get_rng_state()
        first, again = evaluator(), evaluator()
        assert first == again
        assert model.training == model.top.training == mode
        assert torch.equal(torch.get_rng_state(), random)
    assert set(seen) == {(False, False)}
    assert torch.is_grad_enabled()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not model.embeddings.staged


def test_also_where_it_fails():
    rows, model = make_rows(50), Net(TABLES)
    with pytest.raises(BatchError, match="'color'; there are user"):
        evaluator_of(model, rows, slicing=Slicing(("color",)))()
    assert model.training
    assert torch.is_grad_enabled()
    with torch.no_grad():
        model.top.bias[1] = math.nan
    with pytest.raises(BatchError, match="sample 0, task 1"):
        evaluator_of(model, rows)()


def test_parts_of_a_model_keep_modes_of_their_own():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    model[1].eval()  # somebody froze its statistics
    with evaluation_mode(model):
        assert not model[0].training
    assert model[0].training
    assert not model[1].training


def test_in_16_bits_it_is_close():
    rows, model = make_rows(400), Net(TABLES)
    found = [
        evaluator_of(model, rows, 64, Training(precision=precision))().tasks["click"] for precision in ("fp32", "bf16")
    ]
    assert found[0] != found[1]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=0.02)


# Two towers.


def towers(dim: int = 3) -> TwoTower:
    torch.manual_seed(0)
    user = Tower(Embeddings([TABLES[0]], seed=0), 1, (4, dim))
    return TwoTower(user, Tower(Embeddings([TABLES[1], WORD], seed=0), 1, (4, dim)))


WORD = Table(name="item", rows=60, dim=3)


def retrieval_batches(rows, size):
    columns = Columns(
        labels=("click",),
        dense=COLUMNS.dense,
        sparse=(*COLUMNS.sparse, Sparse(column="item", ids="direct")),
    )
    return Batcher(FrameReader(rows), columns, (*TABLES, WORD), Batching(size=size, shuffle=False))


def search(model, known, asked, size=7, feature="item", **more):
    train, queries = (partial(retrieval_batches, rows, size) for rows in (known, asked))
    return RetrievalEvaluator(model, feature, train_batches=train, query_batches=queries, task="click", **more)


def with_items(count, seed, most):
    items = np.random.default_rng(seed).integers(0, most, count)
    return make_rows(count, seed).append_column("item", [items])


def brute_force(model, known, asked, ks):
    """Every item of the first row that has it, scored for every question, one by one."""
    vectors, questions = {}, []
    with torch.no_grad():
        for rows in (known, asked):
            batch = next(iter(retrieval_batches(rows, rows.num_rows)))
            users, items = model.vectors(batch)
            for sample, item in enumerate(np.array(rows["item"]).tolist()):
                vectors.setdefault(item, items[sample])
                if rows is asked and batch.labels_BK[sample, 0] == 1:
                    questions.append((users[sample], item))
    totals = {f"{name}@{k}": 0.0 for k in ks for name in ("recall", "ndcg")} | {"mrr": 0.0}
    for user, item in questions:
        scores = {i: float(user @ v) for i, v in vectors.items()}
        rank = 1 + sum(score > scores[item] for score in scores.values())
        totals["mrr"] += 1 / rank
        for k in ks:
            totals[f"recall@{k}"] += rank <= k
            totals[f"ndcg@{k}"] += (rank <= k) / math.log2(1 + rank)
    return {name: total / len(questions) for name, total in totals.items()} | {"count": len(questions)}


@settings(max_examples=12)
@given(
    known=st.integers(1, 80),
    asked=st.integers(5, 60),
    size=st.integers(1, 90),
    seed=st.integers(0, 20),
    most=st.integers(1, 60),
)
def test_retrieval_is_a_search_by_brute_force(known, asked, size, seed, most):
    model, ks = towers(), (1, 5)
    # Some items occur among the asked rows only.
    train, test = with_items(known, seed, most), with_items(asked, seed + 1, 60)
    if not any(test["click"].to_pylist()):
        return
    evaluator = search(model, train, test, size, ks=ks)
    found = evaluator().tasks["click"]
    assert set(found) == set(evaluator.metrics)
    for name, want in brute_force(model, train, test, ks).items():
        assert found[name] == pytest.approx(want, abs=1e-6), name  # no two items of one score, but for rounding
    assert model.training


def test_an_item_of_the_asked_rows_only_can_be_found():
    train, test = with_items(30, 0, 5), with_items(1, 0, 5)
    test = test.set_column(test.schema.get_field_index("item"), "item", [[59]])
    test = test.set_column(test.schema.get_field_index("click"), "click", [[1]])
    found = search(towers(), train, test, ks=(6,))().tasks["click"]
    assert (found["count"], found["recall@6"]) == (1.0, 1.0)  # of six items one is it
    assert 1 / 6 <= found["mrr"] <= 1


def test_an_item_has_one_id_in_each_row():
    rows = with_items(30, 0, 5)
    with pytest.raises(BatchError, match=r"'words' has \d ids"):
        search(towers(), rows, rows, feature="words")()
