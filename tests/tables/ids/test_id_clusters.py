"""Clusters: a partition with the means it says, no worse than slow Lloyd, the same bits on any threads and processor.

The oracle is numpy's: all distances, written out. Sizes: N points, D dims, K clusters.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.tables.ids.cluster import ClusterEffort, Clusters, apportion, cluster
from rowwise.tables.ids.native import library

CUT = ClusterEffort(plain=1 << 12)  # small problems, but cut into cells
ONCE = 1  # tries
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def squares(vectors_ND: Floats, centroids_KD: Floats) -> Doubles:
    """From each to each."""
    away_NKD = vectors_ND[:, None].astype(np.float64) - centroids_KD[None]
    return (away_NKD**2).sum(2)


def error(vectors_ND: Floats, weights_N: Doubles, found: Clusters) -> float:
    """The weighted sum of squares."""
    away_ND = vectors_ND.astype(np.float64) - found.centroids_KD[found.label_N]
    return float((weights_N * (away_ND**2).sum(1)).sum())


def lloyd(vectors_ND: Floats, weights_N: Doubles, clusters: int, seed: int) -> float:
    """The error of plain Lloyd from seeds that k-means++ draws, until nothing changes."""
    draws = np.random.default_rng(seed)
    centroids_KD = vectors_ND[draws.choice(len(vectors_ND), 1, p=weights_N / weights_N.sum())].astype(np.float64)
    while len(centroids_KD) < clusters:
        worth_N = weights_N * squares(vectors_ND, centroids_KD.astype(np.float32)).min(1)
        chosen = draws.choice(len(vectors_ND), 1, p=worth_N / worth_N.sum())
        centroids_KD = np.concatenate([centroids_KD, vectors_ND[chosen]])
    before = math.inf
    while True:
        far_NK = squares(vectors_ND, centroids_KD.astype(np.float32))
        label_N = far_NK.argmin(1)
        now = float((weights_N * far_NK.min(1)).sum())
        if not now < before * (1 - 1e-9):
            return now
        before = now
        for k in range(clusters):
            mine = label_N == k
            if weights_N[mine].sum() > 0:
                centroids_KD[k] = np.average(vectors_ND[mine], axis=0, weights=weights_N[mine])


def same(one: Clusters, other: Clusters) -> bool:
    """The same bits."""
    return (
        np.array_equal(one.label_N, other.label_N)
        and one.centroids_KD.tobytes() == other.centroids_KD.tobytes()
        and one.weight_K.tobytes() == other.weight_K.tobytes()
    )


def check(vectors_ND: Floats, weights_N: Doubles, clusters: int, found: Clusters) -> None:
    """Labels, weights and means fit together."""
    count = len(found.weight_K)
    assert found.label_N.dtype == np.int32
    assert found.centroids_KD.shape == (count, vectors_ND.shape[1])
    assert count <= clusters
    assert np.array_equal(np.unique(found.label_N), np.arange(count))  # none is empty
    weight_K = np.bincount(found.label_N, weights_N, minlength=count)
    np.testing.assert_allclose(found.weight_K, weight_K, rtol=1e-9, atol=1e-300)
    if not weights_N.any():
        weights_N = np.ones_like(weights_N)
        weight_K = np.bincount(found.label_N, minlength=count).astype(np.float64)
    has = weight_K > 0
    for d in range(vectors_ND.shape[1]):
        mean_K = np.bincount(found.label_N, weights_N * vectors_ND[:, d], minlength=count)[has] / weight_K[has]
        np.testing.assert_allclose(found.centroids_KD[has, d], mean_K, rtol=1e-4, atol=1e-5)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, Doubles, int]:
    """Points of few or many values, of which some weigh nothing."""
    points, dims = draw(st.integers(1, 400)), draw(st.sampled_from([1, 2, 3, 4, 5, 8, 17, 64]))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    vectors_ND = random.standard_normal((points, dims)).astype(np.float32)
    if draw(st.booleans()):
        vectors_ND = np.round(vectors_ND)  # many are equal
    weights_N = random.random(points) ** draw(st.sampled_from([0, 1, 8]))
    weights_N[random.random(points) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    return vectors_ND, weights_N, draw(st.integers(1, 420))


@settings(deadline=None)
@given(problems(), st.sampled_from([ClusterEffort(), CUT, ClusterEffort(tries=ONCE, rounds=1)]), st.integers(0, 99))
def test_clusters_are_what_they_say(problem: tuple[Floats, Doubles, int], effort: ClusterEffort, seed: int) -> None:
    vectors_ND, weights_N, clusters = problem
    found = cluster(vectors_ND, weights_N, clusters, seed=seed, effort=effort)
    check(vectors_ND, weights_N, clusters, found)
    different = len(np.unique(vectors_ND + np.float32(0), axis=0))
    if different <= clusters:
        assert len(found.weight_K) == different
        assert np.array_equal(found.centroids_KD[found.label_N], vectors_ND)
    else:
        far_NK = squares(vectors_ND, found.centroids_KD)
        mine_N = far_NK[np.arange(len(vectors_ND)), found.label_N]
        if weights_N.any() and effort != CUT:  # the nearest of all, as there is one cell
            without = weights_N == 0
            np.testing.assert_allclose(mine_N[without], far_NK.min(1)[without], rtol=1e-3, atol=1e-4)


@settings(deadline=None, max_examples=30)
@given(problems(), st.integers(0, 99))
def test_until_nothing_moves_labels_are_the_nearest(problem: tuple[Floats, Doubles, int], seed: int) -> None:
    vectors_ND, weights_N, clusters = problem
    found = cluster(vectors_ND, weights_N, clusters, seed=seed, effort=ClusterEffort(rounds=1000))
    far_NK = squares(vectors_ND, found.centroids_KD)
    mine_N = far_NK[np.arange(len(vectors_ND)), found.label_N]
    np.testing.assert_allclose(mine_N, far_NK.min(1), rtol=1e-3, atol=1e-4)


@settings(deadline=None, max_examples=30)
@given(problems(), st.integers(0, 99))
def test_more_rounds_are_never_worse(problem: tuple[Floats, Doubles, int], seed: int) -> None:
    vectors_ND, weights_N, clusters = problem
    errors = [
        error(vectors_ND, weights_N, cluster(vectors_ND, weights_N, clusters, seed=seed, effort=effort))
        for effort in (ClusterEffort(rounds=rounds, tries=ONCE) for rounds in (1, 2, 3, 5, 9, 20))
    ]
    slack = 1e-5 * weights_N.sum() * (1 + np.abs(vectors_ND).max() ** 2)
    assert all(after <= before + slack for before, after in itertools.pairwise(errors)), errors


@settings(deadline=None, max_examples=50)
@given(problems(), st.floats(2, 6), st.sampled_from([ClusterEffort(), CUT]))
def test_a_cap_holds_but_for_heavier_points(
    problem: tuple[Floats, Doubles, int], times: float, effort: ClusterEffort
) -> None:
    vectors_ND, weights_N, clusters = problem
    clusters = min(clusters, len(vectors_ND))
    cap = float(times * weights_N.sum() / clusters) or 1.0
    while (weights_N > cap).sum() + 2 * weights_N[weights_N <= cap].sum() / cap > clusters:
        cap *= 1.5
    found = cluster(vectors_ND, weights_N, clusters, seed=3, cap=cap, effort=effort)
    check(vectors_ND, weights_N, clusters, found)
    for k in np.flatnonzero(found.weight_K > cap * (1 + 1e-9)):
        assert np.count_nonzero(weights_N[found.label_N == k]) == 1


def test_a_cap_that_cannot_hold_is_refused() -> None:
    vectors_ND, weights_N = np.zeros((10, 2), np.float32), np.ones(10)
    assert len(cluster(vectors_ND, weights_N, 5, cap=2).weight_K) == 5
    with pytest.raises(SpecError, match="points that weigh 10"):
        cluster(vectors_ND, weights_N, 4, cap=2)


def planted(points: int, clusters: int, seed: int) -> tuple[Floats, Doubles]:
    """Points around centres, with weights."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((clusters, 3)) * 6
    vectors_ND = centres[random.integers(0, clusters, points)] + random.standard_normal((points, 3))
    return vectors_ND.astype(np.float32), random.random(points)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_planted_clusters_are_found_as_well_as_by_many_slow_starts(seed: int) -> None:
    vectors_ND, weights_N = planted(600, 12, seed)
    slow = min(lloyd(vectors_ND, weights_N, 12, start) for start in range(30))
    assert error(vectors_ND, weights_N, cluster(vectors_ND, weights_N, 12, seed=seed)) < 1.05 * slow


