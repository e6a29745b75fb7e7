"""The row cache, access by access: what the notes say of it, and that the simulator counts the same."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables.store.test_disk_rows import bags, make_table

from rowwise import SpecError
from rowwise.tables.store.disk import DiskRows
from rowwise.tables.store.policy import EMPTY, WAYS, CacheState, access_batch, choose_way, mix64, set_of
from rowwise.tables.store.simulate import SimulatedCounts, Trace, simulate
from rowwise.tables.store.sizes import cache_slots

U64 = (1 << 64) - 1


def mixed(h):
    """Written out a second time."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        h = ((h ^ h >> 33) * factor) & U64
    return h


@given(row=st.integers(0, (1 << 40) - 1), sets=st.integers(1, (1 << 31) - 1))
def test_the_set_of_a_row_is_the_high_half_of_a_product(row, sets):
    assert mix64(np.array([row], np.uint64))[0] == mixed(row)
    assert set_of(np.array([row]), sets)[0] == mixed(row) * sets >> 64


@given(
    rows=st.lists(st.lists(st.integers(0, 150), max_size=90), max_size=8),
    cache_rows=st.integers(1, 80),
    policy=st.sampled_from(("lru", "lfu")),
    skip=st.integers(0, 60),
)
def test_the_simulator_counts_what_the_reference_does(rows, cache_rows, policy, skip):
    batches = [np.array(batch, np.int64) for batch in rows]
    state, hits, evictions, overflows = CacheState.empty(200, cache_rows), [], [], []
    slots = state.rows_SW.size
    for batch in batches:
        state, access = access_batch(state, batch, policy)
        hits += access.hit_N.tolist()
        evictions += (access.evicted_N != EMPTY).tolist()
        overflows += ((access.slot_N >= slots) & ~access.hit_N).tolist()
        here = {row: slot for row, slot in zip(batch.tolist(), access.slot_N.tolist(), strict=True) if slot < slots}
        assert all(state.rows_SW.reshape(-1)[slot] == row for row, slot in here.items())
        assert len(set(access.slot_N.tolist())) == len(set(batch.tolist()))  # rows of a batch never share a slot
    counted = [sum(x[skip:]) for x in (hits, evictions, overflows)]
    expected = SimulatedCounts(counted[0], len(hits[skip:]) - counted[0], *counted[1:])
    assert simulate(Trace(batches, skip), cache_rows, policy) == expected


def test_the_victim_is_old_or_rare_and_never_of_this_batch():
    rows_W, stamp_W = np.arange(WAYS), np.arange(WAYS)[::-1].copy()
    count_W, pinned_W = np.full(WAYS, 7), np.zeros(WAYS, bool)
    count_W[[3, 9]] = 2
    assert choose_way("lru", rows_W, stamp_W, count_W, pinned_W) == 31
    assert choose_way("lfu", rows_W, stamp_W, count_W, pinned_W) == 9  # as rare as way 3, and older
    pinned_W[9] = True
    assert choose_way("lfu", rows_W, stamp_W, count_W, pinned_W) == 3
    assert choose_way("lru", rows_W, stamp_W, count_W, np.ones(WAYS, bool)) is None
    rows_W[[20, 30]] = EMPTY
    assert choose_way("lfu", rows_W, stamp_W, count_W, np.ones(WAYS, bool)) == 20


def test_counts_of_rows_stay_when_the_rows_leave():
    state = CacheState.empty(100, WAYS)
    often = np.repeat(np.arange(WAYS), 3)
    for batch in (often, np.array([50]), np.array([50]), np.array([60])):  # 50 takes the place of 0, 60 that of 50
        state, _ = access_batch(state, batch, "lfu")
    assert state.rows_SW[0, 0] == 60
    state, access = access_batch(state, np.array([0, 0]), "lfu")
    assert access.evicted_N.tolist() == [60, EMPTY]
    assert state.count_R[[0, 50, 60]].tolist() == [5, 2, 1]


@given(
    rows=st.lists(st.lists(st.integers(0, 150), max_size=90), max_size=8),
    pinned=st.sets(st.integers(0, 149), max_size=40),
)
def test_a_pinned_row_misses_once_and_others_share_an_lru_cache(rows, pinned, tmp_path_factory):
    table = make_table(rows=151, row_bytes=4, width=0, cached=40, overflow=150, pinned=sorted(pinned))
    disk = DiskRows([table], tmp_path_factory.mktemp("rows"))
    state, hits, seen = CacheState.empty(151, 40), 0, set()
    for ids in (np.array(batch, np.int64) for batch in rows):
        is_pinned = np.isin(ids, sorted(pinned))
        state, access = access_batch(state, ids[~is_pinned], "lru")
        hits += int(access.hit_N.sum())
        for row in ids[is_pinned].tolist():
            hits += row in seen
            seen.add(row)
        with disk.pin(bags([torch.from_numpy(ids)]), changes=True, counts=True) as slots_N:
            assert (table.slot_rows[slots_N] == torch.from_numpy(ids)).all()
            first = cache_slots(40)  # a pinned row has the slot of its rank, behind those of the sets
            ranks = [sorted(pinned).index(row) for row in ids[is_pinned].tolist()]
            assert slots_N[torch.from_numpy(is_pinned)].tolist() == [first + rank for rank in ranks]
    assert (disk.counters(0).hits, disk.counters(0).misses) == (hits, sum(map(len, rows)) - hits)


def test_a_trace_has_rows_and_a_cache_has_slots():
    with pytest.raises(SpecError, match="trace with row -1"):
        Trace.of(np.array([3, -1]))
    with pytest.raises(SpecError, match="cache of 0 rows"):
        simulate(Trace.of(np.array([3])), 0, "lru")
