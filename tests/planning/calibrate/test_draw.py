"""Sets that are drawn, and the ids that are drawn for them, against the statistics that predictions are made of."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.planning.calibrate.draw import BATCHES, MAX_TABLES, Population, SetLimits, draw_set
from rowwise.planning.calibrate.ids import draw_batch, draw_ranks, draw_rows, scatter_ranks
from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.planning.perf.reuse import reuse_bins
from rowwise.tables.spec import Pooling, Table, state_width

LIMITS = SetLimits(pool_bytes=200_000_000)
MADE_UP = Population()


def stored_bytes(table):
    return table.rows * (table.row_bytes + 4 * state_width(table))


def workload(rows=100_000, dim=16, **access):
    return Workload(table=Table(name="t", rows=rows, dim=dim), access=Access(**access))


@given(number=st.integers(0, 10_000), rank=st.integers(0, 7), seed=st.integers(0, 3))
def test_sets_fit_memory_and_are_drawn_again_alike(number, rank, seed):
    drawn = draw_set(MADE_UP, LIMITS, seed, number, rank)
    assert drawn == draw_set(Population(), LIMITS, seed, number, rank)
    tables = [w.table for w in drawn.workloads]
    assert 1 <= len(tables) <= MAX_TABLES
    assert drawn.batch <= BATCHES[1]
    assert sum(map(stored_bytes, tables)) <= LIMITS.pool_bytes
    assert drawn.batch * sum(t.dim for t in tables) <= LIMITS.vector_floats
    assert len({t.name for t in tables}) == len(tables)
    assert all(1 <= (w.access.active or 0) <= w.table.rows for w in drawn.workloads)


def test_vectors_of_a_batch_fit_however_they_are_rounded():
    limits = SetLimits(pool_bytes=20_000_000, vector_floats=1 << 20, max_s=5e-3, speed=1000)
    drawn = [draw_set(MADE_UP, limits, 0, n, 0) for n in range(38, 42)]
    floats = [d.batch * sum(w.table.dim for w in d.workloads) for d in drawn]
    assert max(floats) <= limits.vector_floats
    assert max(floats) > 0.99 * limits.vector_floats


def test_ranks_draw_different_sets():
    assert len({draw_set(MADE_UP, LIMITS, 0, n, r).workloads for n in range(10) for r in range(2)}) == 20


@pytest.mark.slow
def test_sets_are_of_all_sizes_and_kinds():
    drawn = [draw_set(MADE_UP, LIMITS, 1, n, 0) for n in range(300)]
    ids = np.array([d.batch * sum(w.access.pooling for w in d.workloads) for d in drawn])
    low, middle, high = np.quantile(np.log10(ids), [0.05, 0.5, 0.95])
    assert high - low > 2
    assert 0.3 < (middle - low) / (high - low) < 0.7
    tables = [w.table for d in drawn for w in d.workloads]
    assert {t.dim for t in tables} >= {4, 8, 12, 16, 24, 32, 48, 64, 128, 256}
    whole = [d.workloads[0].table for d in drawn]
    assert np.mean([t.row_type == "fp32" for t in whole]) == pytest.approx(0.7, abs=0.1)
    assert {str(t.row_type) for t in whole} == {"fp32", "fp16", "bf16", "int8"}
    assert {type(t.optimizer).__name__ for t in whole} == {"RowWiseAdagrad", "Sgd", "Adagrad", "Adam"}
    assert {len(d.workloads) for d in drawn} == set(range(1, MAX_TABLES + 1))


def test_given_tables_are_varied_but_stay_their_like():
    given = [workload(rows=50_000, dim=20, pooling=3, zipf_a=1.1), workload(rows=10_000, dim=20, unique_ratio=0.5)]
    population = Population(given)
    sets = [draw_set(population, LIMITS, 0, n, 0).workloads for n in range(60)]
    alike = [s for s in sets if max(w.table.rows for w in s) <= 100_000]
    assert 0.6 < len(alike) / len(sets) < 0.95  # the others are made up
    drawn = [w for s in alike for w in s]
    assert {w.table.rows for w in drawn} >= {50_000, 10_000}
    assert {w.table.dim for w in drawn} >= {20, 64}
    assert all(w.access.unique_ratio is None and w.table.pooling is Pooling.SUM for w in drawn)


def test_tables_that_fit_nowhere_are_refused():
    with pytest.raises(SpecError, match=r"table fits 1\.0 MB"):
        Population([workload(rows=100_000)], 1_000_000)
    small, large = workload(rows=100), workload(rows=10**9)
    drawn = draw_set(Population([small, large], 1_000_000), SetLimits(pool_bytes=1_000_000), 0, 0, 0)
    assert max(w.table.rows for w in drawn.workloads) <= 200


@settings(max_examples=20)
@given(
    a=st.floats(0, 1.8),
    q=st.sampled_from([0.0, 3.0, 200.0]),
    rows=st.integers(1000, 300_000),
    part=st.floats(0.1, 1),
    seed=st.integers(0, 9),
)
def test_as_many_distinct_rows_are_drawn_as_are_predicted(a, q, rows, part, seed):
    one = workload(rows=rows, pooling=5.0, zipf_a=a, zipf_q=q, active=max(1, int(part * rows)))
    curves = Curves.of([one], 20_000)
    rows_N = draw_rows(one, 100_000, np.random.default_rng(seed))
    assert 0 <= rows_N.min() <= rows_N.max() < rows
    assert len(np.unique(rows_N)) == pytest.approx(curves.unique_T[0], rel=0.04, abs=3)


@pytest.mark.parametrize(("a", "q"), [(0.0, 0.0), (0.8, 0.0), (1.0, 10.0), (1.3, 100.0)])
def test_rows_are_drawn_as_often_as_is_predicted(a, q):
    one = workload(rows=200_000, pooling=10.0, zipf_a=a, zipf_q=q)
    _, counts_U = np.unique(draw_rows(one, 300_000, np.random.default_rng(0)), return_counts=True)
    found = np.bincount(np.ceil(np.log2(counts_U)).astype(int).clip(max=16), minlength=17) / len(counts_U)
    expected = reuse_bins(Curves.of([one], 30_000))[0]
    assert np.abs(found - expected).sum() < 0.03


@given(st.integers(1, 5000))
def test_ranks_are_spread_over_all_rows(rows):
    assert sorted(scatter_ranks(np.arange(rows), rows)) == list(range(rows))


def test_hot_rows_are_not_neighbours():
    hot = np.sort(scatter_ranks(np.arange(100), 1_000_000))
    assert np.diff(hot).min() > 1000


def test_the_most_asked_for_comes_first():
    ranks_N = draw_ranks(1.2, 0.0, 10**6, np.array([0.0, 0.5, 0.9, 1 - 1e-12]))
    assert ranks_N[0] == 0
    assert (np.diff(ranks_N) > 0).all()
    assert ranks_N[-1] == 10**6 - 1


def test_a_batch_has_all_features_and_as_many_ids_as_it_should():
    two = Workload(table=Table(name="two", rows=500, dim=8, features=("x", "y")), access=Access(pooling=2.0))
    batch = draw_batch([workload(pooling=7.5), two], 4000, np.random.default_rng(0))
    assert batch.features == ("t", "x", "y")
    lengths = batch.lengths_FB.view(3, 4000)
    assert lengths[0].float().mean().item() == pytest.approx(7.5, rel=0.03)
    assert lengths[0].float().var().item() == pytest.approx(7.5, rel=0.1)
    assert torch.equal(lengths[1:], torch.ones(2, 4000, dtype=torch.int64))
    assert len(batch.values_N) == int(lengths.sum())
    again = draw_batch([workload(pooling=7.5), two], 4000, np.random.default_rng(0))
    assert torch.equal(batch.values_N, again.values_N)
