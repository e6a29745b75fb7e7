"""Gradients that are not finite, on one rank or only together: named, and no other row loses its step, on any rank."""

from dataclasses import replace

import pytest
import torch
from parallel.shard.equal import SEED, Step, assert_alike, given, look_up, make_sharded, make_steps, place, rows_apart
from parallel.shard.jobs import EVERY_OPTIMIZER, table_for_each

from rowwise import Adam, Embeddings, GradientError, Jagged, Lamb, Pooling, RowWiseAdam, Sgd, Topology
from rowwise.parallel.comm.thread import run_threads
from rowwise.tables.row_optimizers import needs_full_rows

WORLD = Topology(devices=3)
DIM = 16
LAYOUTS = ("row-wise", "column-wise", "replicated", "pinwheel", "columns below rows")
BAD = {"NaN": float("nan"), "infinite": float("inf"), "finite one by one": 3e38}


def bad_step(tables, bad, column, more=0):
    """Row 1 gets the bad number from the first two ranks, row 6 a gradient of 0, and others ordinary ones."""
    lists = Jagged.from_lists({t.name: [[1, 2], [3], [1], [4], [5, 1], [6], *[[7]] * more] for t in tables})
    batch = replace(lists, weights_N=torch.ones(len(lists.values_N)))
    generator = torch.Generator().manual_seed(1)
    pooled = sum(table.pooling is not Pooling.SEQUENCE for table in tables)
    ups = {"": torch.randn(6 + more, DIM * pooled, generator=generator)}
    ups[""][[0, 2], column::DIM], ups[""][5] = bad, 0.0
    for table in tables:
        if table.pooling is Pooling.SEQUENCE:
            ups[table.name] = torch.randn(8 + more, DIM, generator=generator)
            ups[table.name][[0, 3], column], ups[table.name][7] = bad, 0.0
    return Step(batch=batch, ups=ups, sizes_W=(2, 2, 2 + more))


def train(module, steps):
    """The errors of the updates."""
    errors = []
    for step in steps:
        given(look_up(module, step), step).backward()
        try:
            module.update()
        except GradientError as error:
            errors.append(str(error))
    return errors


@pytest.mark.few(4)
@pytest.mark.parametrize(("bad", "column"), [("NaN", 0), ("infinite", 13), ("finite one by one", 7)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_without_a_finite_gradient_stays_and_all_others_take_their_step(layout, bad, column):
    # Where columns do not depend on each other, a row that is cut stays in the pieces that have the bad columns only.
    cut = layout in ("column-wise", "pinwheel", "columns below rows")
    tables = table_for_each(40, [o for o in EVERY_OPTIMIZER if needs_full_rows(o) or not cut])
    good = make_steps(tables, [(3, 9, 0), (5, 1, 7)])
    steps = [good[0], bad_step(tables, BAD[bad], column), good[1]]
    whole = Embeddings(tables, seed=SEED)
    assert len(train(whole, steps)) == 1

    def rank(comm):
        sharded = make_sharded(tables, place(tables, layout, WORLD), comm)
        errors = train(sharded, [step.of(comm.rank) for step in steps])
        return errors, list(rows_apart(sharded, whole))

    found = run_threads(WORLD, rank, timeout_s=60)
    assert not [text for _, differences in found for text in differences]
    errors = [text for texts, _ in found for text in texts]
    assert errors
    assert all("; all others are updated" in text for text in errors)


@pytest.mark.parametrize("bad", BAD)
def test_so_it_is_where_copies_are_added_up(bad):
    tables = table_for_each(8)
    steps = [bad_step(tables, BAD[bad], 3, more=20)] * 2
    whole = Embeddings(tables, seed=SEED)
    assert len(train(whole, steps)) == 2

    def rank(comm):
        sharded = make_sharded(tables, place(tables, "replicated", WORLD), comm)
        assert len(train(sharded, [step.of(comm.rank) for step in steps])) == 2
        assert comm.sent.total("copies", "all_reduce")
        return list(rows_apart(sharded, whole, 1e-5))

    assert not [text for differences in run_threads(WORLD, rank, timeout_s=60) for text in differences]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_whose_squares_are_infinite_are_finite(layout):
    tables = table_for_each(40)
    steps = [bad_step(tables, 1e25, 5), *make_steps(tables, [(3, 9, 0)])]
    whole = Embeddings(tables, seed=SEED)
    assert not train(whole, steps)

    def without_errors(module, rank):
        assert not train(module, [step.of(rank) for step in steps])

    assert_alike(whole, layout, WORLD, without_errors)


@pytest.mark.few(5)
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_check_before_the_update_names_what_is_not_finite(layout, bad, elastic):
    """Ranks that hold the row tell; then all forget the step."""
    tables = table_for_each(40, [Sgd(lr=0.1), Lamb(lr=0.1), RowWiseAdam(lr=0.1), Adam(lr=0.1)])
    good = make_steps(tables, [(3, 9, 0)])
    whole = Embeddings(tables, seed=SEED)
    train(whole, good)
    step = bad_step(tables, 1.0, 0)
    step.ups[""][2, DIM + 5] = bad  # of rank 1, table t1, sample 0 of its two

    def rank(comm):
        sharded = make_sharded(tables, place(tables, layout, WORLD), comm, elastic=elastic)
        mine = step.of(comm.rank)
        given(look_up(sharded, mine), mine).backward()
        try:
            sharded.check_staged()
            text = ""
        except GradientError as error:
            text = str(error)
        sharded.discard()
        sharded.update()
        assert not train(sharded, [good[0].of(comm.rank)])
        return text, list(rows_apart(sharded, whole))

    found = run_threads(WORLD, rank, timeout_s=60)
    assert not [text for _, differences in found for text in differences]
    told = [text for text, _ in found if text]
    assert told
    for text in told:
        assert text.startswith(f"{bad} in the gradient of table 't1', feature 't1")
        assert text.endswith(". No row was updated")
