"""Rows that move to another map are what plain loops over ids say, and stay the same bits where ids stay together."""

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tables.ids.maps import make_maps
from tables.ids.moved_rows import MOVABLE, SEVERAL, by_loops, movable_to, rows_in

from rowwise.base.errors import SpecError
from rowwise.tables.ids import remap
from rowwise.tables.ids.arrays import entry_map, ranked_map
from rowwise.tables.ids.remap import average_rows, check_movable, find_moves, same_rows
from rowwise.tables.ids.rows import look_up_rows
from rowwise.tables.ids.rules import hash_map

KINDS = tuple(make_maps(40))
DIM = 8


@contextmanager
def small_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remap, "MAX_IDS", 7)
        patch.setattr(remap, "MAX_FLOATS", 20)
        yield


def all_moved(old, new, parts, weights_N, state=False):
    """All parts, with rows as whoever stores them puts them together."""
    found = []
    for move, rows_RD in zip(find_moves(old, new), parts, strict=True):
        cut = move.rows // 2
        both = [
            average_rows(
                move, rows, lambda rows_K, rows_RD=rows_RD: rows_RD[rows_K], lambda ids: weights_N[ids], state=state
            )
            for rows in ((0, cut), (cut, move.rows))
        ]
        made = np.concatenate(both)
        made[move.same_R >= 0] = rows_RD[move.same_R[move.same_R >= 0]]
        found.append(made)
    return found


def draw_rows(old, seed, width=None):
    generator = np.random.default_rng(seed)
    widths = [min(part.dim or DIM, DIM) if width is None else width for part in old.shape.parts]
    return [
        generator.standard_normal((part.rows, width)).astype(np.float32)
        for part, width in zip(old.shape.parts, widths, strict=True)
    ]


def check_moved(old, new, seed, weigh, state):
    ids = old.shape.ids
    weights_N = np.random.default_rng(seed).integers(1, 9, ids) if weigh else np.ones(ids)
    parts = draw_rows(old, seed, 1 if state else None)
    with small_steps():
        found = all_moved(old, new, parts, weights_N, state)
    for index, (move, rows_RD) in enumerate(zip(find_moves(old, new), parts, strict=True)):
        want, same = by_loops(old, new, index, rows_RD, weights_N, state)
        assert move.same_R.tolist() == same
        assert found[index].dtype == np.float32
        assert np.allclose(found[index], want, atol=1e-6)
        assert (move.kept, move.rows) == (sum(row >= 0 for row in same), len(want))
        assert move.empty == len(want) - len({row for some in rows_in(new, index) for row in some})


@given(
    seed=st.integers(0, 10_000),
    ids=st.sampled_from((3, 40, 150)),
    kind=st.sampled_from(MOVABLE),
    other=st.integers(0, len(KINDS)),
    weigh=st.booleans(),
    state=st.booleans(),
)
def test_moved_rows_are_means_of_what_their_ids_were(seed, ids, kind, other, weigh, state):
    new = make_maps(ids, seed + 1)[kind]
    from_these = movable_to(new, ids, seed, DIM)
    assume(from_these)  # with few ids there are fewer parts
    check_moved(from_these[other % len(from_these)], new, seed, weigh, state)


@pytest.mark.few(4)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("kind", MOVABLE)
def test_from_every_kind_to_every_other(kind, state):
    new = make_maps(60, 1)[kind]
    for old in movable_to(new, 60, 2, DIM):
        check_moved(old, new, 3, True, state)


@pytest.mark.parametrize("kind", MOVABLE)
def test_rows_of_ids_that_stay_together_are_the_same_bits(kind):
    old = make_maps(60, 5)[kind]
    parts = draw_rows(old, 1)
    for index, (before, after) in enumerate(zip(parts, all_moved(old, old, parts, np.ones(60)), strict=True)):
        has_ids = sorted({row for some in rows_in(old, index) for row in some})
        assert np.array_equal(before[has_ids], after[has_ids])
        assert not np.delete(after, has_ids, 0).any()
    assert same_rows(old, make_maps(60, 5)[kind])
    assert not same_rows(old, hash_map(60, 59, 77))


def test_clusters_with_other_numbers_are_the_same_rows():
    generator = np.random.default_rng(0)
    rows_N = generator.integers(0, 10, 200)
    other = generator.permutation(10)
    old, new = entry_map(200, rows_N, 10), entry_map(200, other[rows_N], 10)
    (rows_RD,) = draw_rows(old, 3)
    (found,) = all_moved(old, new, [rows_RD], generator.integers(1, 100, 200))
    assert np.array_equal(found[other], rows_RD)
    (move,) = find_moves(old, new)
    assert (move.kept, move.empty) == (10, 0)


def test_ids_that_get_rows_of_their_own_begin_as_the_row_they_shared():
    old, new = hash_map(50, 6, 1), ranked_map(50, [np.arange(0, 50, 3)], 4)
    (rows_RD,) = draw_rows(old, 3)
    (found,) = all_moved(old, new, [rows_RD], np.ones(50))
    before, after = look_up_rows(old, np.arange(50))[:, 0], look_up_rows(new, np.arange(50))[:, 0]
    assert np.array_equal(found[after[::3]], rows_RD[before[::3]])


@pytest.mark.parametrize("kind", SEVERAL)
def test_maps_with_several_rows_for_an_id_are_not_moved_to(kind):
    made = make_maps(60)
    with pytest.raises(SpecError, match=r"gives id \d+ several"):
        find_moves(made["hash"], made[kind])


def test_what_does_not_fit_is_refused():
    made = make_maps(60)
    for old, new, said in (
        (hash_map(60, 5), hash_map(61, 5), "the old map has 60 ids and the new one 61"),
        (made["product"], made["hash"], "the old map multiplies rows"),
        (made["hash"], made["product"], "the new map multiplies rows"),
        (made["hash"], made["mixed"], "parts 1 of 8 columns, the new one 3 of 8, 2, 1"),
    ):
        with pytest.raises(SpecError, match=said):
            check_movable(old.shape, new.shape, DIM)
    check_movable(made["hash"].shape, ranked_map(60, [np.arange(3)], 0, dims=[DIM + 1]).shape, DIM)
