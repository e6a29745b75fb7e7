"""Caches over whole traces, beside figures measured by others and beside plain Python."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables.store.test_disk_rows import bags, make_table
from tables.store.zipf import zipf_rows

from rowwise.tables.store.disk import DiskRows
from rowwise.tables.store.simulate import Trace, simulate
from rowwise.tables.store.sizes import cache_slots, overflow_slots

KINDS = ("lru", "lfu", "full_lru", "belady")
# 150,000 accesses by Zipf 1.05 to 100,000 rows, from an empty cache.
MEASURED = {(1_000, "lru"): 0.588, (1_000, "lfu"): 0.672, (1_000, "full_lru"): 0.589, (16_000, "lru"): 0.803}
MEASURED |= {(16_000, "full_lru"): 0.805}


def test_hit_rates_are_those_that_others_measured():
    rows = zipf_rows(1.05, 100_000, 150_000)
    for batch in (1, 64):
        trace = Trace.of(rows, batch)
        for (slots, kind), rate in MEASURED.items():
            assert simulate(trace, slots, kind).hit_rate == pytest.approx(rate, abs=0.01), (slots, kind, batch)


def lru_hits(rows, capacity):
    held, hits = OrderedDict(), 0
    for row in rows:
        hits += row in held
        held[row] = None
        held.move_to_end(row)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


def belady_hits(rows, capacity):
    held, hits = set(), 0
    for at, row in enumerate(rows):
        hits += row in held
        if row not in held and len(held) == capacity:
            later = rows[at + 1 :]
            held.remove(max(held, key=lambda one: later.index(one) if one in later else len(rows)))
        held.add(row)
    return hits


@given(rows=st.lists(st.integers(0, 30), max_size=120), capacity=st.integers(1, 40))
def test_caches_without_sets_are_those_of_plain_python(rows, capacity):
    trace = Trace.of(np.array(rows, np.int64))
    found = {kind: simulate(trace, capacity, kind) for kind in KINDS}
    assert found["full_lru"].hits == lru_hits(rows, capacity)
    assert found["belady"].hits == belady_hits(rows, capacity) >= found["full_lru"].hits
    for counts in found.values():
        assert counts.hits + counts.misses == len(rows)
        assert counts.evictions <= counts.misses


def test_a_batch_that_no_set_can_hold_overflows():
    counts = simulate(Trace([np.arange(40), np.arange(40)]), 32, "lru")
    assert (counts.hits, counts.misses, counts.overflows) == (32, 48, 16)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("cache_rows", "batch"), [(1_000, 64), (1_000, 2_048), (4_000, 512)])
def test_the_cache_of_training_hits_what_the_simulator_says(policy, cache_rows, batch, tmp_path):
    overflow = overflow_slots(cache_slots(cache_rows))
    table = make_table(rows=20_000, row_bytes=8, width=1, cached=cache_rows, overflow=overflow)
    disk, rows = DiskRows([table], tmp_path, policy=policy), zipf_rows(0.8, 20_000, 60_000)
    for ids in torch.from_numpy(rows).split(batch):
        with disk.pin(bags([ids]), changes=False, counts=True):
            pass
    counts, counters = simulate(Trace.of(rows, batch), cache_rows, policy), disk.counters(0)
    assert (counters.hits, counters.misses) == (counts.hits, counts.misses)
