"""An index of items: what it proposes, what is measured of it, and how many lists are chosen for a recall."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from rowwise import CheckpointError, nearest_items
from rowwise.recipes.export_items import measure
from rowwise.serve.item_index import ItemIndex, choose_lists
from rowwise.serve.item_scan import ItemFilter
from rowwise.serve.items import ChosenProbes, IndexFacts, open_items, write_items, write_vectors

ITEMS, DIM, LISTS = 3000, 24, 32


def vectors(count, seed, middles=40, spread=0.4):
    middle_MD = np.random.default_rng(0).standard_normal((middles, DIM), np.float32)
    draw = np.random.default_rng(seed)
    made = middle_MD[draw.integers(0, middles, count)] + spread * draw.standard_normal((count, DIM), np.float32)
    return torch.nn.functional.normalize(torch.from_numpy(made))


@pytest.fixture(scope="module")
def index():
    torch.set_num_threads(1)
    return ItemIndex.build(vectors(ITEMS, 1), LISTS)


def test_all_lists_hold_all_items(index):
    items_ID = vectors(ITEMS, 1)
    for query_D in vectors(10, 2):
        proposed = index.propose(query_D, 50, LISTS)
        assert set(nearest_items(query_D, items_ID, 40)[1].tolist()) <= set(proposed.tolist())
        assert sorted(index.propose(query_D, 2 * ITEMS, LISTS).tolist()) == list(range(ITEMS))
        costs = [index.items_compared(query_D, probes) for probes in (1, 4, LISTS)]
        assert 0 < costs[0] < costs[1] < costs[2] == ITEMS
        assert len(index.propose(query_D, ITEMS, 4)) == costs[1]


@pytest.mark.slow
def test_the_fewest_lists_that_reach_a_recall(index):
    items_ID, queries_QD = vectors(ITEMS, 1), vectors(100, 2)
    facts = measure(index, items_ID, queries_QD, LISTS, 0.95)
    assert [one.k for one in facts.chosen] == [10, 100, 1000][: len(facts.chosen)]
    probes = [one.probes for one in facts.chosen]
    assert probes == sorted(probes)
    assert probes[0] < LISTS
    for one in facts.measured:
        best = [set(nearest_items(query_D, items_ID, one.k)[1].tolist()) for query_D in queries_QD]
        pairs = zip(
            best, (index.propose(query_D, 2 * one.k, one.probes).tolist() for query_D in queries_QD), strict=True
        )
        recall = sum(len(wanted.intersection(found)) for wanted, found in pairs) / (one.k * len(queries_QD))
        assert one.recall == pytest.approx(recall, abs=0.002)  # proposals of equal scores may be in another order
    with_fewer = measure(index, items_ID, queries_QD, LISTS, 0.5)
    assert all(a.probes <= b.probes for a, b in zip(with_fewer.chosen, facts.chosen, strict=False))


def test_no_number_of_lists_is_chosen_where_most_would_be_looked_at():
    items_ID = vectors(ITEMS, 1, middles=1, spread=100.0)  # in no clusters
    facts = measure(ItemIndex.build(items_ID, LISTS), items_ID, vectors(50, 2, middles=1, spread=100.0), LISTS, 1.0)
    assert facts.chosen == ()
    assert max(one.probes for one in facts.measured) == LISTS // 2
    assert facts.probes_for(1) is None


def test_lists_for_a_number_of_items():
    facts = IndexFacts(lists=64, recall=0.9, queries=9, chosen=(ChosenProbes(10, 2), ChosenProbes(100, 8)), measured=())
    assert [facts.probes_for(k) for k in (1, 10, 11, 100, 101)] == [2, 2, 8, 8, None]
    assert [choose_lists(items) for items in (20_000, 1_000_000, 1 << 40)] == [128, 1024, 1 << 15]


def test_a_file_of_the_same_items_has_the_same_bytes(index, tmp_path):
    for name in ("a", "b"):
        ItemIndex.build(vectors(ITEMS, 1), LISTS).write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    opened = ItemIndex.open(tmp_path / "a")
    for query_D in vectors(10, 3):
        assert opened.propose(query_D, 20, 4).tolist() == index.propose(query_D, 20, 4).tolist()
    (tmp_path / "a").write_bytes((tmp_path / "b").read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r".*; export the version"):
        ItemIndex.open(tmp_path / "a")


def test_items_of_equal_score_are_in_the_order_of_their_table(index, tmp_path):
    """By index and exactly: each vector is there five times."""
    items_ID = vectors(ITEMS // 5, 1).repeat(5, 1)
    built = ItemIndex.build(items_ID, LISTS)
    facts = measure(built, items_ID, vectors(50, 2), LISTS, 0.9)
    stored_ID = write_vectors(tmp_path, items_ID.split(700))
    assert torch.equal(stored_ID, items_ID)
    written = write_items(tmp_path, "item", pa.table({"item": np.arange(ITEMS)}), stored_ID, (built, facts))
    items = open_items(tmp_path, written)
    for query_D in vectors(20, 3):
        near, exact = (items.find(query_D, 10, ItemFilter(), exact=e) for e in (False, True))
        assert (near.exact, exact.exact) == (False, True)
        for found in (near, exact):
            pairs = list(zip((-found.dots_K).tolist(), found.places_K.tolist(), strict=True))
            assert pairs == sorted(pairs)
        first = exact.places_K[:5].tolist()
        assert [place % (ITEMS // 5) for place in first] == [first[0]] * 5
