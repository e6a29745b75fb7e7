"""Encoders of histories and next-item scores against their formulas, list by list, and what they refuse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_layers import plain_linear, plain_mlp, plain_norm
from torch.nn import functional as F

from rowwise import (
    HSTU,
    Batch,
    BatchError,
    Embeddings,
    IdError,
    Jagged,
    NextItem,
    Pooling,
    SASRec,
    Sgd,
    SpecError,
    Table,
)
from rowwise.models.histories import Groups
from rowwise.models.inference import evaluation_mode, inference_mode
from rowwise.models.next_item import Places, mean_over_lists, sampled_softmax_loss, softmax_loss
from rowwise.train.objective import NextItems
from rowwise.train.ranking import Ranking
from rowwise.train.retrieve import NextItemEvaluator
from rowwise.train.settings import Training

ROWS, DIM = 23, 6
LENGTHS = st.lists(st.integers(0, 12), max_size=6)
LISTS = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=9), min_size=1, max_size=5)
ENCODERS = [SASRec, HSTU]
TABLE = {"name": "item", "rows": ROWS, "dim": DIM, "features": ("seen",), "pooling": Pooling.SEQUENCE}


def heads_of(x_LD, heads):
    return x_LD.unflatten(1, (heads, -1)).unbind(1)


def plain_sasrec(model, x_LD):
    """The formula of one history, with a mask in place of padding."""
    x_LD = x_LD * math.sqrt(model.dim) + model.positions[: len(x_LD)]
    later_LL = torch.ones(len(x_LD), len(x_LD)).triu(1).bool()
    for block in model.layers:
        maps = plain_linear(block.maps, plain_norm(block.norms[0], x_LD)).chunk(3, 1)
        attended = []
        for q, k, v in zip(*(heads_of(part, block.heads) for part in maps), strict=True):
            dots_LL = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(later_LL, -math.inf)
            attended.append(dots_LL.softmax(1) @ v)
        x_LD = x_LD + plain_linear(block.project, torch.cat(attended, 1))
        x_LD = x_LD + plain_mlp(block.feed_forward, plain_norm(block.norms[1], x_LD))
    return plain_norm(model.norm, x_LD)


def plain_hstu(model, x_LD):
    x_LD = x_LD * math.sqrt(model.dim)
    for layer in model.layers:
        z_LC = plain_linear(layer.maps, plain_norm(layer.norms[0], x_LD))
        gate, *maps = (z_LC * z_LC.sigmoid()).chunk(4, 1)
        attended = []
        for h, (v, q, k) in enumerate(zip(*(heads_of(part, layer.heads) for part in maps), strict=True)):
            rows = []
            for i in range(len(x_LD)):
                dots = torch.stack([q[i] @ k[j] + layer.bias[h, i - j] for j in range(i + 1)])
                rows.append((dots * dots.sigmoid()) @ v[: i + 1] / layer.length)
            attended.append(torch.stack(rows))
        x_LD = x_LD + plain_linear(layer.project, plain_norm(layer.norms[1], torch.cat(attended, 1)) * gate)
    return plain_norm(model.norm, x_LD)


PLAIN = {SASRec: plain_sasrec, HSTU: plain_hstu}


def plain(model, x_LD):
    return PLAIN[type(model)](model, x_LD) if len(x_LD) else x_LD


def lively(encoder):
    """Parameters that no part of the formula hides: neither zeros nor ones."""
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return encoder


@pytest.mark.parametrize("kind", ENCODERS)
@settings(max_examples=25)
@given(lengths=LENGTHS, heads=st.sampled_from((1, 2)), layers=st.integers(1, 2), trained=st.booleans())
def test_vectors_and_gradients_are_those_of_the_formula(kind, lengths, heads, layers, trained):
    torch.manual_seed(0)
    model = lively(kind(4, length=12, layers=layers, heads=heads, dropout=0.0)).double().train(trained)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    x_ND = torch.randn(sum(lengths), 4, dtype=torch.float64, requires_grad=True)
    grad_ND = torch.randn_like(x_ND)
    inputs = (x_ND, *model.parameters())
    expected_ND = torch.cat([plain(model, x_LD) for x_LD in x_ND.split(lengths)]) if lengths else x_ND
    wanted = torch.autograd.grad(expected_ND, inputs, grad_ND, allow_unused=True)
    found_ND = model(x_ND, lengths_B)
    torch.testing.assert_close(found_ND, expected_ND)
    for one, other in zip(torch.autograd.grad(found_ND, inputs, grad_ND), wanted, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


@pytest.mark.parametrize("kind", ENCODERS)
def test_gradients_are_those_of_differences(kind):
    torch.manual_seed(1)
    model = lively(kind(4, length=9, heads=2, dropout=0.0)).double()
    x_ND = torch.randn(16, 4, dtype=torch.float64, requires_grad=True)
    lengths_B = torch.tensor([3, 0, 9, 1, 3])
    assert torch.autograd.gradcheck(lambda x: model(x, lengths_B), (x_ND,))


@given(lengths=st.lists(st.integers(0, 60), max_size=20), fixed=st.booleans())
def test_groups_pad_little_and_keep_the_order(lengths, fixed):
    groups, seen = Groups(torch.tensor(lengths, dtype=torch.int64), 60, fixed=fixed), []

    def double(x_BLC):
        seen.append(x_BLC.shape[:2])
        return x_BLC * 2

    x_NC = torch.randn(sum(lengths), 3)
    assert groups.map(double, x_NC).equal(x_NC * 2)
    assert groups.positions_N.tolist() == [place for length in lengths for place in range(length)]
    padded = sum(lists * items for lists, items in seen)
    assert padded <= (1.7 if fixed else 1.5) * sum(lengths) + (16 if fixed else 5) * len(lengths) + 1
    if fixed:
        alone = [Groups(torch.tensor([length]), 60, fixed=True)._shapes[0][1] for length in sorted(lengths)]
        assert alone == [items for lists, items in seen for _ in range(lists) if lengths]


@pytest.mark.parametrize("kind", ENCODERS)
def test_dropout_changes_a_training_step_and_no_evaluation(kind):
    model, x_ND, lengths_B = kind(4, dropout=0.5), torch.randn(5, 4), torch.tensor([2, 3])
    assert not model(x_ND, lengths_B).equal(model(x_ND, lengths_B))
    model.eval()
    assert model(x_ND, lengths_B).equal(model(x_ND, lengths_B))


def make_table(**changes):
    return Table(**TABLE | {"optimizer": Sgd(lr=0.5)} | changes)


def make_model(kind=SASRec, length=4, **changes):
    torch.manual_seed(2)
    return NextItem(Embeddings([make_table(**changes)], seed=3), lively(kind(DIM, length=length, dropout=0.0)))


def make_batch(lists, weights=None):
    return Batch(
        dense_BF=torch.empty(len(lists), 0),
        sparse=Jagged.from_lists({"seen": lists, "other": [[1]] * len(lists)}),
        labels_BK=torch.empty(len(lists), 0),
        weights_B=weights,
    )


def plain_scores(model, items, rows_RD):
    """Of all items after a list."""
    newest = items[-model.encoder.length :]
    return plain(model.encoder, rows_RD[newest])[-1] @ rows_RD.T if items else torch.zeros(len(rows_RD))


@pytest.mark.parametrize("kind", ENCODERS)
@settings(max_examples=25)
@given(lists=LISTS)
def test_scores_are_those_of_the_newest_items(kind, lists):
    model = make_model(kind)
    rows_RD = model.embeddings.table("item")
    expected_BR = torch.stack([plain_scores(model, items, rows_RD) for items in lists])
    torch.testing.assert_close(model.scores(make_batch(lists)), expected_BR, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.scores(make_batch(lists).sparse), expected_BR, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ENCODERS)
@settings(max_examples=25)
@given(lists=LISTS)
def test_vectors_of_lists_and_of_items_make_the_scores(kind, lists):
    model, batch = make_model(kind), make_batch(lists)
    rows_RD = model.embeddings.table("item")
    assert model.item_vectors(batch).equal(rows_RD[[item for items in lists for item in items]])
    torch.testing.assert_close(model.vectors(batch) @ rows_RD.T, model.scores(batch))
    before = [plain_scores(model, items[:-1], rows_RD) for items in lists]
    wanted = [scores[items[-1]] if items else torch.zeros(()) for scores, items in zip(before, lists, strict=True)]
    torch.testing.assert_close(model.logits(batch), torch.stack(wanted).unsqueeze(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_list_has_the_same_bits_beside_others(kind):
    """In use: lists of other lengths, in other places, 16 of them or more. Lists of one length are tested as others."""
    model, draw = make_model(kind, length=40), torch.Generator().manual_seed(0)
    lists = [torch.randint(ROWS, (length,), generator=draw).tolist() for length in (1, 3, 17, 39, 25, 60, 25, 25)]
    with inference_mode(model):
        alone = torch.cat([model.vectors(make_batch([items] * 16))[:1] for items in lists])
        for order in (range(8), [7, 2, 5, 1, 0], [3, 1], [6, 5, 4] * 9):
            chosen = [lists[place] for place in order]
            together = model.vectors(make_batch(chosen + chosen[-1:] * (-len(chosen) % 16)))
            assert together[: len(chosen)].equal(alone[list(order)])
        alike = [torch.randint(ROWS, (9,), generator=draw).tolist() for _ in range(16)]
        cut, whole = model.cut_vectors(make_batch(alike)), model.vectors(make_batch(alike))
        assert 0 < int((cut == whole).all(1).sum()) < 16


def plain_loss(model, lists, weights, rows_RD):
    """The mean over lists of weight x mean over places, of the newest items and the one that follows them."""
    total = torch.zeros(())
    for items, weight in zip(lists, weights, strict=True):
        read = items[-(model.encoder.length + 1) :]
        if len(read) > 1:
            vectors = plain(model.encoder, rows_RD[read[:-1]])
            losses = -(vectors @ rows_RD.T).log_softmax(1)
            total = total + weight * torch.stack([losses[k, item] for k, item in enumerate(read[1:])]).mean()
    return total / len(lists)


@pytest.mark.parametrize("kind", ENCODERS)
@settings(max_examples=25)
@given(lists=LISTS, weighted=st.booleans())
def test_the_loss_and_its_updates_are_those_of_the_formula(kind, lists, weighted):
    model = make_model(kind)
    weights = torch.rand(len(lists)) if weighted else torch.ones(len(lists))
    rows_RD = model.embeddings.table("item").clone().requires_grad_()
    wanted = plain_loss(model, lists, weights, rows_RD)
    gradient_RD = torch.autograd.grad(wanted, rows_RD)[0] if wanted.requires_grad else torch.zeros_like(rows_RD)
    loss = NextItems(model)(make_batch(lists, weights if weighted else None)).loss
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
    loss.backward()
    model.embeddings.update()
    moved_RD = rows_RD - model.embeddings.table("item")
    torch.testing.assert_close(moved_RD, 0.5 * gradient_RD, rtol=1e-3, atol=1e-6)


def random_places(lengths, generator):
    count = sum(lengths)
    next_N = torch.randint(ROWS, (count,), generator=generator)
    rows_RD = torch.randn(ROWS, DIM, generator=generator)
    vectors_ND = torch.randn(count, DIM, generator=generator)
    return Places(torch.tensor(lengths), vectors_ND, next_N, rows_RD[next_N]), rows_RD


@given(seed=st.integers(0, 99))
def test_drawing_each_item_once_is_the_softmax_over_all(seed):
    places, rows_RD = random_places([3, 1, 4], torch.Generator().manual_seed(seed))
    drawn_R = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    found_N = sampled_softmax_loss(places, rows_RD[drawn_R], drawn_R, ROWS)
    torch.testing.assert_close(found_N, softmax_loss(places, rows_RD), rtol=1e-4, atol=1e-5)


def test_drawn_items_count_as_many_as_they_stand_for():
    places, rows_RD = random_places([1], torch.Generator().manual_seed(0))
    own = int(places.next_N[0])
    drawn_C = torch.tensor([(own + 1) % ROWS, own, (own + 2) % ROWS, (own + 1) % ROWS])
    exp_R = (rows_RD @ places.vectors_ND[0]).exp()
    others = exp_R[drawn_C[[0, 2, 3]]].sum() * ROWS / 4
    expected = -(exp_R[own] / (exp_R[own] + others)).log()
    torch.testing.assert_close(sampled_softmax_loss(places, rows_RD[drawn_C], drawn_C, ROWS)[0], expected)


def test_negatives_follow_torch_s_seed():
    batch, model = make_batch([[1, 2, 3], [4, 5, 6, 7]]), make_model()

    def losses(seed):
        torch.manual_seed(seed)
        objective = NextItems(model, 5)
        return [objective(batch).loss.item() for _ in range(2)]

    assert losses(0) == losses(0)
    assert len({*losses(0), *losses(1)}) == 4


def test_a_list_without_a_next_item_counts_as_zero():
    model = make_model()
    both, one = (NextItems(model)(make_batch(lists)).loss for lists in ([[1, 2], [3], [], [4]], [[1, 2]]))
    torch.testing.assert_close(both, one / 4)
    assert NextItems(model)(make_batch([[3]])).loss == 0
    assert mean_over_lists(torch.empty(0), torch.empty(0, dtype=torch.int64)).isnan()


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_history_of_more_than_length_items_is_refused(kind):
    with pytest.raises(BatchError, match="history 1 has 5"):
        kind(4, length=4)(torch.randn(6, 4), torch.tensor([1, 5]))


@pytest.mark.parametrize("leave_out", [False, True])
@settings(max_examples=25)
@given(
    lists=st.lists(st.lists(st.integers(0, ROWS - 1), min_size=2, max_size=9), min_size=1, max_size=5),
    weighted=st.booleans(),
)
def test_evaluation_ranks_all_items_for_the_last_one(leave_out, lists, weighted):
    model, ranking = make_model(), Ranking((1, 5))
    rows_RD = model.embeddings.table("item")
    weights = torch.rand(len(lists)) + 0.1 if weighted else torch.ones(len(lists))
    for (*history, chosen), weight in zip(lists, weights, strict=True):
        scores_R = plain_scores(model, history, rows_RD)
        allowed = [i for i in range(ROWS) if i == chosen or not leave_out or i not in history]
        ranking.update(scores_R[allowed].unsqueeze(0), torch.tensor([allowed.index(chosen)]), weight.unsqueeze(0))
    evaluate = NextItemEvaluator(
        model,
        lambda: [make_batch(lists, weights if weighted else None)],
        "next",
        Training(),
        ks=(1, 5),
        leave_out_history=leave_out,
    )
    found, means = evaluate().tasks["next"], ranking.value()
    assert found["count"] == len(lists)
    assert found["mrr"] == pytest.approx(means.mrr)
    assert [found["recall@5"], found["ndcg@5"]] == pytest.approx([means.recall[5], means.ndcg[5]])


@pytest.mark.parametrize("short", [[], [3]])
def test_evaluation_refuses_lists_without_a_history(short):
    evaluate = NextItemEvaluator(make_model(), lambda: [make_batch([[1, 2], short])], "next", Training())
    with pytest.raises(BatchError, match=rf"feature 'seen' has {len(short)} items in sample 1: expected at least 2, a"):
        evaluate()


def test_ids_outside_of_the_table():
    bad = make_batch([[1, 2], [3, ROWS]])
    for call in (NextItems(make_model()), make_model().scores):
        with pytest.raises(IdError, match=f"table 'item': feature 'seen', sample 1, position 1: id {ROWS} is not in"):
            call(bad)
    lenient, last = make_model(unknown="last_row"), make_batch([[1, 2], [3, ROWS - 1]])
    with pytest.warns(match="id"):
        assert NextItems(lenient)(bad).loss == NextItems(lenient)(last).loss


def test_an_empty_batch_scores_nothing():
    empty = make_batch([[1, 2]]).of_samples(torch.tensor([], dtype=torch.int64))
    model = make_model()
    assert model.scores(empty).shape == (0, ROWS)
    assert NextItems(model)(empty).loss.isnan()
    with evaluation_mode(model):
        assert model.scores(make_batch([[]])).equal(torch.zeros(1, ROWS))


def test_a_batch_without_the_feature_is_refused():
    with pytest.raises(BatchError, match="'seen'; there are other"):
        make_model().scores(Jagged.from_lists({"other": [[1]]}))


@pytest.mark.parametrize(
    ("tables", "error"),
    [
        (
            [make_table(pooling=Pooling.MEAN)],
            "table 'item' has pooling mean: expected pooling: sequence",
        ),
        ([make_table(dim=4)], "table 'item' has dim 4 and the encoder dim 6: expected equal dims"),
        (
            [make_table(features=("seen", "shown"))],
            "features seen, shown: expected one table with one feature, the lists",
        ),
        (
            [make_table(), make_table(name="user", features=("user",))],
            "features seen, user: expected one table with one",
        ),
    ],
    ids=["pooled", "dim", "two features", "two tables"],
)
def test_tables_that_do_not_fit_are_refused(tables, error):
    with pytest.raises(SpecError, match=error):
        NextItem(Embeddings(tables), SASRec(DIM))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"length": 0}, "length=0: expected at least 1"),
        ({"layers": 0}, "layers=0: expected at least 1"),
        ({"heads": 4}, "heads=4: expected a divisor of 6"),
        ({"dropout": 1.0}, "dropout=1.0: expected at least 0 and less than 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ENCODERS)
def test_sizes_that_do_not_fit_are_refused(kind, options, error):
    with pytest.raises(SpecError, match=error):
        kind(DIM, **options)


def test_positions_count_from_the_oldest_item_read():
    """Of a list that is longer than `length`, the oldest items change nothing."""
    model = make_model()
    assert model.scores(make_batch([[9, 1, 2, 3, 4]])).equal(model.scores(make_batch([[7, 8, 1, 2, 3, 4]])))
    assert F.mse_loss(model.scores(make_batch([[1, 2]])), model.scores(make_batch([[2, 1]]))) > 0
