"""Compressing small made-up clicks: no row is looked at twice, what was measured is kept, and the recipe trains."""

from contextlib import suppress

import numpy as np
import pytest
from compressible import recipe, write_clicks
from msgspec import structs

from rowwise.base.errors import DataError, SpecError
from rowwise.recipes.compose import resolve
from rowwise.recipes.compress.advise import advise, check_recipe, write_recipe
from rowwise.recipes.compress.folder import TrialFolderSpec, open_folder
from rowwise.recipes.compress.probe import learn, probe, shrink_recipe
from rowwise.recipes.compress.selection import CompressionGoal, select_tables
from rowwise.recipes.compress.window import open_window
from rowwise.recipes.resolved import make_batcher
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import read
from rowwise.tables.ids.methods import table_bytes
from rowwise.tables.ids.open import open_map

METHODS = ("hash", "learned")


def rows_of(resolved, rows):
    """The numbers of some rows."""
    return np.concatenate([batch.keys_B.numpy() for batch in make_batcher(resolved, rows)])


def compressed(folder, ratio=4.0, tell=lambda text, share: None, methods=METHODS, rows=None, history=(), **changes):
    """What compressing finds, in folder/c."""
    given = recipe(folder, **changes)
    resolved = resolve(given)
    goal = CompressionGoal(ratio=ratio, methods=methods)
    order = TrialFolderSpec.of(resolved.recipe, tuple(history), rows, given.seed)
    into = open_folder(folder / "c", order)
    advice = advise(open_window(resolved, order.history), select_tables(resolved.tables, goal), goal, order, into, tell)
    return advice, write_recipe(given, resolved, advice, into), into


@pytest.mark.few(4)
@pytest.mark.parametrize("history", [(), ("row < 3000",), ("row >= 400", "row < 3000")])
@pytest.mark.parametrize(
    "data", [{}, {"valid_share": 0.1}, {"share": "last"}, {"share": "last", "valid_share": 0.1}], ids=str
)
def test_rows_to_learn_from_and_to_measure_on_are_apart_and_none_is_a_test_row(tmp_path, history, data):
    resolved = resolve(recipe(tmp_path, data=data))
    window = open_window(resolved, history)
    earlier, later = (set(rows_of(resolved, rows)) for rows in (window.earlier.rows.train, window.later))
    test, train = (set(rows_of(resolved, rows)) for rows in (resolved.rows.test, resolved.rows.train))
    assert earlier
    assert later
    assert not earlier & later
    assert not (earlier | later) & test
    inside = {row for row in train if (not history or row < 3000) and (len(history) < 2 or row >= 400)}
    assert window.validates == ("valid_share" in data)
    if window.validates:
        assert earlier == inside
        assert window.whole is None
        assert window.is_later == ("share" in data)
    else:
        assert earlier | later == inside == set(rows_of(resolved, window.whole.rows.train))
        assert max(earlier) < min(later)
        assert window.is_later


def test_too_few_splits_make_a_random_share_which_is_said(tmp_path):
    resolved = resolve(recipe(tmp_path))
    window = open_window(resolved, ["row < 500"])
    earlier, later = (set(rows_of(resolved, rows)) for rows in (window.earlier.rows.train, window.later))
    assert not earlier & later
    assert 0 < len(later) < len(earlier) / 4
    assert not window.is_later
    assert "a random 10% of the history, as it has too few splits (3)" in window.description


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("row < 0", "--history row < 0: no training row passes: expected other conditions"),
        ("weak < 4", "no column 'weak'"),
        ("row ~ 4", "where: 'row ~ 4'"),
    ],
)
def test_a_history_that_is_none_is_refused(tmp_path, condition, said):
    with pytest.raises((DataError, SpecError), match=said):
        open_window(resolve(recipe(tmp_path)), [condition])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["dlrm", "dcn", "deepfm", "wide_deep"])
def test_the_probe_counts_every_id_and_learns_of_those_it_has_seen(tmp_path, kind):
    resolved = resolve(recipe(tmp_path, model={"kind": kind}))
    found = learn(resolved, ["user", "seen"], lambda share: None)
    wanted = {name: np.zeros(rows, np.int64) for name, rows in (("user", 1200), ("seen", 1100))}
    for batch in make_batcher(resolved, resolved.rows.train):
        for name, counts_N in wanted.items():
            lengths = batch.sparse.lengths_of(name)
            at = batch.sparse.features.index(name) * batch.sparse.batch_size
            begin = int(batch.sparse.lengths_FB[:at].sum())
            np.add.at(counts_N, batch.sparse.values_N[begin : begin + int(lengths.sum())].numpy(), 1)
    for name, counts_N in wanted.items():
        assert np.array_equal(found[name].counts_N, counts_N)
        assert found[name].vectors_ND.dtype == np.float32
        assert found[name].vectors_ND.shape == (len(counts_N), 4 + (kind in ("deepfm", "wide_deep")))
        moved = (found[name].vectors_ND != 0).any(1)
        assert not moved[counts_N == 0].any()
        assert moved[counts_N > 0].mean() > 0.9


