"""From a budget and a history to a map: it fits, it is as good as it says, and what it cannot do it says."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rowwise import RowType, SpecError, Table
from rowwise.tables.ids.arrays import fold_maps
from rowwise.tables.ids.methods import (
    FEW_CLUSTERS,
    METHODS,
    MIN_COUNT,
    FoldedVectors,
    IdHistory,
    make_map,
    table_bytes,
)
from rowwise.tables.ids.rows import look_up_rows


def make_history(ids, seed=0, groups=5):
    """Counts that fall like a power, and vectors around a few places; of folds the same with other noise."""
    generator = np.random.default_rng(seed)
    counts_N = np.floor(ids / (1 + generator.permutation(ids))).astype(np.int64)
    places = generator.normal(size=(groups, 4))
    group_N = generator.integers(0, groups, ids)
    vectors = [(places[group_N] + 0.01 * generator.normal(size=(ids, 4))).astype(np.float32) for _ in range(3)]
    folded = FoldedVectors(features=("t",), seed=1, vectors=tuple(vectors[1:]))
    return IdHistory(counts_N=counts_N, vectors_ND=vectors[0], folded=folded), group_N


def make(method, table, budget_bytes, history):
    """A map that the budget allows."""
    made = make_map(method, table, budget_bytes, history)
    assert made is not None
    return made


@settings(max_examples=150, deadline=None)
@given(
    method=st.sampled_from(list(METHODS)),
    ids=st.integers(2, 3000),
    ratio=st.floats(1.05, 300),
    dim=st.sampled_from((1, 4, 16, 17)),
    row_type=st.sampled_from(list(RowType)),
    seed=st.integers(0, 50),
)
def test_a_map_fits_its_budget_or_is_not_there(method, ids, ratio, dim, row_type, seed):
    table = Table(name="t", rows=ids, dim=dim, row_type=row_type)
    budget_bytes = int(table_bytes(table, None) / ratio)
    history, _ = make_history(ids, seed)
    made = make_map(method, table, budget_bytes, history, seed=seed)
    assume(made is not None)
    assert table_bytes(table, made) <= budget_bytes
    assert made.about["method"] == method
    rows_NC = look_up_rows(made, np.arange(ids))
    assert rows_NC.shape == (ids, made.shape.columns)
    assert rows_NC.min() >= -1
    assert rows_NC.max() < made.shape.rows
    seen = history.counts_N > 0
    if method != "mixed":  # whose rarest ids may have no row
        assert (rows_NC[seen].max(1) >= 0).all()
    for fold in fold_maps(made):
        assert look_up_rows(fold, np.arange(ids)).max() < made.shape.rows


@pytest.mark.parametrize("method", METHODS)
def test_a_usual_table_has_a_map_by_every_method(method):
    table = Table(name="t", rows=3000, dim=16)
    history, _ = make_history(3000)
    make(method, table, table_bytes(table, None) // 5, history)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["hash", "double_hash", "frequency", "mixed", "learned_many", "learned_own"])
def test_most_of_a_budget_is_used(method):
    table = Table(name="t", rows=5000, dim=16)
    history, _ = make_history(5000)
    for ratio in (2, 10, 30):
        budget_bytes = table_bytes(table, None) // ratio
        made = make(method, table, budget_bytes, history)
        assert table_bytes(table, made) > 0.8 * min(budget_bytes, 200_000)


def test_ids_that_are_alike_share_a_row():
    history, group_N = make_history(2000, groups=7)
    table = Table(name="t", rows=2000, dim=16)
    made = make("learned", table, 12_000, history)
    rows_N = look_up_rows(made, np.arange(2000))[:, 0]
    often = history.counts_N >= MIN_COUNT
    for row in np.unique(rows_N[often]):
        assert len(set(group_N[often & (rows_N == row)])) == 1
    assert len(set(rows_N[~often])) == 1  # rare ones and those never seen learn together
    assert not set(rows_N[~often]) & set(rows_N[often])
    # Where folds say the same of an id, it has the same row in all of them.
    for fold in fold_maps(made):
        fold_N = look_up_rows(fold, np.arange(2000))[:, 0]
        assert (fold_N == rows_N)[~often].all()
        for row in np.unique(fold_N[often]):
            assert len(set(group_N[often & ((fold_N == row) | (rows_N == row))])) == 1


def test_frequent_ids_have_rows_of_their_own():
    history, _ = make_history(1000)
    table = Table(name="t", rows=1000, dim=16)
    order_N = np.argsort(-history.counts_N, kind="stable")
    for method in ("frequency", "learned_head_tail"):
        made = make(method, table, 12_000, history)
        rows_N = look_up_rows(made, np.arange(1000))[:, 0]
        alone = np.bincount(rows_N, minlength=made.shape.rows)[rows_N] == 1
        assert alone[order_N[:50]].all(), method


def test_no_row_of_balanced_clusters_is_asked_for_by_everybody():
    history, _ = make_history(3000, groups=2)
    table = Table(name="t", rows=3000, dim=16)
    maps = (make(method, table, 30_000, history) for method in ("learned_balanced", "learned"))
    rows = [look_up_rows(id_map, np.arange(3000))[:, 0] for id_map in maps]
    load, other = (np.bincount(rows_N, history.counts_N).max() for rows_N in rows)
    assert max(load, history.counts_N.max()) < other


@pytest.mark.slow
def test_clusters_are_few_unless_many_are_asked_for():
    history, _ = make_history(4000, groups=500)
    table = Table(name="t", rows=4000, dim=16)
    few, many = (make(method, table, 100_000, history) for method in ("learned", "learned_many"))
    assert few.shape.rows <= FEW_CLUSTERS + 1
    assert many.shape.rows > 5 * FEW_CLUSTERS


def test_what_cannot_be_is_said():
    history, _ = make_history(100)
    table = Table(name="film", rows=100, dim=4)
    with pytest.raises(SpecError, match="compression method 'hashing'"):
        make_map("hashing", table, 100, history)
    with pytest.raises(SpecError, match="budget of 1,600 bytes"):
        make_map("hash", table, 1600, history)
    with pytest.raises(SpecError, match="'film': counts of 99"):
        make_map("hash", table, 100, IdHistory(counts_N=history.counts_N[:99]))
    with pytest.raises(SpecError, match="'film': vectors of ids"):
        make_map("learned", table, 500, IdHistory(counts_N=history.counts_N))
    assert make_map("quotient_remainder", table, 64, history) is None
    assert make_map("hash", table, 3, history) is None
