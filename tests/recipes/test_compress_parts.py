"""The parts of compressing that train nothing: what is tried, what a folder keeps, which ids are ordered, budgets."""

import multiprocessing

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import SpecError
from rowwise.recipes.compress import schedule
from rowwise.recipes.compress.folder import Trial, TrialFolderSpec, lock_folder, open_folder
from rowwise.recipes.compress.id_order import find_id_order
from rowwise.recipes.compress.results import TrialResults
from rowwise.recipes.compress.schedule import TrialSpec, best_methods, other_size_trials, ratios_around
from rowwise.recipes.compress.selection import CompressionGoal, select_tables
from rowwise.recipes.text import decode
from rowwise.tables.spec import Table

RECIPE = {"data": {"dataset": "synthetic"}, "seed": 3}


def order(history=(), rows=None, seed=0, **recipe):
    return TrialFolderSpec.of(decode({**RECIPE, **recipe}, "a.yaml"), tuple(history), rows, seed)


def trial(method, ratio, size_bytes, ne, table="t", seed=0, digest=""):
    asked = TrialSpec(table=table, method=method, ratio=ratio, seed=seed)
    metrics = {"label": {"ne": ne, "loss": ne / 2, "auc": 1 - ne}}
    return Trial(spec=asked, size_bytes=size_bytes, map_bytes=size_bytes // 10, metrics=metrics, digest=digest)


@given(st.floats(1, 1e5))
def test_sizes_are_around_the_wanted_one_which_comes_first(wanted):
    ratios = ratios_around(wanted)
    assert ratios[0] == pytest.approx(max(wanted, schedule.MIN_RATIO), rel=0.11)
    assert ratios[0] >= wanted
    assert all(ratio >= schedule.MIN_RATIO for ratio in ratios)
    assert len(set(ratios)) == len(ratios) >= 3


@given(
    st.dictionaries(st.sampled_from(["hash", "learned", "mixed", "frequency", "a", "b"]), st.floats(0, 1), min_size=1)
)
def test_the_best_methods_go_on_and_one_that_learns_always(losses):
    kept = best_methods(losses)
    assert len(kept) == min(3, len(losses))
    assert min(losses, key=lambda method: (losses[method], method)) in kept or len(kept) == 1
    if len(kept) > 1:
        assert "learned" in kept or "learned" not in losses
        assert set(kept) - {"learned"}
    assert {one.method for one in other_size_trials({"t": losses}, (2.0, 3.0), 0)} == set(kept)


def test_curves_are_above_the_whole_model_of_the_same_seed():
    made = [trial("", 1.0, 100, ne, table="", seed=seed) for seed, ne in enumerate((0.5, 0.6, 0.7))]
    made += [trial("hash", 10.0, 10, 0.9), trial("learned", 10.0, 9, 0.65), trial("learned", 3.0, 30, 0.6)]
    made += [trial("mixed", 10.0, 10, 0.6), Trial(spec=TrialSpec(table="t", method="hash", ratio=90.0))]
    measured = TrialResults(trials={one.spec: one for one in made}, methods=("learned", "hash"), seed=0)
    assert measured.full.ne == pytest.approx(0.6)
    assert measured.noise == pytest.approx(0.1)
    assert measured.losses("t", 10.0) == pytest.approx({"learned": 0.15, "hash": 0.4})
    assert [(o.method, o.size_bytes) for o in measured.options("t")] == [("learned", 30), ("learned", 9), ("hash", 10)]
    assert measured.points("t")[2].auc == pytest.approx(-0.4)


def test_a_map_that_two_methods_make_goes_on_once():
    made = [trial("", 1.0, 100, 0.5, table="", seed=seed) for seed in range(3)]
    made += [
        trial("hash", 9.0, 10, 0.9),
        trial("learned", 9.0, 9, 0.65, digest="a"),
        trial("b", 9.0, 9, 0.65, digest="a"),
    ]
    measured = TrialResults(trials={one.spec: one for one in made}, methods=("hash", "learned", "b"), seed=0)
    assert list(measured.losses("t", 9.0)) == ["hash", "learned"]
    assert len(measured.points("t")) == 3


def test_ids_in_any_order_are_not_ordered_and_those_by_popularity_are():
    rng = np.random.default_rng(0)
    counts_N = np.sort(rng.zipf(1.5, 5000).clip(max=10**6))[::-1].astype(np.int64)
    assert find_id_order(counts_N, None) > 0.9
    assert find_id_order(rng.permutation(counts_N), rng.normal(size=(5000, 4)).astype(np.float32)) is None
    smooth_ND = np.cumsum(rng.normal(size=(5000, 4)), 0).astype(np.float32)
    assert find_id_order(rng.permutation(counts_N) + 1, smooth_ND) > 0.5
    assert find_id_order(np.ones(2000, np.int64), None) is None


def test_small_tables_stay_and_the_budget_is_of_all():
    tables = [
        Table(name="big", rows=10_000, dim=8),
        Table(name="few", rows=999, dim=8),
        Table(name="mid", rows=1000, dim=8),
    ]
    made = select_tables(tables, CompressionGoal(ratio=4.0, methods=("hash",)))
    assert made.names == ("big", "mid")
    assert [(one.name, one.size_bytes) for one in made.kept] == [("few", 999 * 32)]
    assert made.full_bytes == 11_999 * 32
    assert made.budget_bytes == 11_999 * 8
    assert made.ratio == pytest.approx(11_000 * 32 / (11_999 * 8 - 999 * 32))
    with pytest.raises(SpecError, match="take 31,968 of 383,968"):
        select_tables(tables, CompressionGoal(budget_bytes=31_968, methods=("hash",)))
    with pytest.raises(SpecError, match="all tables take 383,968"):
        select_tables(tables, CompressionGoal(budget_bytes=383_968, methods=("hash",)))
    with pytest.raises(SpecError, match="least 1,000 ids"):
        select_tables(tables[1:2], CompressionGoal(ratio=4.0, methods=("hash",)))


def test_trials_outlast_a_kill_and_a_torn_line_goes(tmp_path):
    folder = open_folder(tmp_path / "c", order())
    made = [trial("hash", 10.0, 10, 0.9), trial("learned", 10.0, 9, 0.65)]
    for one in made:
        folder.add(one)
    with folder.trials.open("ab") as file:
        file.write(msgspec.json.encode(made[0])[:40])
    again = open_folder(tmp_path / "c", order())
    with lock_folder(again):
        assert again.read() == {one.spec: one for one in made}
        again.add(trial("mixed", 10.0, 10, 0.7))
        assert len(again.read()) == 3
    folder.trials.write_text("what\n")
    with pytest.raises(SpecError, match=r"trials.jsonl, line 1"):
        folder.read()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (order(history=["week < 4"]), "measured with --history none, not week < 4: expected the same settings"),
        (order(rows=5), "measured with --rows None, not 5"),
        (order(seed=1), "measured with --seed 0, not 1"),
        (
            order(train={"epochs": 2}, model={"kind": "dcn"}),
            "measured with another recipe, which differs in model, train",
        ),
    ],
)
def test_a_folder_of_something_else_is_refused_by_name(tmp_path, other, said):
    open_folder(tmp_path / "c", order())
    with pytest.raises(SpecError, match=said):
        open_folder(tmp_path / "c", other)


def test_what_is_no_folder_of_measurements_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("")
    for name, said in (("file", "is a file: expected a folder"), ("full", "has other files and no order.json")):
        with pytest.raises(SpecError, match=said):
            open_folder(tmp_path / name, order())
    open_folder(tmp_path / "c", order())
    (tmp_path / "c" / "order.json").write_text("{")
    with pytest.raises(SpecError, match="written by `rowwise compress`"):
        open_folder(tmp_path / "c", order())


def hold(path, held_now, go):
    with lock_folder(open_folder(path, order())):
        held_now.set()
        go.wait(30)


@pytest.mark.slow
def test_two_processes_do_not_measure_into_one_folder(tmp_path):
    folder = open_folder(tmp_path / "c", order())
    context = multiprocessing.get_context("spawn")
    held_now, go = context.Event(), context.Event()
    process = context.Process(target=hold, args=(folder.path, held_now, go))
    process.start()
    assert held_now.wait(60)
    with pytest.raises(SpecError, match="another process measures"), lock_folder(folder):
        pass
    go.set()
    process.join()
    with lock_folder(folder):
        pass
