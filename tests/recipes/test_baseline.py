"""Boosted trees beside a run: on the same rows, with the same metrics, named where they cannot be."""

import json
import sys
from contextlib import contextmanager

import lightgbm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import compute as pc
from small import same, saved, sections, trained, write_rows

from rowwise import SpecError
from rowwise.cli.measure import _show_baseline, suggest_trees
from rowwise.cli.terminal import make_terminal
from rowwise.recipes import baseline
from rowwise.recipes.baseline import CATEGORIES, _codes, fit_quick_trees, fit_trees

IDS = st.integers(-3, 8).map(float)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    write_rows(folder / "rows.parquet", 4000)
    return trained(folder, data={"valid_share": 0.2, "test_share": 0.2}, train={"epochs": 2})


@pytest.fixture
def datasets(monkeypatch):
    """Features and labels that trees are given."""
    seen, plain = [], lightgbm.Dataset
    monkeypatch.setattr(lightgbm, "Dataset", lambda x, y, **how: seen.append((x, y)) or plain(x, y, **how))
    return seen


def test_trees_see_the_rows_of_the_run_and_its_report_shows_them(run, datasets):
    made, result = run
    found = fit_trees(made.folder.path)
    (train, _), (_, valid_labels) = datasets[:2]
    assert found.rows == len(train) == result.samples / 2
    assert len(train) + len(valid_labels) + result.test["label"]["count"] == 4000
    assert found.test["count"] == result.test["label"]["count"]
    assert found.test["base_rate"] == pytest.approx(result.test["label"]["base_rate"])
    assert found.test["auc"] > 0.6
    assert json.loads((made.folder.path / "baseline.json").read_text())["test"]["auc"] == found.test["auc"]
    assert f"LightGBM {found.test['auc']:.4f}" in (made.folder.path / "report.html").read_text("utf-8")


def test_the_command_prints_both(run, command):
    code, out, err = command("baseline", str(run[0].folder.path))
    assert (code, err) == (0, "")
    assert "LightGBM, " in out
    assert " AUC; trees took " in out


def test_trees_see_a_number_once_and_know_where_it_is_missing(tmp_path, datasets):
    write_rows(
        tmp_path / "rows.parquet",
        1000,
        group=1000,
        d0=lambda rows: pc.if_else(pc.less(rows["user"], 25), None, rows["d0"]),
    )
    sparse = [{"column": "user", "ids": "direct"}, {"column": "d0_bucket", "ids": "direct"}]
    columns = {"sparse": sparse, "dense": [{"column": name} for name in ("d0", "user")]}
    changes = {"transforms": [{"kind": "bucketize", "column": "d0", "to": "d0_bucket", "borders": [0.0]}]}
    tables = {"list": [{"name": name, "rows": 50, "dim": 8} for name in ("user", "d0_bucket")]}
    made, _ = trained(tmp_path, columns=columns, tables=tables, train={"epochs": 1}, **changes)
    fit_trees(made.folder.path)
    assert len(datasets) == 2
    for x_BF, _ in datasets:
        assert x_BF.shape[1] == 2
        np.testing.assert_array_equal(np.isnan(x_BF[:, 0]), x_BF[:, 1] < 25)


def test_of_two_ways_with_rare_ids_the_validation_rows_choose(run, monkeypatch):
    made, _ = run
    found = {}
    for name, ways in {"plain": CATEGORIES[:1], "smoothed": CATEGORIES[1:], "both": CATEGORIES}.items():
        monkeypatch.setattr(baseline, "CATEGORIES", ways)
        found[name] = fit_trees(made.folder.path).test
    assert found["plain"] != found["smoothed"]
    assert found["both"] in (found["plain"], found["smoothed"])


def test_a_new_run_on_few_rows_is_compared_unasked(command, tmp_path):
    write_rows(tmp_path / "rows.parquet", 1000)
    (tmp_path / "small.yaml").write_text(json.dumps(sections(tmp_path)))
    code, _, err = command("train", "small.yaml", "--no-baseline")
    assert code == 0
    assert "boosted trees" not in err
    code, _, err = command("train", "small.yaml")
    assert code == 0
    plain, compared = (tmp_path / "runs" / "small" / name for name in "12")
    trees = json.loads((compared / "baseline.json").read_text())["test"]["auc"]
    assert f"trees   boosted trees reach AUC {trees:.4f}, this model " in err
    assert not (plain / "baseline.json").exists()
    assert same(saved(plain), saved(compared))
    results = [json.loads((one / "result.json").read_text()) for one in (plain, compared)]
    assert results[0]["test"] == results[1]["test"]


@contextmanager
def other_result(run, **metrics):
    """The result of a run with other test metrics."""
    path = run.folder.path / "result.json"
    before = path.read_text()
    changed = json.loads(before)
    changed["test"]["label"] |= metrics
    path.write_text(json.dumps(changed))
    try:
        yield
    finally:
        path.write_text(before)


@pytest.mark.parametrize(("auc", "advised"), [(0.5, True), (1.0, False)])
def test_trees_are_advised_where_they_win(run, capsys, auc, advised):
    made, _ = run
    with other_result(made, auc=auc):
        suggest_trees(made.folder.path, make_terminal(stderr=True))
    said = capsys.readouterr().err
    assert f"this model {auc:.4f}" in said
    assert (f"(rowwise baseline {made.folder.path})" in said) == advised


def test_of_many_rows_no_trees_are_fitted_unasked(run):
    path = run[0].folder.path
    assert fit_quick_trees(path) is not None
    assert fit_quick_trees(path, max_rows=2000) is None
    assert fit_quick_trees(path, max_rows=4000, max_values=10_000) is None


def test_without_validation_rows_trees_are_refused_and_nothing_is_compared_unasked(tmp_path):
    made, _ = trained(tmp_path, data={"valid_share": 0.0}, train={"epochs": 1})
    assert fit_quick_trees(made.folder.path) is None
    with pytest.raises(SpecError, match="trees need validation rows"):
        fit_trees(made.folder.path)


def test_metrics_of_a_stranger_are_read_as_metrics(run, capsys):
    made, _ = run
    trees = fit_trees(made.folder.path)
    for metrics in ({"auc": None}, {"auc": [1]}, {"loss": "0.5"}):
        with other_result(made, **metrics):
            _show_baseline(trees, made.folder.path)
        assert "LightGBM" in capsys.readouterr().out


@given(known=st.sets(IDS), column=st.lists(IDS | st.just(np.nan)))
def test_unknown_ids_are_missing_ones(known, column):
    codes = _codes(np.array(column), np.array(sorted(known)))
    want = [sorted(known).index(x) if x in known else np.nan for x in column]
    np.testing.assert_array_equal(codes, np.array(want, np.float64))


def test_without_lightgbm_the_way_out_is_said(run, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    code, _, err = command("baseline", str(run[0].folder.path))
    assert code == 2
    assert err == "rowwise: trees need LightGBM; pip install 'rowwise[trees]'\n"
