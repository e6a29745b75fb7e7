"""Id maps from arrays: rows are those given, own rows are own, and words are as many as predicted."""

import numpy as np
import pytest
from conformance_idmap import FEW, SHAPES, drawn_set
from hypothesis import given
from hypothesis import strategies as st
from tables.ids.maps import make_maps

from rowwise.base.errors import SpecError
from rowwise.tables.ids import arrays, rules
from rowwise.tables.ids.idmap import MapPart, MapSection
from rowwise.tables.ids.rows import look_up_rows
from rowwise.tables.ids.words import (
    bits_for,
    low_bits_for,
    pack,
    read_set,
    set_words,
    unpack,
    words_for,
    write_set,
)

seeds = st.integers(0, 1000)


@given(bits=st.integers(0, 56), count=st.sampled_from((0, 1, 63, 64, 65, 1000, (1 << 20) + 70)), seed=seeds)
def test_numbers_are_unpacked_as_they_were_packed(bits, count, seed):
    numbers_N = np.random.default_rng(seed).integers(0, 1 << bits, count)
    words = pack(numbers_N, bits)
    assert len(words) == words_for(count, bits)
    assert np.array_equal(unpack(words, count, bits), numbers_N)


@given(
    ids=st.sampled_from((*FEW, 100_000, (1 << 40) - 1)),
    shape=st.sampled_from(SHAPES),
    bits=st.integers(0, 40),
    seed=seeds,
)
def test_sets_are_read_as_they_were_written_and_take_the_words_predicted(ids, shape, bits, seed):
    random = np.random.default_rng(seed)
    set_C = drawn_set(random, ids, 20_000, shape)
    count = len(set_C)
    if not count:
        assert set_words(0, ids, bits) == 0
        return
    words = write_set(set_C, ids, random.integers(0, 1 << bits, count), bits)
    assert len(words) == set_words(count, ids, bits)
    section = MapSection(kind="listed", rows=1, count=count, low_bits=low_bits_for(count, ids), entry_bits=bits)
    assert np.array_equal(read_set(section, words, ids), set_C)
    # About 2.4 bits and what tells them apart; beside that a word or two for each of the parts.
    assert 64 * set_words(count, ids) < count * (np.log2(ids / count) + 2.7) + 64 * 5


@given(ids=st.sampled_from(FEW), rest=st.sampled_from(("own", 0, 5)), shape=st.sampled_from(SHAPES), seed=seeds)
def test_ids_of_sets_have_rows_of_their_own(ids, rest, shape, seed):
    random = np.random.default_rng(seed)
    all_C = drawn_set(random, ids, ids, shape)
    sets = [all_C[k::2] for k in range(2)]
    if not len(all_C) and rest == 0:
        with pytest.raises(SpecError, match="no rows for any"):
            arrays.ranked_map(ids, sets, rest)
        return
    found_N = look_up_rows(arrays.ranked_map(ids, sets, rest), np.arange(ids))[:, 0]
    assert np.array_equal(found_N[np.concatenate(sets)], np.arange(len(all_C)))
    others_N = np.delete(found_N, all_C)
    if rest == "own":
        assert np.array_equal(others_N, np.arange(len(all_C), ids))
    elif rest == 0:
        assert (others_N == -1).all()
    else:
        hashed_N = look_up_rows(rules.hash_map(ids, rest), np.delete(np.arange(ids), all_C))[:, 0]
        assert np.array_equal(others_N, len(all_C) + hashed_N)


def test_sets_of_dims_are_parts():
    sets = [np.array([5, 7]), np.array([], np.int64), np.array([1])]
    id_map = arrays.ranked_map(10, sets, "own", dims=(16, 8, None, 2))
    assert id_map.shape.parts == (MapPart(rows=2, dim=16), MapPart(rows=1), MapPart(rows=7, dim=2))
    assert arrays.ranked_map(10, sets, 0, dims=(16, 8, 4)).shape.parts[1] == MapPart(rows=1, dim=4)
    for dims in ((16, 8), (16, 8, 4)):
        with pytest.raises(SpecError, match="expected one for each"):
            arrays.ranked_map(10, sets, "own", dims=dims)


