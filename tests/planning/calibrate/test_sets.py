"""Sets of tables measured in a pool of memory: rows really change, nothing is left behind, times follow the work."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowwise.planning.calibrate.draw import DrawnSet, Population, SetLimits, draw_set
from rowwise.planning.calibrate.ids import draw_batch
from rowwise.planning.calibrate.kernels import BATCHES, MAX_TURNS, KernelBench, flush_bytes, low_quantile
from rowwise.planning.perf.access import Access, Workload
from rowwise.tables.row_optimizers import Adam, Sgd
from rowwise.tables.spec import TRAINED_TYPES, Table

LIMITS = SetLimits(pool_bytes=8_000_000, vector_floats=1 << 20, max_s=4e-3)
ADAM = Adam()


@pytest.fixture(scope="module")
def bench():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rowwise.planning.calibrate.kernels.MAX_FLUSH_bytes", 4 << 20)  # quicker, and less exact
        yield KernelBench(LIMITS.pool_bytes, LIMITS.vector_floats)
    torch.set_num_threads(before)


def a_set(count=1, rows=2000, dim=16, batch=256, pooling=4.0, **more):
    tables = [Table(name=f"t{k}", rows=rows, dim=dim, **more) for k in range(count)]
    return DrawnSet(0, batch, tuple(Workload(table=t, access=Access(pooling=pooling, zipf_a=0.8)) for t in tables))


def pool_of(bench):
    return bench._pool


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(0, 5))
def test_any_set_is_measured_and_leaves_zeros(bench, number, rank):
    drawn = draw_set(Population(), LIMITS, 0, number, rank)
    (taken,) = bench.measure([drawn], 0)
    assert 0 < taken.lookup_s < 1
    assert 0 < taken.update_s < 1
    assert not pool_of(bench).any()


@pytest.mark.parametrize("row_type", TRAINED_TYPES)
@pytest.mark.parametrize("optimizer", [Sgd(lr=1.0), ADAM], ids=["sgd", "adam"])
def test_rows_change_as_training_changes_them(bench, row_type, optimizer, monkeypatch):
    seen = {}

    def look(arena, batches):
        seen["rows"] = arena.weights(0).clone()
        seen["ids"] = torch.cat([batch.values_N for batch in batches]).unique()

    monkeypatch.setattr("rowwise.planning.calibrate.kernels._zero_touched_rows", look)
    bench.measure([a_set(row_type=row_type, optimizer=optimizer)], 0)
    pool_of(bench).zero_()
    changed = (seen["rows"] != 0).any(1).nonzero().flatten()
    assert seen["rows"].isfinite().all()
    assert set(changed.tolist()) <= set(seen["ids"].tolist())
    assert len(changed) > 0.9 * len(seen["ids"])


@pytest.mark.slow
def test_sets_that_take_turns_do_not_share_memory(bench):
    sets = [draw_set(Population(), LIMITS, 1, n, 0) for n in range(40)]
    taken = bench.take(iter(sets))
    assert taken == sets[: len(taken)]
    assert 1 < len(taken) <= MAX_TURNS
    places = bench._place_in_pool(taken, 0)
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for module, _ in places
        for tensor in (module.arena.rows, module.arena.state)
        if tensor.nbytes
    )
    begin = pool_of(bench).data_ptr()
    assert begin <= spans[0][0]
    assert spans[-1][1] <= begin + LIMITS.pool_bytes
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert len(bench.measure(taken, 0)) == len(taken)
    assert not pool_of(bench).any()


def test_a_set_that_fills_the_pool_is_alone(bench):
    large = a_set(rows=90_000)
    assert bench.take(iter([large, a_set(rows=90_000)])) == [large]


@pytest.mark.slow
def test_more_tables_take_longer(bench):
    one, two = a_set(2, batch=2000, pooling=10.0), a_set(8, batch=2000, pooling=10.0)
    ratios = []
    for _ in range(7):
        few, many = bench.measure([one, two], 0)
        ratios.append((sum(many) / sum(few), many.lookup_s / few.lookup_s, many.update_s / few.update_s))
    assert (np.median(ratios, 0) > 1.4).all()


def test_batches_are_the_same_when_a_set_is_measured_again(bench):
    (first,), (second,) = (bench._place_in_pool([a_set()], 3) for _ in range(2))
    assert len(first[1]) == BATCHES
    for x, y in zip(first[1], second[1], strict=True):
        assert torch.equal(x.values_N, y.values_N)
    other = draw_batch(a_set().workloads, 256, np.random.default_rng((4, 0)))
    assert not torch.equal(first[1][0].values_N, other.values_N)


def test_a_fifth_of_the_repeats_is_faster_than_what_is_told():
    assert low_quantile([5.0, 1.0, 3.0, 2.0, 4.0]) == 2.0
    assert low_quantile([2.0, 1.0]) == 1.0
    assert low_quantile(list(range(100))) == 20


def test_what_is_read_between_repeats_is_larger_than_caches_that_are_a_cores_own():
    assert 1 << 20 <= flush_bytes(torch.device("cpu")) <= 64 << 20
