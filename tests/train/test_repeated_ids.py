"""A sample of ids tells how many different ones there are, whoever saw them and in which order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.train import repeats
from rowwise.train.repeats import MAX_SAMPLED, IdSample

ids = st.lists(st.integers(0, 60) | st.integers(0, 2**62), max_size=40)


def seen(parts):
    made = IdSample()
    for part in parts:
        made.add(torch.as_tensor(part, dtype=torch.int64))
    return made


def facts(made):
    return made.looked_at, made.level, made.ids_D.tolist(), made.counts_D.tolist()


@given(st.lists(ids, max_size=6), st.integers(0, 6), st.integers(1, 20))
def test_a_sample_is_of_what_was_seen_and_not_of_how(parts, cut, most):
    """In one go, or by two ranks that saw some each, in any order: the same ids with all of their counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "MAX_SAMPLED", most)
        everything = [i for part in parts for i in part]
        whole, turned = seen([everything]), seen(parts[::-1])
        one, other = seen(parts[:cut]), seen(parts[cut:])
        one.merge(other)
        assert facts(whole) == facts(turned) == facts(one)
        assert whole.looked_at == len(everything)
        assert len(whole.ids_D) <= most
        assert whole.counts_D.tolist() == [everything.count(i) for i in whole.ids_D.tolist()]
        if len(set(everything)) <= most:
            assert whole.ids_D.tolist() == sorted(set(everything))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 60))
def test_different_ids_of_a_part(drawn, size):
    """What a draw has on average: exact at the ends, and rising with its size in between."""
    made = seen([drawn])
    size = min(size, len(drawn))
    one, some, every = made.expected_distinct(np.array([1e-9, size, len(drawn)]))
    assert one == pytest.approx(1e-9, rel=1e-4)
    assert every == len(set(drawn))
    assert one <= some <= min(size, every) + 1e-9
    assert made.expected_distinct(np.array([10.0 * len(drawn)]))[0] == every  # no more than was looked at


@pytest.mark.parametrize("rows", [1_000, 100_000, 5_000_000])
def test_many_ids(rows):
    generator = torch.Generator().manual_seed(rows)
    drawn = (torch.rand(400_000, generator=generator) ** 3 * rows).long() * 64  # a stride, as hashes of ids may have
    made = seen(drawn.split(50_000))
    assert len(made.ids_D) <= MAX_SAMPLED
    want = len(drawn.unique())
    assert made.expected_distinct(np.array([400_000.0]))[0] == pytest.approx(want, rel=0.1)
    part = drawn[torch.randperm(400_000, generator=generator)[:50_000]]
    assert made.expected_distinct(np.array([50_000.0]))[0] == pytest.approx(len(part.unique()), rel=0.1)
