"""The native map from ids to rows equals the policy in dictionaries: rows, state, evicted ids and counters."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables.ids.managed_policy import PolicyReference, bucket_of, hash_of

from rowwise import Managed, SpecError, StateError, Table
from rowwise.tables.ids.managed.piece import ManagedPiece, find_buckets
from rowwise.tables.managed import bucket_count, round_rows
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.layout import TablePiece

FAR = 1 << 62

policies = st.builds(
    Managed,
    admit=st.sampled_from((1, 1, 2, 3, 5)),
    probability=st.sampled_from((1.0, 1.0, 0.5)),
    evict=st.sampled_from(("lru", "lfu")),
    ttl_steps=st.sampled_from((None, None, 1, 3, 17)),
    seed=st.integers(0, 5),
)


def draw_counts(draws, ids, most):
    """Occurrences of skewed ids in a step."""
    return Counter(ids[int(len(ids) * draws.random() ** 3)] for _ in range(draws.randint(0, most)))


def open_piece(table, first=0, rows=None):
    rows = table.rows if rows is None else rows
    cut = TablePiece.cut(table, (first, first + rows), (0, table.dim), table.feature_names)
    arena = Arena.allocate([cut], torch.device("cpu"))
    arena.fill(3)
    return arena, ManagedPiece(arena, 0)


def tensors_of(counts):
    return torch.tensor(list(counts), dtype=torch.int64), torch.tensor(list(counts.values()), dtype=torch.int64)


@settings(max_examples=80)
@given(policy=policies, seed=st.integers(0, 10_000), rows=st.sampled_from((2, 9, 64, 130, 300)))
def test_native_is_the_reference(policy, seed, rows):
    draws = random.Random(seed)
    table = Table(name="t", rows=rows, dim=4, managed=policy)
    per_bucket = table.row_multiple
    first = draws.randrange(table.buckets)
    last = draws.randint(first + 1, table.buckets)
    arena, piece = open_piece(table, first * per_bucket, (last - first) * per_bucket)
    reference = PolicyReference(policy, table.rows, table.buckets, piece.first_row, piece.rows)
    pool = [draws.randrange(-FAR, FAR) for _ in range(8 * rows)] + [-1, 0, -(1 << 63), (1 << 63) - 1]
    pool = [id_ for id_ in pool if first <= bucket_of(id_, table.buckets) < last]
    for step in range(draws.randint(1, 40) if pool else 0):
        for _ in range(draws.choice((1, 1, 2))):  # calls in a step
            counts = draw_counts(draws, pool, 2 * piece.rows)
            reset, lost = reference.observe(counts, step)
            arena.table(0).fill_(7.0)
            got = piece.observe(*tensors_of(counts))
            assert got.tolist() == lost
            assert (arena.table(0)[:, 0] != 7).nonzero().flatten().tolist() == sorted(set(reset))
            assert {name: x.tolist() for name, x in arena.row_ids[0].items()} == reference.state
            ids = draws.sample(pool, min(9, len(pool)))
            assert piece.find(torch.tensor(ids, dtype=torch.int64)).tolist() == [reference.row_of(i) for i in ids]
        if draws.random() < 0.1:
            arena.mark_all()  # the map is made again
        if draws.random() < 0.9:
            arena.steps_T += 1
            continue
        break
    counters = piece.counters
    assert all(getattr(counters, name) == reference.counters[name] for name in ("admitted", "evicted", "rejected"))
    assert all(getattr(counters, name) == reference.counters[name] for name in ("overflowed", "expired"))
    assert counters.in_use == sum(id_ != -1 for id_ in reference.state["id"])


def test_repeated_ids_of_one_call_count_together():
    table = Table(name="t", rows=64, dim=4, managed=Managed(admit=3))
    _, piece = open_piece(table)
    piece.observe(torch.tensor([5, 9, 5]), torch.tensor([1, 2, 2]))
    assert piece.find(torch.tensor([5, 9])).ne(0).tolist() == [True, False]


def test_rows_that_were_used_since_a_scan_are_not_evicted():
    table = Table(name="t", rows=64, dim=4, managed=Managed())
    arena, piece = open_piece(table)
    ids = sorted(range(63), key=hash_of)  # in the order of their rows
    lost = []
    for step in (ids, [100], ids[1:8], [101]):  # a scan lists eight rows
        lost.append(piece.observe(*tensors_of(Counter(step))).tolist())
        arena.steps_T += 1
    assert lost == [[], [ids[0]], [], [ids[8]]]


@given(st.integers(2, 1 << 31))
def test_rows_are_rounded_once(rows):
    rounded = round_rows(rows)
    buckets = bucket_count(rounded)
    assert rows <= rounded == round_rows(rounded) < rows + bucket_count(rows)
    assert rounded % buckets == 0
    assert buckets == 1 or rounded // buckets >= 64


def test_buckets_are_the_high_bits_of_a_hash():
    ids = [0, 1, -1, -(1 << 63), 12345678901234567]
    for buckets in (1, 2, 4096):
        assert find_buckets(torch.tensor(ids), buckets).tolist() == [bucket_of(i, buckets) for i in ids]


def test_a_reset_row_has_its_first_bits():
    table = Table(name="t", rows=130, dim=12, managed=Managed(), row_type="int8", column_group=16)
    arena, _ = open_piece(table)
    rows, state = arena.table(0).clone(), arena.table_state(0)["sum"].clone()
    arena.table(0).fill_(1)
    arena.table_state(0)["sum"].fill_(4)
    arena.reset_rows(0, torch.arange(table.rows))
    assert torch.equal(arena.table(0), rows)
    assert torch.equal(arena.table_state(0)["sum"], state)


def test_ids_in_rows_of_other_buckets_raise():
    table = Table(name="t", rows=128, dim=4, managed=Managed())
    arena, piece = open_piece(table)
    piece.observe(torch.tensor([3]), torch.tensor([1]))
    row = int(piece.find(torch.tensor([3])))
    arena.row_ids[0]["id"][row] = -1
    arena.row_ids[0]["id"][(row + 64) % 128] = 3
    arena.mark_all()
    with pytest.raises(StateError, match="table 't': ids"):
        piece.find(torch.tensor([3]))
    arena.row_ids[0]["id"][[row, row + 1]] = 3
    arena.row_ids[0]["id"][(row + 64) % 128] = -1
    arena.mark_all()
    with pytest.raises(StateError, match="rows have the same"):
        piece.find(torch.tensor([3]))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"admit": 0}, "admit=0: expected a whole number of at least 1"),
        ({"probability": 0.0}, "probability=0.0: expected a number above 0"),
        ({"evict": "fifo"}, "evict='fifo': expected 'lru' or 'lfu'"),
        ({"ttl_steps": 0}, "ttl_steps=0: expected a whole number"),
        ({"seed": -1}, "seed=-1: expected at least 0"),
    ],
)
def test_bad_settings_raise(changes, match):
    with pytest.raises(SpecError, match=match):
        Managed(**changes)


def test_bad_tables_raise():
    with pytest.raises(SpecError, match="table 't' is managed"):
        Table(name="t", rows=1, dim=4, managed=Managed())
    with pytest.raises(SpecError, match="table 't': managed=True"):
        Table(name="t", rows=8, dim=4, managed=True)
