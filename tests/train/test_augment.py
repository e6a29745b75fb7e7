"""`train.augment`: what stays is as it was, in its order, and as often as the settings say."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Batch, Jagged
from rowwise.tables.batch import SharedBags
from rowwise.train.augment import augment
from rowwise.train.settings import Augment

shares = st.floats(0, 0.99)
bags = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def make_batch(lengths, weighted=False):
    """Ids that count, so that each is found again; feature `b` has the lengths of `a` in reverse."""
    ids = itertools.count()
    lists = {
        name: [[next(ids) for _ in range(n)] for n in order] for name, order in (("a", lengths), ("b", lengths[::-1]))
    }
    sparse = Jagged.from_lists(lists)
    weights_N = sparse.values_N.float() + 0.5 if weighted else None
    sparse = Jagged(
        features=sparse.features, values_N=sparse.values_N, lengths_FB=sparse.lengths_FB, weights_N=weights_N
    )
    size = len(lengths)
    return Batch(dense_BF=torch.ones(size, 2), sparse=sparse, labels_BK=torch.zeros(size, 1), keys_B=torch.arange(size))


def lists_of(batch):
    return [bag.tolist() for bag in batch.sparse.values_N.split(batch.sparse.lengths_FB.tolist())]


@given(bags, shares, st.integers(0, 99))
def test_a_cropped_list_is_a_run_of_the_list(lengths, share, seed):
    batch = make_batch(lengths)
    torch.manual_seed(seed)
    changed = augment(batch, Augment(crop_lists=share))
    for whole, part in zip(lists_of(batch), lists_of(changed), strict=True):
        assert len(part) >= (1 - share) * len(whole) - 1e-5
        assert part in [whole[begin : begin + len(part)] for begin in range(len(whole) + 1)]
    assert changed.dense_BF is batch.dense_BF
    assert torch.equal(changed.keys_B, batch.keys_B)


@given(bags, shares, st.integers(0, 99))
def test_an_only_id_stays_where_ids_are_dropped(lengths, share, seed):
    batch = make_batch(lengths, weighted=True)
    torch.manual_seed(seed)
    changed = augment(batch, Augment(drop_ids=share))
    for whole, part in zip(lists_of(batch), lists_of(changed), strict=True):
        assert set(part) <= set(whole)
        assert part == sorted(part)
        assert len(whole) != 1 or part == whole
    assert torch.equal(changed.sparse.weights_N, changed.sparse.values_N.float() + 0.5)


@given(bags, shares, st.integers(0, 99))
def test_a_dropped_feature_has_no_ids(lengths, share, seed):
    batch = make_batch(lengths)
    torch.manual_seed(seed)
    changed = augment(batch, Augment(drop_features=share))
    assert all(part in ([], whole) for whole, part in zip(lists_of(batch), lists_of(changed), strict=True))
    assert set(changed.dense_BF.flatten().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("settings", [Augment(drop_ids=0.3), Augment(drop_features=0.3), Augment(crop_lists=0.6)])
def test_as_much_is_left_out_as_the_settings_say(settings):
    """Three tenths of the ids: a list of 100 loses 0 to 60 of them, each number as often."""
    torch.manual_seed(0)
    batch = make_batch([100] * 1000) if settings.crop_lists else make_batch([2] * 20_000)
    changed = [augment(batch, settings) for _ in range(2)]
    for one in changed:
        assert len(one.sparse.values_N) / len(batch.sparse.values_N) == pytest.approx(0.7, abs=0.02)
    if settings.drop_features:
        assert changed[0].dense_BF.mean() == pytest.approx(0.7, abs=0.02)
    assert not torch.equal(changed[0].sparse.lengths_FB, changed[1].sparse.lengths_FB)


def test_samples_that_share_a_bag_are_changed_one_by_one():
    inside = Jagged.from_lists({"c": [list(range(40)), []]})
    own = Jagged.from_lists({"a": [[1], [2], [3]]})
    shared = SharedBags(jagged=inside, inverse_B=torch.tensor([0, 0, 1]))
    sparse = Jagged(features=own.features, values_N=own.values_N, lengths_FB=own.lengths_FB, shared=shared)
    torch.manual_seed(0)
    changed = augment(
        Batch(dense_BF=torch.ones(3, 0), sparse=sparse, labels_BK=torch.zeros(3, 1)), Augment(drop_ids=0.5)
    )
    first, second, last = lists_of(changed)[3:]
    assert first != second
    assert last == []


def test_a_malformed_batch_is_left_to_the_lookup_that_raises_on_all_ranks():
    sparse = Jagged(features=("a",), values_N=torch.tensor([1, 2]), lengths_FB=torch.tensor([3, -1]))
    batch = Batch(dense_BF=torch.ones(2, 0), sparse=sparse, labels_BK=torch.zeros(2, 1))
    assert augment(batch, Augment(drop_ids=0.5)) is batch
    shared = SharedBags(jagged=Jagged.from_lists({"c": [[1], [2]]}), inverse_B=torch.tensor([1, 0]))
    own = Jagged.from_lists({"a": [[1], [2]]})
    sparse = Jagged(features=own.features, values_N=own.values_N, lengths_FB=own.lengths_FB, shared=shared)
    batch = Batch(dense_BF=torch.ones(2, 0), sparse=sparse, labels_BK=torch.zeros(2, 1))
    assert augment(batch, Augment(drop_ids=0.5)) is batch
