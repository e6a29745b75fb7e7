"""The closed form beside the simulator: within 0.02 over skews and capacities, 0.025 where a count says little."""

import numpy as np
import pytest
from tables.store.zipf import zipf_rows

from rowwise.planning.perf.access import rank_cells
from rowwise.tables.store.hit_rate import hit_rate
from rowwise.tables.store.policy import WAYS, sets_of
from rowwise.tables.store.simulate import Trace, simulate

ROWS, ACCESSES = 30_000, 400_000
SLOTS = (64, 300, 1_200, 4_800, 15_000)


@pytest.mark.few(1)
@pytest.mark.parametrize("a", [0.0, 0.6, 0.8, 1.05, 1.3])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_closed_form_is_near_the_simulator(a, policy):
    trace = Trace.of(zipf_rows(a, ROWS, ACCESSES), 16, skip=ACCESSES // 2)
    cells = rank_cells(np.array([a]), np.zeros(1), np.array([float(ROWS)]))
    for slots in SLOTS:
        found = hit_rate(policy, *cells, np.array([float(WAYS * sets_of(slots))]))[0]
        # Half of the rows by LFU: those at the edge were accessed a few times, so their counts do not order them.
        near = 0.025 if policy == "lfu" and slots == SLOTS[-1] else 0.02
        assert simulate(trace, slots, policy).hit_rate == pytest.approx(found, abs=near), slots


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_more_slots_never_hit_less_and_all_rows_hit_always(policy):
    slots = np.array([0.0, 1e-3, 0.5, 1.0, 40.0, 1e3, 1e5, 3e6])
    rows_NC, share_NC = (np.repeat(x, len(slots), 0) for x in rank_cells(np.array([0.9]), np.zeros(1), np.array([1e6])))
    rate = hit_rate(policy, rows_NC, share_NC, slots)
    assert (np.diff(rate) >= -1e-12).all()
    assert rate[0] == 0
    assert rate[-1] == pytest.approx(1)
