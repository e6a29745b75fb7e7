"""Exchanges that are drawn, and measured by ranks that are threads or processes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.calibrate import calibrate_ranks
from planning.calibrate.test_samples import an_exchange

from rowwise.parallel.comm.spawn import run_processes
from rowwise.planning.calibrate.fit_links import USUAL_id_bytes, fit_links
from rowwise.planning.calibrate.links import MAX_FLOATS, MAX_SKEW_s, draw_exchange
from rowwise.planning.calibrate.trust import MAX_WAITED
from rowwise.planning.perf.hardware import hardware_named


@given(number=st.integers(0, 5000), world=st.integers(2, 6))
def test_exchanges_are_drawn_alike_on_all_ranks_and_can_be_carried_out(number, world):
    drawn = draw_exchange(0, number, world)
    assert drawn == draw_exchange(0, number, world)
    tables = [w.table for w in drawn.workloads]
    drawn.plan.validate(tables)
    assert drawn.batch % world == 0
    assert drawn.batch * sum(t.dim for t in tables) <= MAX_FLOATS
    assert min(drawn.skew_W) == 0
    assert max(drawn.skew_W) <= MAX_SKEW_s


def test_exchanges_differ_in_layout_balance_and_skew():
    drawn = [draw_exchange(0, n, 4) for n in range(300)]
    layouts = [d.layout.name for d in drawn]
    assert {layout: layouts.count(layout) > 20 for layout in layouts} == dict.fromkeys(
        ("table_wise", "column_wise", "row_wise", "replicated"), True
    )
    skewed = np.mean([max(d.skew_W) > 0 for d in drawn])
    assert skewed == pytest.approx(0.5, abs=0.1)
    columns = [
        [sum(t.cols[1] - t.cols[0] for t in d.plan.tiles_on(r)) for r in range(4)]
        for d in drawn
        if d.layout.name == "table_wise" and len(d.workloads) > 16
    ]
    uneven = [max(c) / (sum(c) / 4) for c in columns]
    assert min(uneven) < 1.05
    assert max(uneven) > 1.3


def test_an_exchange_whose_time_is_all_in_its_ids_still_gives_a_profile():
    """Bytes of the all-to-all alone then seem to be free."""
    hardware = hardware_named("cpu")
    short = {"batch": 256, "dim_W": (64, 64), "exchange_W": (1e-6,) * 2, "return_W": (1e-6,) * 2}
    ids = [1000 * (1 + n % 7) for n in range(30)]
    samples = [an_exchange(**short, number=n, ids_W=(k, 0), route_W=(1e-7 * k / 2,) * 2) for n, k in enumerate(ids)]
    fitted = fit_links(samples, hardware)
    assert fitted.hardware.id_bytes == USUAL_id_bytes
    assert fitted.hardware.host.all_to_all_Bps < 1e12
    assert fitted.error < 0.5


@pytest.mark.dist
@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared memory"])
def test_ranks_agree_about_what_they_measured(shared):
    found_WN = run_processes(2, calibrate_ranks.exchanges, 12, timeout_s=60, shared_memory=shared)
    for number, (first, second) in enumerate(zip(*found_WN, strict=True)):
        drawn = draw_exchange(0, number, 2)
        assert first.route_W == second.route_W
        assert first.exchange_W == second.exchange_W
        assert first.return_W == second.return_W
        assert all(0 < x < 10 for taken in (first.route_W, first.exchange_W, first.return_W) for x in taken)
        assert (first.layout, first.batch, first.skew_W) == (drawn.layout.name, drawn.batch, drawn.skew_W)
        assert (first.copied > 0) == (first.layout == "replicated")
        dims = sum(w.table.dim for w in drawn.workloads)
        ids = drawn.batch * sum(w.access.pooling for w in drawn.workloads)
        if first.layout in ("table_wise", "column_wise"):
            assert sum(first.dim_W) == dims
        if first.layout in ("table_wise", "row_wise"):
            assert sum(first.ids_W) == pytest.approx(ids, rel=0.1)


@pytest.mark.dist
def test_who_begins_later_lets_the_others_wait():
    drawn = [draw_exchange(0, n, 2) for n in range(200)]
    numbers = [d.number for d in drawn if max(d.skew_W) > 3e-3 and d.layout.name != "replicated"][:15]
    waited = []
    ranks = run_processes(2, calibrate_ranks.skewed, numbers, timeout_s=60, shared_memory=True)
    assert len(numbers) == 15
    for (exchange, sample, disturbed), (_, _, other) in zip(*ranks, strict=True):
        late, early = np.argmax(exchange.skew_W), np.argmin(exchange.skew_W)
        if max(disturbed, other) <= MAX_WAITED:
            waited.append((sample.exchange_W[early] - sample.exchange_W[late]) / exchange.skew_W[late])
    if len(waited) < 5:
        pytest.skip("cannot tell: other processes had the processors")
    # Whoever is early begins late, too, on a machine that does other things, and then waits less: the sign is what
    # counts, and that not all were disturbed.
    assert np.mean(np.array(waited) > 0) >= 0.7
    assert max(waited) > 0.4