@given(
    ids=st.sampled_from((*FEW, 20_000)),
    rows=st.sampled_from((1, 2, 100, 1 << 20)),
    empty=st.sampled_from((0, 0.01, 0.3, 0.99, 1)),
    unseen=st.sampled_from((0, 1, 10)),
    seed=seeds,
)
def test_rows_are_those_given_and_the_smaller_way_is_taken(ids, rows, empty, unseen, seed):
    random = np.random.default_rng(seed)
    rows_N = np.where(random.random(ids) < empty, -1, random.integers(0, rows, ids))
    if not unseen and (rows_N < 0).all():
        with pytest.raises(SpecError, match="no rows for any"):
            arrays.entry_map(ids, rows_N, rows, unseen_rows=unseen)
        return
    id_map = arrays.entry_map(ids, rows_N, rows, unseen_rows=unseen, seed=3)
    found_N, has_N = look_up_rows(id_map, np.arange(ids))[:, 0], rows_N >= 0
    assert np.array_equal(found_N[has_N], rows_N[has_N])
    hashed_N = rows + look_up_rows(rules.hash_map(ids, unseen, 3), np.arange(ids))[:, 0] if unseen else np.full(ids, -1)
    assert np.array_equal(found_N[~has_N], hashed_N[~has_N])
    unseen = 0 if has_N.all() else unseen
    assert id_map.shape.rows == rows + unseen
    listed = set_words(int(has_N.sum()), ids, bits_for(rows))
    every = words_for(ids, bits_for(rows + unseen))
    assert len(id_map.words) == (listed if not has_N.all() and not unseen else min(listed, every)) or has_N.all()
    assert not has_N.all() or len(id_map.words) == every


def test_added_maps_are_columns_side_by_side():
    rows_N = np.where(np.arange(100) % 3, -1, np.arange(100) % 7)
    maps = (
        arrays.entry_map(100, rows_N, 7),
        rules.double_hash_map(100, 9),
        arrays.ranked_map(100, [np.array([3, 50])], 4),
    )
    found_NC = look_up_rows(arrays.add_maps(*maps), np.arange(100))
    base, parts = 0, []
    for id_map in maps:
        parts.append(look_up_rows(id_map, np.arange(100)) + base)
        base += id_map.shape.rows
    assert np.array_equal(found_NC, np.concatenate(parts, axis=1))
    for others in ((), (make_maps(5)["direct"],), (rules.quotient_remainder_map(100, 30, 0, "product"),)):
        with pytest.raises(SpecError, match="to add up"):
            arrays.add_maps(*(maps if others else ()), *others)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([np.array([3, 2])], "set 0 of 1: expected int64"),
        ([np.array([1]), np.array([2, 2])], "set 1 of 2: expected int64"),
        ([np.array([-1])], "of 0 to 9"),
        ([np.array([10])], "of 0 to 9"),
        ([np.array([1.0])], "expected int64"),
        ([np.array([1, 2]), np.array([0, 2])], "id 2 is in two sets"),
    ],
)
def test_sets_that_are_none_are_refused(sets, said):
    with pytest.raises(SpecError, match=said):
        arrays.ranked_map(10, sets, 5)


@pytest.mark.parametrize(
    ("rows_N", "rows", "unseen", "said"),
    [
        ([0, 1], 2, 1, "rows_N has 2 entries for 3 ids"),
        ([0, 1, 2], 2, 1, "id 2 has row 2: expected 0 to 1"),
        ([0, -2, 1], 2, 1, "id 1 has row -2"),
        ([0, 1, 1], 2, -1, "expected at least"),
        ([0, 0, 0], 0, 1, "expected at least"),
    ],
)
def test_rows_that_are_none_are_refused(rows_N, rows, unseen, said):
    with pytest.raises(SpecError, match=said):
        arrays.entry_map(3, np.array(rows_N), rows, unseen_rows=unseen)
