"""Dims of tables under a budget: curves of a known model, the choice, and runs that are trained once."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from launching import started, wait_for_step
from small import recipe, same, saved, sections

from rowwise import DCN, Batch, Embeddings, Jagged, Pooling, SpecError, Table
from rowwise.recipes.explain.importance import Scorer
from rowwise.recipes.explain.rows import HeldRows
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import read
from rowwise.recipes.tune import tune_dims
from rowwise.recipes.tune.dims import find_directions, uniform_dims
from rowwise.train.settings import Training

MODEL = {"kind": "dcn", "deep": [8], "crosses": 1}


def write_recipe(folder, **changes):
    recipe(folder)  # writes the rows
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(sections(folder, **{"model": MODEL} | changes)))
    return str(path)


def test_vectors_are_projected_onto_the_principal_directions_of_what_the_model_reads():
    draws = np.random.default_rng(0)
    pairs = draws.integers(0, 9, (40, 2))
    table = Table(name="item", rows=9, dim=5, features=("shown", "seen"), pooling=Pooling.MEAN)
    bags = {"shown": [[i] for i in pairs[:, 0].tolist()], "seen": pairs.tolist()}
    sparse = Jagged.from_lists(bags)
    batch = Batch(dense_BF=torch.zeros(40, 1), sparse=sparse, labels_BK=torch.zeros(40, 1))
    model = DCN(Embeddings([table]), 1, (4, 1))
    scorer = Scorer(model=model, task=0, batch=16, training=Training(batch=16))
    directions = find_directions(scorer, HeldRows(batch), [table])["item"]
    rows = model.embeddings.table("item").numpy().astype(np.float64)
    read_ND = np.concatenate([rows[pairs[:, 0]], rows[pairs].mean(1)])
    centered_ND = read_ND - read_ND.mean(0)
    u, s, vt = np.linalg.svd(centered_ND, full_matrices=False)
    for dim in range(1, 6):
        wanted = (u[:, :dim] * s[:dim]) @ vt[:dim] + read_ND.mean(0)
        got = directions.project(torch.from_numpy(read_ND).float(), dim)
        np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)


def test_equal_dims_fit_the_budget():
    tables = [Table(name="a", rows=100, dim=8), Table(name="b", rows=10, dim=2)]
    assert uniform_dims(tables, 820) == {"a": 8, "b": 2}
    assert uniform_dims(tables, 819) == {"a": 7, "b": 2}
    assert uniform_dims(tables, 110) == {"a": 1, "b": 1}
    with pytest.raises(SpecError, match="a budget of 109 parameters: expected at least 110, one for each row"):
        uniform_dims(tables, 109)


@pytest.mark.slow
def test_a_budget_is_kept_and_the_same_command_trains_nothing_again(command, tmp_path):
    path = write_recipe(tmp_path)
    code, out, _ = command("tune", path, "--ratio", "3", "--out", "out")
    assert code == 0
    outcome = json.loads((tmp_path / "out/dims-3.json").read_text())
    assert outcome["parameters"] == 8 * (50 + 30 + 20)
    assert max(outcome["chosen"], outcome["uniform"]) <= outcome["budget"] == 266
    made = read(tmp_path / "out/dims-3.yaml")
    dims = {table.name: table.dim for table in made.tables.list}
    assert dims == {table["name"]: table["chosen"] for table in outcome["tables"]}
    assert sum(table.rows * table.dim for table in made.tables.list) == outcome["chosen"]
    assert all(list(table["curve"]) == ["1", "2", "3", "4", "6", "8"] for table in outcome["tables"])
    assert re.search(r"item +30 +8 +\d +2", out)
    results = {name: tmp_path / "out" / name / "1/result.json" for name in ("whole", "chosen-3", "uniform-3")}
    assert all(json.loads(result.read_text())["test"] == {} for result in results.values())
    before = {name: result.stat().st_mtime_ns for name, result in results.items()}
    assert command("tune", path, "--ratio", "3", "--out", "out")[:2] == (0, out)
    assert before == {name: result.stat().st_mtime_ns for name, result in results.items()}
    assert command("train", "out/dims-3.yaml")[0] == 0
    for changes in (("--set", "seed=1"), ("--trials", "3")):
        code, _, err = command("tune", path, "--ratio", "3", "--out", "out", *changes)
        assert code == 2
        assert "another --out" in err or "--ratio with --trials" in err


@pytest.mark.slow
def test_a_killed_command_goes_on_with_the_run_that_it_trained(tmp_path):
    path = write_recipe(tmp_path, train={"epochs": 2}, log={"every": 2}, save={"every": 4})
    with started(tmp_path, "tune", path, "--ratio", "3", "--out", "out") as process:
        wait_for_step(tmp_path / "out/whole/1", 10)
        process.kill()
        process.communicate()
    outcome = tune_dims(path, tmp_path / "out", 3.0)
    assert (tmp_path / "out/whole/1/log.txt").read_text().count("training from step") == 2
    TrainingRun.start(read(Path(path)), tmp_path / "other").go(test=False)
    assert same(saved(tmp_path / "out/whole/1"), saved(tmp_path / "other/small/1"))
    assert set(outcome.values) == {"whole", "chosen", "uniform"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"kind": "dlrm", "bottom": [8], "top": [8]}}, "the model takes tables of one dim (model.kind=dlrm"),
        ({"data": {"valid_share": 0.0}}, "tune needs validation rows"),
        (
            {
                "model": {"kind": "two_tower", "user_features": ["user"], "item": "item"},
                "evaluate": {"metric": "recall@10"},
            },
            "--ratio: model.kind=two_tower: expected a click model",
        ),
        ({"train": {"objective": {"kind": "squared"}}, "evaluate": {"metric": "rmse"}}, "rowwise tune --ratio"),
    ],
)
def test_recipes_without_dims_to_choose_are_refused(changes, message, tmp_path):
    path = write_recipe(tmp_path, **changes)
    with pytest.raises(SpecError, match=re.escape(message)):
        tune_dims(path, tmp_path / "out", 2.0)
    assert not (tmp_path / "out/whole").exists()
