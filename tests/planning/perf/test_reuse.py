"""Bins of reuse against ids that were drawn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.planning.perf.reuse import BINS, reuse_bins
from rowwise.tables.spec import Table


def curves(rows, pooling, a, q=0.0, batch=4096):
    return Curves.of((Workload(table=Table(name="t", rows=rows, dim=4), access=Access(pooling, a, q)),), batch)


@pytest.mark.parametrize(("rows", "a", "pooling"), [(100, 0.0, 10), (5000, 1.05, 8), (200_000, 0.7, 20), (30, 1.5, 40)])
def test_bins_are_those_of_drawn_ids(rows, a, pooling):
    rng = np.random.default_rng(0)
    weight_R = np.arange(1, rows + 1) ** -a
    count_R = rng.poisson(4096 * pooling * weight_R / weight_R.sum())
    touched = count_R[count_R > 0]
    bin_N = np.minimum(np.ceil(np.log2(touched)).astype(int), BINS - 1)
    drawn_B = np.bincount(bin_N, minlength=BINS) / len(touched)
    found_B = reuse_bins(curves(rows, pooling, a))[0]
    # Shares of few rows are uneven by chance: a standard error of 1/2 over the root of their number.
    assert np.abs(found_B - drawn_B).max() < 0.04 + 2 / np.sqrt(len(touched))


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 10**9),
    pooling=st.floats(0, 300),
    a=st.floats(0, 3),
    q=st.floats(0, 1e6),
    share=st.floats(1e-3, 1),
)
def test_shares_add_up_to_one(rows, pooling, a, q, share):
    found_TB = reuse_bins(curves(rows, pooling, a, q), share)
    assert found_TB.shape == (1, BINS)
    assert (found_TB >= 0).all()
    assert found_TB.sum() == pytest.approx(1.0, abs=1e-6)


def test_more_ids_mean_more_repeats():
    few, many = (reuse_bins(curves(1000, pooling, 0.9))[0] @ np.arange(BINS) for pooling in (1, 50))
    assert many > few + 2
