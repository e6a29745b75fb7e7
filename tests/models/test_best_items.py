"""The best items of many users: those of `nearest_items`, bit for bit, with ties, left-out items and few items."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import BatchError
from rowwise.models import best_items as module
from rowwise.models.best_items import SeenItems, best_items
from rowwise.models.retrieval import nearest_items


def as_csr(lists):
    starts = torch.tensor([0, *(len(items) for items in lists)]).cumsum(0)
    return SeenItems(starts, torch.tensor([item for items in lists for item in sorted(items)], dtype=torch.int64))


def check(users_UD, items_ID, k, seen=None):
    places_UK, dots_UK = best_items(users_UD, items_ID, k, None if seen is None else as_csr(seen))
    assert places_UK.shape == dots_UK.shape == (len(users_UD), min(k, len(items_ID)))
    for user, user_D in enumerate(users_UD):
        allowed = sorted(set(range(len(items_ID))) - (seen[user] if seen else set()))
        dots_K, places_K = nearest_items(user_D, items_ID, k, torch.tensor(allowed, dtype=torch.int64))
        count = len(places_K)
        assert torch.equal(places_UK[user, :count], places_K)
        assert torch.equal(dots_UK[user, :count], dots_K)
        assert (places_UK[user, count:] == -1).all()
        assert (dots_UK[user, count:] == -torch.inf).all()


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 9), st.integers(1, 50), st.booleans(), st.data())
def test_they_are_those_of_one_search_a_user(users, items, dim, k, ties, data):
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    users_UD, items_ID = torch.randn(users, dim, generator=draws), torch.randn(items, dim, generator=draws)
    if ties:
        items_ID = items_ID[torch.randint(max(1, items // 4), (items,), generator=draws)]
    seen = data.draw(st.none() | st.lists(st.sets(st.integers(0, items - 1)), min_size=users, max_size=users))
    check(users_UD, items_ID, k, seen)


@pytest.mark.parametrize("items", [module.ITEMS + 8, 3 * module.ITEMS + 5])
def test_items_of_several_blocks(items):
    draws = torch.Generator().manual_seed(1)
    users_UD, items_ID = torch.randn(module.USERS + 3, 8, generator=draws), torch.randn(items, 8, generator=draws)
    best = nearest_items(users_UD[0], items_ID, 20)[1].tolist()
    chosen = torch.tensor([0, 1, 100, module.USERS, module.USERS + 2])
    seen = [set(best[::2]), set(), set(range(items - 3)), set(), set(range(0, items, 2))]
    check(users_UD[chosen], items_ID, 9, seen)
    all_K = best_items(users_UD, items_ID, 9)
    assert torch.equal(all_K.places_UK[chosen], best_items(users_UD[chosen], items_ID, 9).places_UK)


def test_equal_items_and_users_of_zero_take_the_first_items():
    users_UD = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    places_UK, _ = best_items(users_UD, torch.ones(module.ITEMS + 8, 2), 3)
    assert places_UK.tolist() == [[0, 1, 2]] * 2


def test_what_does_not_fit_is_refused():
    assert best_items(torch.empty(0, 2), torch.ones(3, 2), 5).places_UK.shape == (0, 3)
    with pytest.raises(BatchError, match=r"users \(1, 2\), items \(3, 4\)"):
        best_items(torch.ones(1, 2), torch.ones(3, 4), 1)
