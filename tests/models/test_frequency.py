"""The streaming estimate of frequencies against the truth, and against its equation."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import ItemFrequency, SpecError


def literal(batches, alpha):
    """log probabilities by the paper's two arrays, one slot an item."""
    last, gap = {}, {}
    for step, batch in enumerate(batches, 1):
        for item in set(batch):
            newest = step - last.get(item, 0)
            gap[item] = (1 - alpha) * gap[item] + alpha * newest if item in last else newest
            last[item] = step
    return {item: -torch.tensor(g).log() for item, g in gap.items()}


@given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 5), max_size=6), max_size=8))
def test_the_equation(batches):
    frequency = ItemFrequency(bits=16, alpha=0.25)
    for batch in batches:
        frequency(torch.tensor(batch, dtype=torch.int64))
    wanted = literal(batches, 0.25)
    items = list(wanted)
    got = frequency.eval()(torch.tensor(items, dtype=torch.int64))
    torch.testing.assert_close(got, torch.stack(list(wanted.values())) if items else torch.empty(0))


@pytest.mark.slow
def test_it_finds_the_true_frequencies():
    generator = torch.Generator().manual_seed(0)
    probability_I = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05]).repeat(20)
    frequency = ItemFrequency(bits=12, arrays=3, alpha=0.01)
    for _ in range(3000):
        frequency((torch.rand(100, generator=generator) < probability_I).nonzero().flatten())
    got_KI = frequency.eval()(torch.arange(100)).exp().view(20, 5).t()
    assert bool((got_KI[0] == 1).all())
    torch.testing.assert_close(got_KI.mean(1), probability_I[:5], rtol=0.1, atol=0)


def test_it_follows_a_change():
    frequency, item = ItemFrequency(bits=8, alpha=0.2), torch.tensor([7])
    for _ in range(10):
        frequency(item)
    assert float(frequency(item).exp()) == 1
    for k in range(300):
        frequency(item if k % 10 == 9 else item[:0])
    assert float(frequency.eval()(item).exp()) == pytest.approx(0.1, rel=0.05)


def test_more_arrays_suffer_less_from_shared_slots():
    def error(arrays):
        frequency = ItemFrequency(bits=7, arrays=arrays)
        for k in range(200):
            frequency(torch.arange(k % 10, 200, 10))  # every item is in every tenth batch
        return float((frequency.eval()(torch.arange(200)).exp() - 0.1).abs().mean())

    assert error(4) < error(1) / 2


def test_counting_is_for_training():
    frequency, items_B = ItemFrequency(bits=8), torch.tensor([3, 3, 4])
    assert torch.equal(frequency.eval()(items_B), torch.zeros(3))
    frequency.train()(items_B)
    frequency(items_B[:0])
    state = copy.deepcopy(frequency.state_dict())
    before = frequency.eval()(items_B)
    assert torch.equal(frequency(items_B), before)
    assert all(torch.equal(state[name], tensor) for name, tensor in frequency.state_dict().items())
    other = ItemFrequency(bits=8, seed=5)
    other.load_state_dict(state)
    for one in (frequency.train(), other):
        one(items_B)
    assert torch.equal(frequency(items_B.int()), other(items_B))


def test_what_cannot_be():
    with pytest.raises(SpecError, match="1 to 40 bits"):
        ItemFrequency(bits=0)
    with pytest.raises(SpecError, match="0 and at most"):
        ItemFrequency(alpha=0)
