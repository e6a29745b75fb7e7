"""How rows are asked for: closed forms against sums over every row, and against batches that were really drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.planning.perf.access import Access, Curves, Workload, expected_distinct, head_share
from rowwise.tables.spec import Table


def shares(a, q, rows):
    weights = (np.arange(1, rows + 1) + q) ** -a
    return weights / weights.sum()


@given(a=st.floats(0, 2.5), q=st.floats(0, 100), rows=st.integers(1, 5000), ids=st.floats(1, 1e6), part=st.floats(0, 1))
def test_closed_forms_are_near_the_sums(a, q, rows, ids, part):
    p = shares(a, q, rows)
    exact = (-np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-12)))).sum()
    (found,) = expected_distinct(*(np.array([float(x)]) for x in (a, q, rows, ids)))
    assert found == pytest.approx(exact, rel=0.13, abs=1.2)  # worst where a few rows take nearly everything
    k = int(part * rows)
    head = head_share(np.array(a), np.array(q), np.array(float(rows)), np.array(float(k)))
    assert head == pytest.approx(p[:k].sum(), abs=0.06)


@given(a=st.floats(0.3, 1.5), q=st.floats(0, 50), ratio=st.floats(0.05, 0.9))
def test_a_measured_share_of_distinct_rows_is_kept(a, q, ratio):
    table = Table(name="t", rows=10**6, dim=8)
    access = Access(pooling=10, zipf_a=a, zipf_q=q, unique_ratio=ratio)
    curves = Curves.of([Workload(table=table, access=access)], 4096)
    most = expected_distinct(np.zeros(1), np.zeros(1), np.array([1e6]), np.array([40960.0]))[0] / 40960
    least = expected_distinct(np.array([6.0]), np.array([q]), np.array([1e6]), np.array([40960.0]))[0] / 40960
    assert curves.unique_T[0] / 40960 == pytest.approx(min(max(ratio, least), most), rel=1e-3)


def test_a_measured_curve_is_fitted():
    p = shares(1.1, 20, 10_000)
    points = [(x, float(p[: int(x * 10_000)].sum())) for x in (0.001, 0.01, 0.05, 0.2, 0.5, 1.0)]
    found = Access.from_cdf(10_000, points, pooling=3)
    for x, y in points:
        share = head_share(np.array(found.zipf_a), np.array(found.zipf_q), np.array(1e4), np.array(x * 1e4))
        assert share == pytest.approx(y, abs=0.03)


def test_hot_rows_take_what_a_drawn_batch_says():
    rng = np.random.default_rng(0)
    drawn = rng.choice(50_000, 200_000, p=shares(1.05, 5, 50_000))
    for hot in (50, 500, 5000):
        want = head_share(np.array(1.05), np.array(5.0), np.array(5e4), np.array(float(hot)))
        assert (drawn < hot).mean() == pytest.approx(float(want), abs=0.01)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pooling": -1}, "pooling=-1: expected a finite number that is not negative"),
        ({"zipf_a": float("nan")}, "zipf_a=nan"),
        ({"active": 0}, "active=0: expected at least one active row"),
        ({"unique_ratio": 1.5}, "unique_ratio=1.5: expected more than 0"),
    ],
)
def test_what_is_no_statistic_is_refused(wrong, message):
    with pytest.raises(SpecError, match=message):
        Access(**wrong)
