"""The cache that processes share: whatever happens, a row is that of its key and version, or it is missing."""

import mmap
import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise.tables.store.shared_cache import (
    MAX_TAGS,
    TAGS,
    CachedFeatures,
    CacheShape,
    SharedCache,
    next_tag,
    read_rows,
)
from rowwise.tables.store.simulate import Trace, simulate

ROWS = 400


def rows_of(keys_N, version, row_bytes):
    """The row of each key: a function of key and version."""
    start_N = keys_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version * 77 + 1)
    words = start_N[:, None] * np.arange(1, 1 + -(-row_bytes // 8), dtype=np.uint64)
    return np.ascontiguousarray(words).view(np.uint8)[:, :row_bytes]


def zeroed(shape):
    return np.frombuffer(mmap.mmap(-1, max(1, shape.size_bytes)), np.uint8)


class Lookup:
    """A process's view of two tables behind a cache, with memory for their rows."""

    def __init__(self, memory, shape, version):
        self.cache, self.version, self.row_bytes = SharedCache(memory, shape, version), version, shape.row_bytes
        self.memory_TR = np.zeros((2, ROWS, shape.row_bytes), np.uint8)

    def take(self, batch):
        """Look a batch up: [ids of samples] of each of two features; returns the rows, which are checked, missing."""
        lengths = [len(ids) for feature in batch for ids in feature]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids_N = np.array([one for feature in batch for ids in feature for one in ids], np.int64)
        features = [[f, f * ROWS, f, self.memory_TR[f].ctypes.data] for f in range(2)]
        places_N = ids_N.copy()
        missing = self.cache.take(CachedFeatures(np.array(features, np.int64)), offsets, len(batch[0]), places_N)
        if len(missing.rows_M4):
            self.cache.put(missing, np.ascontiguousarray(rows_of(missing.keys_M, self.version, self.row_bytes)))
        middle = offsets[len(batch[0])]
        for feature, part in enumerate((slice(0, middle), slice(middle, None))):
            keys_N = ids_N[part] + feature * ROWS
            found = self.memory_TR[feature][places_N[part]]
            np.testing.assert_array_equal(found, rows_of(keys_N, self.version, self.row_bytes))
        distinct = len(np.unique(np.concatenate([ids_N[:middle], ids_N[middle:] + ROWS])))
        assert missing.distinct == distinct
        return missing


batches = st.lists(
    st.tuples(*(st.lists(st.lists(st.integers(0, ROWS - 1), max_size=9), min_size=3, max_size=3) for _ in range(2))),
    min_size=1,
    max_size=12,
)


@given(
    batches=batches,
    row_bytes=st.sampled_from([4, 12, 16, 20, 64, 72]),
    slots=st.sampled_from([32, 64, 320]),
    policy=st.sampled_from(["lru", "lfu"]),
    versions=st.lists(st.integers(1, 999_999), min_size=1, max_size=3),
)
def test_rows_are_those_of_their_keys(batches, row_bytes, slots, policy, versions):
    shape = CacheShape(slots, row_bytes, 2 * ROWS, policy)
    memory = zeroed(shape)
    views = [Lookup(memory, shape, version) for version in versions]
    for number, batch in enumerate(batches):
        views[number % len(views)].take(batch)


def test_a_batch_is_cached_afterwards():
    shape = CacheShape(1024, 16, 2 * ROWS)
    one = Lookup(zeroed(shape), shape, 1)
    batch = ([list(range(100)), [], [7]], [[], [1, 1], [5]])
    assert len(one.take(batch).rows_M4) == 102
    assert len(one.take(batch).rows_M4) == 0
    other = Lookup(one.cache._memory, shape, 1)
    assert len(other.take(batch).rows_M4) == 0
    assert len(Lookup(one.cache._memory, shape, 2).take(batch).rows_M4) == 102


def test_tags_differ():
    memory = zeroed(CacheShape(32, 8, 10))
    assert [next_tag(memory) for _ in range(3)] == [1, 2, 3]
    memory[TAGS : TAGS + 8].view(np.int64)[0] = MAX_TAGS - 1
    assert next_tag(memory) == 0


@given(
    size=st.integers(0, 1 << 22),
    row_bytes=st.integers(1, 300),
    keys=st.integers(1, 1_000_000),
    policy=st.sampled_from(["lru", "lfu"]),
)
def test_shapes_fit_the_bytes(size, row_bytes, keys, policy):
    shape = CacheShape.within(size, row_bytes, keys, policy)
    assert not shape.slots or shape.size_bytes <= size
    assert shape._replace(slots=shape.slots + 96).size_bytes > size


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_hit_rates_are_those_of_the_simulator(policy):
    rows, slots, batch, half = 100_000, 9_984, 1024, 700
    draw = np.random.default_rng(3)
    weights_R = 1 / np.arange(1, rows + 1) ** 1.05
    ids_N = draw.permutation(rows)[draw.choice(rows, 2 * half * batch, p=weights_R / weights_R.sum())]
    shape = CacheShape(slots, 8, rows, policy)
    cache, memory = SharedCache(zeroed(shape), shape), np.zeros((rows, 8), np.uint8)
    features = CachedFeatures(np.array([[0, 0, 0, memory.ctypes.data]], np.int64))
    misses = 0
    for number, ids_B in enumerate(ids_N.reshape(-1, batch)):
        places = ids_B.astype(np.int64)
        missing = cache.take(features, np.array([0, batch]), 1, places)
        cache.put(missing, np.zeros((len(missing.rows_M4), 8), np.uint8))
        misses += len(missing.rows_M4) if number >= half else 0
    wanted = simulate(Trace.of(ids_N, batch, skip=half * batch), slots, policy).hit_rate
    assert abs(1 - misses / (half * batch) - wanted) < 0.01


@pytest.mark.slow
def test_what_was_frequent_long_ago_leaves():
    shape = CacheShape(32, 8, 2 * ROWS)
    one = Lookup(zeroed(shape), shape, 1)
    old, new = list(range(32)), list(range(100, 132))
    for _ in range(2000):
        one.take(([old, [], []], [[], [], []]))
    for _ in range(4):
        one.take(([new, [], []], [[], [], []]))
    before = len(one.take(([new, [], []], [[], [], []])).rows_M4)
    for _ in range(4000):
        one.take(([new, [], []], [[], [], []]))
    assert before >= 31  # the row that came last is there
    assert len(one.take(([new, [], []], [[], [], []])).rows_M4) == 0


def test_rows_of_others_are_not_the_oldest():
    """A process that puts rows long after it looked evicts the oldest ones, and not those that came meanwhile."""
    shape = CacheShape(32, 8, 2 * ROWS, "lru")
    one = Lookup(zeroed(shape), shape, 1)
    other = Lookup(one.cache._memory, shape, 1)
    one.take(([list(range(28)), [], []], [[], [], []]))
    features = CachedFeatures(np.array([[0, 0, 0, one.memory_TR[0].ctypes.data]], np.int64))
    missing = one.cache.take(features, np.array([0, 4]), 1, np.arange(300, 304))
    other.take(([[200, 201, 202, 203], [], []], [[], [], []]))
    one.cache.put(missing, np.ascontiguousarray(rows_of(missing.keys_M, 1, 8)))
    assert len(other.take(([[200, 201, 202, 203], [], []], [[], [], []])).rows_M4) == 0


@pytest.mark.slow
def test_processes_that_are_killed_leave_no_wrong_row():
    shape = CacheShape(64, 72, 2 * ROWS)  # so few slots that all write to the same sets
    memory = zeroed(shape)
    draw = np.random.default_rng(0)
    for round_ in range(6):
        children = []
        for version in (1, 2, 1):
            child = os.fork()
            if not child:
                try:
                    own, at = np.random.default_rng(os.getpid()), Lookup(memory, shape, version)
                    while True:
                        first, second = (own.integers(0, ROWS, count).tolist() for count in (50, 9))
                        at.take(([first, [], []], [[], [], second]))
                except BaseException:
                    os._exit(7)
            children.append(child)
        time.sleep(float(draw.uniform(0.02, 0.2)))
        for child in children:
            os.kill(child, signal.SIGKILL)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert ended == [-signal.SIGKILL] * 3, round_
    for version in (1, 2):
        Lookup(memory, shape, version).take(([list(range(ROWS)), [], []], [[], [], list(range(ROWS))]))


def test_rows_of_files(tmp_path):
    draw = np.random.default_rng(1)
    stored = draw.integers(0, 255, (1000, 36), dtype=np.uint8)
    (tmp_path / "rows").write_bytes(stored.tobytes())
    with (tmp_path / "rows").open("rb") as file:
        rows = draw.integers(0, 1000, 500)
        out = np.empty((500, 36), np.uint8)
        read_rows(file.fileno(), rows * 36, out)
        np.testing.assert_array_equal(out, stored[rows])
        with pytest.raises(OSError, match="Input/output"):
            read_rows(file.fileno(), np.array([36_000 - 20]), out[:1])
