"""Exact searches in slices have the bits of those of all items at once."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import nearest_items
from rowwise.serve.item_scan import ItemFilter, ItemScan

DIM = 3
places = st.sets(st.integers(0, 59))


def as_places(chosen, items):
    return None if chosen is None else torch.tensor(sorted(place for place in chosen if place < items)).long()


@given(
    items=st.integers(0, 60), k=st.integers(1, 70), rows=st.integers(1, 25), seed=st.integers(0, 99),
    among=st.none() | places, without=st.none() | places,
)  # fmt: skip
def test_slices_change_nothing(items, k, rows, seed, among, without):
    """With many equal dots, filters of all kinds, slices that are empty, and more wanted than there are."""
    draw = torch.Generator().manual_seed(seed)
    items_ID = torch.randint(-2, 3, (items, DIM), generator=draw).float()
    query_D = torch.randint(-2, 3, (DIM,), generator=draw).float() / 3
    allowed = ItemFilter(as_places(among, items), as_places(without, items))
    scan, steps = ItemScan(query_D, items_ID, k, allowed, slice_bytes=4 * DIM * rows), 1
    while not scan.step():
        steps += 1
    count = items if among is None else len(allowed.among_A)
    assert steps == scan.slices == max(1, -(-count // rows))
    assert scan.fits_at_once(1) == (count <= rows)
    left = np.arange(items) if among is None else allowed.among_A.numpy()
    left = np.setdiff1d(left, [] if without is None else allowed.without_W.numpy()).astype(np.int64)
    dots_K, places_K = nearest_items(query_D, items_ID, k, torch.from_numpy(left))
    found = scan.result()
    assert torch.equal(found.places_K, places_K)
    assert found.dots_K.numpy().tobytes() == dots_K.numpy().tobytes()
    assert found.exact
