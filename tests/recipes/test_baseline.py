"""Boosted trees beside a run: on the same rows, with the same metrics, named where they cannot be."""

import json
import sys

import lightgbm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import trained, write_rows

from rowwise import SpecError
from rowwise.recipes.baseline import _codes, fit_trees

IDS = st.integers(-3, 8).map(float)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    write_rows(folder / "rows.parquet", 4000)
    return trained(folder, data={"valid_share": 0.2, "test_share": 0.2}, train={"epochs": 2})


def test_trees_see_the_rows_of_the_run_and_its_report_shows_them(run, monkeypatch):
    made, result = run
    seen = []
    plain = lightgbm.Dataset
    monkeypatch.setattr(lightgbm, "Dataset", lambda x, y, **how: seen.append((x, y)) or plain(x, y, **how))
    found = fit_trees(made.folder.path)
    (train, _), (_, valid_labels) = seen
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


@given(known=st.sets(IDS), column=st.lists(IDS | st.just(np.nan)))
def test_unknown_ids_are_missing_ones(known, column):
    codes = _codes(np.array(column), np.array(sorted(known)))
    want = [sorted(known).index(x) if x in known else np.nan for x in column]
    np.testing.assert_array_equal(codes, np.array(want, np.float64))


def test_a_run_without_validation_rows_is_refused(tmp_path):
    made, _ = trained(tmp_path, data={"valid_share": 0.0}, train={"epochs": 1})
    with pytest.raises(SpecError, match="trees stop by validation rows and are measured on test rows"):
        fit_trees(made.folder.path)


def test_without_lightgbm_the_way_out_is_said(run, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    code, _, err = command("baseline", str(run[0].folder.path))
    assert code == 2
    assert err == "rowwise: trees need LightGBM: want pip install 'rowwise[trees]'\n"