@pytest.mark.slow
@pytest.mark.parametrize("skewed", [False, True])
def test_cells_cost_little(skewed: bool) -> None:
    random = np.random.default_rng(5)
    vectors_ND = random.standard_normal((20_000, 4)).astype(np.float32)
    weights_N = 1 / (1.0 + random.permutation(20_000)) if skewed else np.ones(20_000)
    whole = cluster(vectors_ND, weights_N, 500)
    cut = cluster(vectors_ND, weights_N, 500, effort=ClusterEffort(plain=1 << 20))
    assert not same(whole, cut)
    assert len(cut.weight_K) == 500
    assert error(vectors_ND, weights_N, cut) < 1.12 * error(vectors_ND, weights_N, whole)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 3, 4, 7, 8])
def test_threads_and_processors_do_not_change_a_bit(dims: int) -> None:
    random = np.random.default_rng(dims)
    vectors_ND = random.standard_normal((5000, dims)).astype(np.float32)
    weights_N = random.random(5000)
    before = library.rw_hashing_isa()
    for effort, cap in ((ClusterEffort(), None), (CUT, None), (CUT, 4 * weights_N.sum() / 700)):
        one = cluster(vectors_ND, weights_N, 700, seed=7, cap=cap, effort=ClusterEffort(plain=effort.plain, threads=1))
        for threads in (2, 3):
            more = ClusterEffort(plain=effort.plain, threads=threads)
            assert same(one, cluster(vectors_ND, weights_N, 700, seed=7, cap=cap, effort=more))
        try:
            for name in (b"base", b"avx2", b"avx512"):
                if library.rw_hashing_limit(name):
                    assert same(one, cluster(vectors_ND, weights_N, 700, seed=7, cap=cap, effort=effort))
        finally:
            library.rw_hashing_limit(before)
    assert not same(one, cluster(vectors_ND, weights_N, 700, seed=8, effort=CUT))


