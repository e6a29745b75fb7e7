"""Several seeds of one recipe from the command line: a run each, and their mean."""

import json

import pytest
import yaml
from launching import write_recipe
from pyarrow import csv
from small import same, saved

SHORT = ("train", "small.yaml", "--set", "train.epochs=1")


def seed_of(run):
    return yaml.safe_load((run / "recipe.yaml").read_text())["seed"]


@pytest.mark.slow
def test_a_run_for_each_seed_and_their_mean(command, tmp_path):
    write_recipe(tmp_path)
    code, out, err = command(*SHORT, "--set", "seed=5", "--seeds", "2")
    assert code == 0
    assert err.count("finished: ") == 2
    runs = [tmp_path / "runs/small" / name for name in ("1", "2")]
    assert [seed_of(run) for run in runs] == [5, 6]
    table = [line.split() for line in out.splitlines()]
    results = [json.loads((run / "result.json").read_text())["test"]["label"] for run in runs]
    for line, name, result in zip(table[1:3], ("runs/small/1", "runs/small/2"), results, strict=True):
        assert line[0] == name
        assert line[3] == f"{result['auc']:.4f}"
    assert table[3][:3] == ["mean", "of", "2"]
    assert out.splitlines()[4].startswith("cost: ")
    assert "of weights and " in out.splitlines()[4]
    assert (
        out.splitlines()[5] == "predict with all: rowwise predict runs/small/1 runs/small/2 --out predictions.parquet"
    )
    _, told, _ = command("eval", "runs/small/1", "runs/small/2", "--slices", "user", "--json")
    found = json.loads(told)
    assert [run["tasks"]["label"]["auc"] for run in found["runs"]] == [result["auc"] for result in results]
    assert f"{found['tasks']['label']['auc']:.4f}" == table[3][5]
    assert {row["feature"] for row in found["slices"]} == {"user"}
    for run in runs:
        assert f"mean of 2 runs {found['tasks']['label']['auc']:.4f}" in (run / "report.html").read_text("utf-8")
    _, shown, _ = command("eval", "runs/small/1", "runs/small/2", "--slices", "user")
    assert "user others" in shown
    _, told, _ = command("predict", "runs/small/1", "runs/small/2", "--out", "p.csv")
    assert csv.read_csv(tmp_path / "p.csv").num_rows == results[0]["count"]
    assert told == f"wrote p.csv: {results[0]['count']:,.0f} rows\n"
    # The second run is the one that its seed alone makes.
    assert command(*SHORT, "--set", "seed=6")[0] == 0
    assert same(saved(runs[1]), saved(tmp_path / "runs/small/3"))


def test_without_test_rows_nothing_is_measured(command, tmp_path):
    write_recipe(tmp_path, data={"test_share": 0.0})
    code, out, _ = command(*SHORT, "--seeds", "2")
    assert code == 0
    assert out.startswith("no test rows: the ensemble was not measured\npredict with all: rowwise predict ")


@pytest.mark.dist
def test_seeds_on_several_ranks(tmp_path):
    from test_cli import rowwise_cli

    write_recipe(tmp_path)
    done = rowwise_cli(*SHORT, "--seeds", "2", "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mean of 2" in done.stdout


def test_seeds_that_are_refused(refused, tmp_path):
    write_recipe(tmp_path)
    expected = "--seeds 1: expected 2 to 100 runs"
    assert expected in refused("train", "small.yaml", "--seeds", "1")
    assert not (tmp_path / "runs").exists()


def test_two_towers_have_no_mean(refused, tmp_path):
    towers = {"kind": "two_tower", "item": "item", "user_features": ["user"], "item_features": ["seen"]}
    write_recipe(tmp_path, model=towers)
    assert "--seeds 2: model.kind=two_tower ranks items, and has no" in refused("train", "small.yaml", "--seeds", "2")


def test_runs_of_other_rows_are_refused_in_one_line(command, refused, tmp_path):
    write_recipe(tmp_path)
    assert command(*SHORT)[0] == 0
    assert command(*SHORT, "--set", "data.test_share=0.1")[0] == 0
    for end in (("eval",), ("predict", "--out", "p.csv")):
        told = refused(*end, "runs/small/1", "runs/small/2")
        assert "differ in their test rows, data.test_share=0.1 and 0.2: expected the same test rows, or --data" in told
