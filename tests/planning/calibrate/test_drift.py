"""Speed that drifts is told apart from costs, and nothing is taken for drift that is none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowwise.planning.calibrate.drift import estimate_slowness


def walk(count, seed=0, memory=0.95, size=0.1):
    """A slow wander whose deviation is `size`."""
    rng, found = np.random.default_rng(seed), np.zeros(count)
    for i in range(1, count):
        found[i] = memory * found[i - 1] + rng.normal() * size * np.sqrt(1 - memory**2)
    return found


def test_drift_is_found_and_noise_is_not():
    rng, count = np.random.default_rng(1), 4000
    drift, noise = walk(count), 0.05 * rng.standard_normal(count)
    rank_S, known_S = np.zeros(count, np.int64), np.arange(count) % 7 != 0
    found = estimate_slowness(drift + noise, rank_S, known_S)
    held = ~known_S
    assert np.std((drift - drift.mean() - found)[held]) < 0.4 * np.std(drift)
    still = estimate_slowness(noise, rank_S, known_S)
    assert np.std((noise - still)[held]) < 1.1 * np.std(noise[held])
    assert np.std((noise - still)[held]) > 0.95 * np.std(noise[held])  # what has no pattern is not explained away


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), count=st.integers(1, 60))
def test_nothing_of_a_held_out_set_is_used(seed, count):
    rng = np.random.default_rng(seed)
    residual_S, rank_S = rng.normal(size=count), rng.integers(0, 2, count)
    known_S = rng.random(count) < 0.7
    before = estimate_slowness(residual_S, rank_S, known_S)
    changed = np.where(known_S, residual_S, 1e3)
    np.testing.assert_allclose(estimate_slowness(changed, rank_S, known_S), before, atol=1e-12)
    # A measurement is not its own neighbour: what it says of itself only moves the mean of all.
    if known_S.sum() > 1:
        one = int(np.flatnonzero(known_S)[0])
        moved = estimate_slowness(residual_S + 5.0 * (np.arange(count) == one), rank_S, known_S) - before
        others = np.delete(np.arange(count), one)
        assert moved[one] <= moved[others].max() + 1e-9


def test_ranks_drift_by_themselves():
    count = 400
    rank_S = np.arange(count) % 2
    residual_S = np.where(rank_S == 0, 0.2, -0.2)
    found = estimate_slowness(residual_S, rank_S, np.ones(count, bool))
    assert found[rank_S == 0] == pytest.approx(0.2)
    assert found[rank_S == 1] == pytest.approx(-0.2)
