"""The softmax over the items of a batch against its formula, and the exact search against all scores."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import BatchError, in_batch_bpr, in_batch_softmax, top_items
from rowwise.models.retrieval import Candidates


def literal_loss(loss, logits, items, log_q, weights, first, hardest):
    """Sample by sample."""
    total = 0.0
    for i, weight in enumerate(weights):
        own = float(logits[i, first + i]) - log_q[first + i]
        others = [j for j in range(len(items)) if items[j] != items[first + i]]
        negatives = sorted((float(logits[i, j]) - log_q[j] for j in others), reverse=True)[:hardest]
        if loss is in_batch_softmax:
            total += weight * (math.log(sum(math.exp(x) for x in (own, *negatives))) - own)
        else:
            total += weight * sum(math.log1p(math.exp(x - own)) for x in negatives) / max(1, len(negatives))
    return total / len(logits)


@pytest.mark.parametrize("loss", [in_batch_softmax, in_batch_bpr])
@given(
    items=st.lists(st.integers(0, 6), min_size=1, max_size=9), corrected=st.booleans(), weighted=st.booleans(),
    hardest=st.none() | st.integers(1, 9), data=st.data(),
)  # fmt: skip
def test_the_formula(loss, items, corrected, weighted, hardest, data):
    """Candidates of other ranks come before and after those of the batch."""
    batch = data.draw(st.integers(1, len(items)))
    first = data.draw(st.integers(0, len(items) - batch))
    torch.manual_seed(len(items))
    items_C, logits_BC = torch.tensor(items), torch.randn(batch, len(items), dtype=torch.float64, requires_grad=True)
    log_q_C = torch.rand(len(items)).double().log() if corrected else None
    weights_B = torch.rand(batch).double() if weighted else None

    def run(logits_BC):
        return loss(logits_BC, Candidates(items_C, log_q_C, first), weights_B=weights_B, hardest=hardest)

    found = run(logits_BC)
    log_q = log_q_C.tolist() if corrected else [0.0] * len(items)
    weights = weights_B.tolist() if weighted else [1.0] * batch
    wanted = literal_loss(loss, logits_BC.detach(), items, log_q, weights, first, hardest)
    assert math.isclose(float(found.detach()), wanted, rel_tol=1e-9, abs_tol=1e-12)
    (gradient_BC,) = torch.autograd.grad(found, logits_BC)
    assert bool(gradient_BC.isfinite().all())
    alike_BC = items_C == items_C[first : first + batch, None]
    alike_BC.diagonal(first).fill_(False)
    assert not gradient_BC[alike_BC].any()
    assert torch.autograd.gradcheck(run, logits_BC)
    if batch == len(items):
        assert torch.equal(loss(logits_BC, items_C, log_q_C, weights_B, hardest), run(logits_BC))


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
