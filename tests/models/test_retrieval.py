"""The softmax over the items of a batch against its formula, and the exact search against all scores."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import BatchError, in_batch_bpr, in_batch_softmax, top_items
from rowwise.models.retrieval import Candidates


def literal_loss(logits_BB, items, log_q, weights):
    """Sample by sample, in float64."""
    total = 0.0
    for i in range(len(items)):
        corrected = [float(logits_BB[i, j]) - (log_q[j] if log_q else 0.0) for j in range(len(items))]
        others = [j for j in range(len(items)) if j == i or items[j] != items[i]]
        log_sum = math.log(sum(math.exp(corrected[j]) for j in others))
        total -= (weights[i] if weights else 1.0) * (corrected[i] - log_sum)
    return total / len(items)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.booleans(), st.booleans())
def test_pairs(items, corrected, weighted):
    torch.manual_seed(len(items))
    size, total = len(items), 0.0
    logits_BB = torch.randn(size, size, dtype=torch.float64, requires_grad=True)
    log_q_B = torch.rand(size).double().log() if corrected else None
    weights_B = torch.rand(size).double() if weighted else None
    for i in range(size):
        others = [j for j in range(size) if items[j] != items[i]]
        for j in others:
            apart = (logits_BB[i, i] - logits_BB[i, j]).detach()
            if corrected:
                apart = apart - log_q_B[i] + log_q_B[j]
            total = total - (weights_B[i] if weighted else 1) * apart.sigmoid().log() / len(others) / size
    loss = in_batch_bpr(logits_BB, torch.tensor(items), log_q_B, weights_B)
    assert math.isclose(float(loss.detach()), float(torch.as_tensor(total)), rel_tol=1e-9, abs_tol=1e-12)
    assert torch.autograd.gradcheck(lambda x: in_batch_bpr(x, torch.tensor(items), log_q_B, weights_B), logits_BB)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.booleans(), st.booleans())
def test_the_formula(items, corrected, weighted):
    torch.manual_seed(len(items))
    size = len(items)
    logits_BB = torch.randn(size, size, requires_grad=True)
    log_q_B = torch.rand(size).log() if corrected else None
    weights_B = torch.rand(size) if weighted else None
    loss = in_batch_softmax(logits_BB, torch.tensor(items), log_q_B, weights_B)
    lists = (None if t is None else t.tolist() for t in (log_q_B, weights_B))
    wanted = literal_loss(logits_BB.detach(), items, *lists)
    assert math.isclose(float(loss.detach()), wanted, rel_tol=1e-5, abs_tol=1e-6)
    loss.backward()
    assert logits_BB.grad is not None
    assert bool(logits_BB.grad.isfinite().all())
    for i in range(size):
        for j in range(size):
            if i != j and items[i] == items[j]:
                assert logits_BB.grad[i, j] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("corrected", "lowest", "highest"), [(False, -0.2, 0.2), (True, 0.8, 1.2)])
def test_the_correction_gives_popular_items_their_due(corrected, lowest, highest):
    """Who chooses by popularity alone has log q as the best logits; without the correction they come out flat."""
    generator = torch.Generator().manual_seed(0)
    q_I = 1 / torch.arange(10, 210).double()
    q_I /= q_I.sum()
    logit_I = torch.zeros(200, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logit_I], lr=0.05)
    for _ in range(500):
        items_B = q_I.multinomial(64, replacement=True, generator=generator)
        log_q_B = q_I[items_B].log() if corrected else None
        optimizer.zero_grad()
        in_batch_softmax(logit_I[items_B].expand(64, 64), items_B, log_q_B).backward()
        optimizer.step()
    x_I, y_I = q_I.log() - q_I.log().mean(), logit_I.detach() - logit_I.detach().mean()
    slope = float((x_I * y_I).sum() / x_I.square().sum())
    assert lowest < slope < highest


def test_16_bits():
    logits_BB = torch.randn(4, 4, dtype=torch.bfloat16)
    items_B = torch.arange(4)
    loss = in_batch_softmax(logits_BB, items_B)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, in_batch_softmax(logits_BB.float(), items_B))
    assert in_batch_softmax(logits_BB.double(), items_B).dtype == torch.float64


def literal_parts(logits, items, log_q, first, hardest):
    """Of each sample the logit of its own item, and those of its negatives, one by one."""
    parts = []
    for i in range(len(logits)):
        own = float(logits[i, first + i]) - log_q[first + i]
        others = [j for j in range(len(items)) if items[j] != items[first + i]]
        negatives = sorted((float(logits[i, j]) - log_q[j] for j in others), reverse=True)
        parts.append((own, negatives[:hardest]))
    return parts


@given(
    st.lists(st.integers(0, 6), min_size=3, max_size=9),
    st.integers(1, 3),
    st.data(),
    st.none() | st.integers(1, 9),
    st.sampled_from((in_batch_softmax, in_batch_bpr)),
)
def test_candidates_beside_those_of_the_batch(items, batch, data, hardest, loss):
    """Those of other ranks come before and after."""
    first = data.draw(st.integers(0, len(items) - batch))
    torch.manual_seed(len(items))
    logits_BC = torch.randn(batch, len(items), dtype=torch.float64, requires_grad=True)
    log_q = [math.log(0.1 + k / 10) for k in range(len(items))]
    candidates = Candidates(torch.tensor(items), torch.tensor(log_q, dtype=torch.float64), first)
    total = 0.0
    for own, negatives in literal_parts(logits_BC.detach(), items, log_q, first, hardest):
        if loss is in_batch_softmax:
            total += math.log(sum(math.exp(x) for x in (own, *negatives))) - own
        else:
            total += sum(math.log1p(math.exp(x - own)) for x in negatives) / max(1, len(negatives))
    found = loss(logits_BC, candidates, hardest=hardest)
    assert math.isclose(float(found.detach()), total / batch, rel_tol=1e-9, abs_tol=1e-12)
    (gradient_BC,) = torch.autograd.grad(found, logits_BC)
    assert bool(gradient_BC.isfinite().all())
    assert torch.autograd.gradcheck(lambda x: loss(x, candidates, hardest=hardest), logits_BC)


def test_losses_that_do_not_fit():
    logits_BB, items_B = torch.zeros(3, 3), torch.arange(3)
    with pytest.raises(BatchError, match=r"\(3, 2\), items \(3,\)"):
        in_batch_softmax(logits_BB[:, :2], items_B)
    with pytest.raises(BatchError, match=r"items \(3,\) and first=1"):
        in_batch_softmax(logits_BB, Candidates(items_B, None, 1))
    with pytest.raises(BatchError, match=r"log_q: got \(2,\)"):
        in_batch_softmax(logits_BB, items_B, items_B[:2].float())
    with pytest.raises(BatchError, match="log_q is given"):
        in_batch_bpr(logits_BB, Candidates(items_B), items_B.float())
    with pytest.raises(BatchError, match=r"weights: got \(3, 1\)"):
        in_batch_softmax(logits_BB, items_B, weights_B=torch.ones(3, 1))
    with pytest.raises(BatchError, match="hardest=0: expected at least"):
        in_batch_softmax(logits_BB, items_B, hardest=0)


@given(st.integers(0, 3), st.integers(1, 20), st.integers(1, 20), st.integers(1, 25))
def test_the_search_is_exact(users, items, k, chunk):
    k = min(k, items)
    torch.manual_seed(items)
    users_UD, items_ID = torch.randn(users, 4).double(), torch.randn(items, 4).double()
    dots_UK, places_UK = top_items(users_UD, items_ID, k, chunk=chunk)
    wanted = (users_UD @ items_ID.t()).topk(k, 1)
    torch.testing.assert_close(dots_UK, wanted.values)
    assert torch.equal(places_UK, wanted.indices)


def test_searches_that_cannot_be():
    vectors = torch.randn(3, 4)
    with pytest.raises(BatchError, match="k=4 of 3 items"):
        top_items(vectors, vectors, 4)
    with pytest.raises(BatchError, match="item at a time"):
        top_items(vectors, vectors, 1, chunk=0)
