"""Semantic ids: residual k-means level by level, the same for any order of items, with collisions counted."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.tables.ids import semantic
from rowwise.tables.ids.semantic import (
    agreement,
    encode,
    fit,
    narrow,
    number_alike,
    prefixes,
    to_unit,
    unique_share,
    use_of,
)


def clustered(items=400, dim=6, seed=0):
    draw = np.random.default_rng(seed)
    middles = draw.standard_normal((8, dim)) * 4
    return (middles[draw.integers(0, 8, items)] + draw.standard_normal((items, dim))).astype(np.float32)


def test_codes_are_the_nearest_of_what_the_levels_before_leave():
    vectors = clustered()
    codebooks, codes = fit(vectors, (8, 4, 4))
    left = vectors.astype(np.float64)
    errors = [np.square(left - left.mean(0)).sum()]
    for level, centroids in enumerate(codebooks):
        distances = np.square(left[:, None] - centroids[None].astype(np.float64)).sum(2)
        chosen = distances[np.arange(len(left)), codes[:, level]]
        np.testing.assert_allclose(chosen, distances.min(1), rtol=1e-4, atol=1e-6)
        left = left - centroids[codes[:, level]]
        errors.append(np.square(left).sum())
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[1] < 0.2 * errors[0]  # the clusters are found
    again, rest = encode(vectors, codebooks)
    assert (again == codes).all()
    np.testing.assert_allclose(rest, left, atol=1e-4)
    np.testing.assert_array_equal(rest, semantic.left_over(vectors, codes, codebooks))


def test_a_balanced_fit_has_no_large_code():
    vectors = clustered()
    codes = fit(vectors, (8, 8), balance=1.25).codes_NL
    for code in codes.T:
        assert np.bincount(code).max() <= np.ceil(1.25 * len(vectors) / 8)
    assert np.bincount(fit(vectors, (8,)).codes_NL[:, 0]).max() > 1.25 * len(vectors) / 8


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=20), st.integers(0, 19))
def test_items_of_equal_codes_are_numbered_in_order(codes, cut):
    cut = min(cut, len(codes))
    expected, counts = [], {}
    for code in codes:
        expected.append(counts.get(code, 0))
        counts[code] = expected[-1] + 1
    array = np.array(codes)
    assert number_alike(array).tolist() == expected
    if 0 < cut < len(codes):
        assert number_alike(array[cut:], array[:cut]).tolist() == expected[cut:]
    assert unique_share(array) == sum(counts[code] == 1 for code in codes) / len(codes)


def test_prefixes_have_numbers_of_their_own():
    codes = np.array(list(product(range(3), range(4), range(2))))
    assert prefixes(codes, 3, (3, 4, 2)).tolist() == list(range(24))
    assert prefixes(codes, 1, (3, 4, 2)).tolist() == [row[0] for row in codes.tolist()]
    uses = use_of(codes, (3, 4, 2))
    assert [(use.codes, use.used) for use in uses] == [(3, 3), (4, 4), (2, 2)]
    assert all(use.entropy == pytest.approx(1) and use.largest == pytest.approx(1 / use.codes) for use in uses)
    assert use_of(np.zeros((5, 1), np.int64), (4,))[0].entropy == 0


def test_wide_vectors_keep_their_distances_and_unit_ones_their_direction():
    wide = clustered(60, 300)
    few = narrow(wide)
    assert few.shape == (60, 64)
    first, second = (np.square(x[:30] - x[30:]).sum(1) for x in (wide, few))
    assert np.abs(second / first - 1).mean() < 0.2
    assert narrow(clustered(5, 64)).shape == (5, 64)
    unit = to_unit(np.concatenate((wide, np.zeros((1, 300), np.float32))))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), [1] * 60 + [0], rtol=1e-5)
    np.testing.assert_allclose(unit[:60] * np.linalg.norm(wide, axis=1)[:, None], wide, rtol=1e-4)


def test_neighbours_share_codes():
    vectors = clustered()
    share, chance = agreement(vectors, fit(vectors, (8,)).codes_NL)
    assert share > 0.9
    assert 0.1 < chance < 0.2


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((), {}, "1 to 8 levels"),
        ((1,), {}, "2 to 65,536 codes"),
        ((500,), {}, "400 items for 500 codes"),
        ((4,), {"balance": 0.5}, "--balance 0.5"),
    ],
)
def test_what_cannot_be_is_refused(sizes, options, message):
    with pytest.raises(SpecError, match=message):
        fit(clustered(), sizes, **options)
