"""The nearest items: the largest dots in order, of equal ones the first, and the bits of each alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import BatchError, nearest_items, top_items
from rowwise.tables.ops import reference


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 70), st.integers(0, 9), st.data())
def test_a_sort_of_all_dots(items, dim, k, seed, data):
    """Vectors of few whole numbers have many equal dots."""
    generator = torch.Generator().manual_seed(seed)
    items_ID = torch.randint(-1, 2, (items, dim), generator=generator).float()
    query_D = torch.randint(-1, 2, (dim,), generator=generator).float()
    among = data.draw(st.none() | st.lists(st.integers(0, items - 1), unique=True).map(sorted))
    dots_I = reference.dots(query_D, items_ID).tolist()
    places = range(items) if among is None else among
    wanted = sorted(places, key=lambda place: (-dots_I[place], place))[:k]
    dots_K, places_K = nearest_items(query_D, items_ID, k, None if among is None else torch.tensor(among).long())
    assert places_K.tolist() == wanted
    assert dots_K.tolist() == [dots_I[place] for place in wanted]


@given(st.integers(1, 300), st.sampled_from([3, 16, 64, 100]), st.integers(1, 40))
def test_what_top_items_finds(items, dim, k):
    generator = torch.Generator().manual_seed(items)
    items_ID, query_D = torch.randn(items, dim, generator=generator), torch.randn(dim, generator=generator)
    dots_K, places_K = nearest_items(query_D, items_ID, k)
    assert torch.equal(dots_K, reference.dots(query_D, items_ID)[places_K])
    wanted_K, _ = top_items(query_D[None], items_ID, min(k, items))
    torch.testing.assert_close(dots_K, wanted_K[0], rtol=1e-4, atol=1e-4)
    alone = [nearest_items(query_D, items_ID[place : place + 1].clone(), 1)[0] for place in places_K.tolist()]
    assert torch.equal(dots_K, torch.cat(alone))


def test_no_items_and_bad_arguments():
    dots_K, places_K = nearest_items(torch.zeros(3), torch.zeros(0, 3), 5)
    assert (len(dots_K), len(places_K)) == (0, 0)
    for query_D, items_ID, k in ((torch.zeros(3), torch.zeros(2, 4), 1), (torch.zeros(3), torch.zeros(2, 3), 0)):
        with pytest.raises(BatchError, match="k of at least"):
            nearest_items(query_D, items_ID, k)