def test_scale_does_not_matter() -> None:
    random = np.random.default_rng(1)
    vectors_ND = random.standard_normal((900, 4)).astype(np.float32)
    one = cluster(vectors_ND, np.ones(900), 40)
    for scale in (2.0**-90, 2.0**100):
        other = cluster(vectors_ND * np.float32(scale), np.full(900, 2.0**600), 40)
        assert np.array_equal(one.label_N, other.label_N)
        np.testing.assert_array_equal(one.centroids_KD * np.float32(scale), other.centroids_KD)


@pytest.mark.slow
def test_many_equal_vectors_still_let_the_others_apart() -> None:
    vectors_ND = np.zeros((200_000, 2), np.float32)
    vectors_ND[:600] = np.random.default_rng(0).standard_normal((600, 2))
    found = cluster(vectors_ND, np.ones(200_000), 300, effort=CUT)
    check(vectors_ND, np.ones(200_000), 300, found)
    assert len(found.weight_K) > 250
    assert found.weight_K.max() >= 199_400


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(1, 50)), min_size=1, max_size=40), st.integers(0, 1500))
@example([(0.0, 2), (1.0, 1), (6.6e-292, 1)], 0)  # bounds whose product no float holds
@example([(5e-324, 3), (1e9, 3), (1e-300, 50)], 9)
def test_shares_add_up_within_their_limits(cells: list[tuple[float, int]], more: int) -> None:
    amount_C, max_C = np.array([c[0] for c in cells]), np.array([c[1] for c in cells])
    min_C = np.minimum(max_C, 1 + np.arange(len(cells)) % 3)
    total = len(cells) + more
    share_C = apportion(amount_C, min_C, max_C, total)
    assert (share_C >= 1).all()
    assert (share_C <= max_C).all()
    assert share_C.sum() <= total
    if min_C.sum() <= total:
        assert (share_C >= min_C).all()
    if (amount_C > 1e-3).all() and total <= max_C.sum():
        assert share_C.sum() == total


def test_no_points_have_no_clusters() -> None:
    found = cluster(np.empty((0, 4), np.float32), np.empty(0), 3)
    assert (found.label_N.shape, found.centroids_KD.shape, found.weight_K.shape) == ((0,), (0, 4), (0,))


def test_bad_input_is_refused() -> None:
    vectors_ND, weights_N = np.ones((6, 2), np.float32), np.ones(6)
    with pytest.raises(SpecError, match=r"float32\[N, D\], of 1"):
        cluster(vectors_ND.astype(np.float64), weights_N, 2)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(SpecError, match=r"vectors are float32\[6, 65\]"):
        cluster(np.ones((6, 65), np.float32), weights_N, 2)
    with pytest.raises(SpecError, match="float32 or float64, one"):
        cluster(vectors_ND, weights_N[:5], 2)
    with pytest.raises(SpecError, match="number of at least"):
        cluster(vectors_ND, weights_N, 0)
    with pytest.raises(SpecError, match="0, or None"):
        cluster(vectors_ND, weights_N, 2, cap=math.nan)
    for bad in (math.nan, math.inf, -math.inf):
        worse_ND = vectors_ND.copy()
        worse_ND[4, 1] = bad
        with pytest.raises(SpecError, match=r"vector 4 is .*"):
            cluster(worse_ND, weights_N, 2)
    for bad in (math.nan, math.inf, -1.0):
        worse_N = weights_N.copy()
        worse_N[3] = bad
        with pytest.raises(SpecError, match=r"weight 3 is .*"):
            cluster(vectors_ND, worse_N, 2)