def test_the_probe_is_small(tmp_path):
    small = shrink_recipe(resolve(recipe(tmp_path, model={"kind": "dlrm", "bottom": [9], "top": [16, 8]})), ["user"])
    assert {table.dim for table in small.tables} == {4}
    assert (small.recipe.model.bottom, small.recipe.model.top) == ((5,), (8, 4))
    assert [table.init.__struct_config__.tag for table in small.tables] == ["constant", "uniform", "uniform"]


@pytest.mark.slow
def test_a_probe_is_read_again_and_one_of_other_tables_is_refused(tmp_path):
    resolved = resolve(recipe(tmp_path))
    path = tmp_path / "probe.safetensors"
    made = probe(resolved, ["user"], path, lambda share: None)
    again = probe(resolved, ["user"], path, lambda share: pytest.fail("trained again"))
    assert np.array_equal(made["user"].vectors_ND, again["user"].vectors_ND)
    assert np.array_equal(made["user"].counts_N, again["user"].counts_N)
    with pytest.raises(DataError, match="cannot be read"):
        probe(resolved, ["seen"], path, lambda share: None)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"cannot be read: .*"):
        probe(resolved, ["user"], path, lambda share: None)


def test_a_table_whose_ids_never_come_is_refused_by_name(tmp_path):
    write_clicks(tmp_path / "rows.parquet", seen=[])
    with pytest.raises(DataError, match="table 'seen': the history"):
        learn(resolve(recipe(tmp_path)), ["user", "seen"], lambda share: None)


@pytest.mark.slow
@pytest.mark.parametrize("data", [{}, {"valid_share": 0.1}], ids=str)
def test_what_is_found_fits_and_trains(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    advice, written, folder = compressed(tmp_path, tell=lambda text, share: told.append(share), data=data)
    assert told == sorted(told)
    assert advice.size_bytes <= advice.budget_bytes == advice.full_bytes // 4
    assert {one.name for one in advice.tables} == {"user", "seen"}
    assert [one.name for one in advice.left] == ["item"]
    assert all(np.isfinite([point.ne, point.auc, point.loss]).all() for one in advice.tables for point in one.points)
    assert all({point.method for point in one.points} == set(METHODS) for one in advice.tables)
    assert advice.noise > 0
    assert advice.together is not None
    assert advice.ne == pytest.approx(sum(one.ne for one in advice.tables))
    assert (folder.path / "probe-all.safetensors").exists() == (data == {})
    made = read(written)
    sizes = {table.name: table_bytes(table, open_map(table)) for table in made.tables.list}
    assert sum(sizes.values()) == advice.size_bytes
    assert {name: sizes[name] for name in ("user", "seen")} == {one.name: one.size_bytes for one in advice.tables}
    result = TrainingRun.start(made, tmp_path / "runs").go()
    assert result.status == "finished"
    assert result.recipe == "clicks-compressed"


class Killed(BaseException):
    """As a kill ends it."""


@pytest.mark.slow
def test_a_killed_command_goes_on_and_finds_the_same(tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "killed"
    for path in (whole, other):
        path.mkdir()
    expected, _, kept = compressed(whole)
    told = 0

    def kill(_text, _share):
        nonlocal told
        told += 1
        if told % 137 == 0:
            raise Killed

    for _ in range(100):
        with suppress(Killed):
            found, _, folder = compressed(other, tell=kill)
            break
    assert told > 137
    lines = [path.trials.read_text().splitlines() for path in (kept, folder)]
    assert len(lines[0]) == len(lines[1])

    def plain(advice):
        return structs.replace(advice, tables=tuple(structs.replace(one, file="") for one in advice.tables))

    assert plain(found) == plain(expected)


@pytest.mark.slow
def test_another_ratio_in_the_same_folder_takes_what_is_there(tmp_path):
    compressed(tmp_path, methods=("hash",), rows=600)
    before = (tmp_path / "c" / "trials.jsonl").read_text()
    told = []
    advice, _, _ = compressed(tmp_path, ratio=4.02, methods=("hash",), rows=600, tell=lambda t, s: told.append(t))
    after = (tmp_path / "c" / "trials.jsonl").read_text()
    assert after.startswith(before)
    assert after.count("\n") - before.count("\n") <= 1  # all tables as chosen, which are others
    assert advice.rows == 600


def test_recipes_whose_trials_cannot_be_compared_are_refused(tmp_path):
    towers = {"kind": "two_tower", "item": "item", "user_features": ["user", "seen"]}
    with pytest.raises(SpecError, match=r"model.kind=two_tower"):
        check_recipe(recipe(tmp_path, model=towers))
    with pytest.raises(SpecError, match="--set init_from=null"):
        check_recipe(recipe(tmp_path, init_from="before"))
