"""Several runs as one model: the mean of their probabilities, refused where they do not fit together."""

import numpy as np
import pytest
import torch
from pyarrow import parquet as pq
from small import trained, write_rows

from rowwise import SpecError
from rowwise.recipes.ensemble import Ensemble, evaluate_ensemble, load_ensemble, mean_probability, predict_ensemble
from rowwise.recipes.trained import evaluate, predict_rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one recipe with two seeds."""
    folder = tmp_path_factory.mktemp("seeds")
    write_rows(folder / "rows.parquet", 3000)
    return [trained(folder, seed=seed, train={"epochs": 1})[0].folder.path for seed in (3, 4)]


def test_the_mean_is_that_of_the_probabilities_of_each_run(runs, tmp_path):
    assert predict_ensemble(runs, tmp_path / "both.parquet") == predict_rows(runs[0], tmp_path / "0.parquet")
    predict_rows(runs[1], tmp_path / "1.parquet")
    both, *each = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("both", "0", "1"))
    wanted = np.mean([one["label_probability"] for one in each], 0)
    assert not np.allclose(each[0]["label_probability"], each[1]["label_probability"])
    np.testing.assert_allclose(both["label_probability"], wanted, atol=1e-6)
    assert both["row"].equals(each[0]["row"])


def test_each_run_scores_as_it_does_alone(runs):
    scores = evaluate_ensemble(runs, slices=("user",))
    for run, found in zip(runs, scores.each, strict=True):
        alone = evaluate(run).tasks["label"]
        assert found["label"] == pytest.approx(alone)
    both = scores.ensemble.tasks["label"]
    assert both["loss"] < np.mean([one["label"]["loss"] for one in scores.each])
    assert both["calibration"] == pytest.approx(np.mean([one["label"]["calibration"] for one in scores.each]))
    assert sum(row.values["count"] for row in scores.ensemble.slices) == both["count"]
    assert {row.task for row in scores.ensemble.slices} == {"label"}
    assert min(scores.seconds) > 0
    assert scores.weight_bytes[0] == scores.weight_bytes[1] > 100 * 8 * 4  # rows of the tables, and the layers


def test_one_run_is_its_own_mean(runs, tmp_path):
    predict_ensemble(runs[:1], tmp_path / "one.parquet")
    predict_rows(runs[0], tmp_path / "alone.parquet")
    assert pq.read_table(tmp_path / "one.parquet").equals(pq.read_table(tmp_path / "alone.parquet"))


def test_probabilities_that_round_to_0_or_1_keep_their_logit():
    logits_MBK = torch.tensor([[[-200.0], [300.0], [1.0]], [[-200.0], [300.0], [-1.0]]])
    assert mean_probability(logits_MBK)[:, 0].tolist() == pytest.approx([-200.0, 300.0, 0.0])


def test_seconds_are_those_of_each_model(runs):
    _, ensemble = load_ensemble(runs)
    assert isinstance(ensemble, Ensemble)
    assert ensemble.seconds == [0.0, 0.0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {"labels": ["bought"]}}, "differ in labels bought and label: expected runs with the same labels"),
        ({"columns": {"dense": [{"column": "d0"}]}}, "differ in column 'd1': expected runs that read the same columns"),
        (
            {"columns": {"dense": [{"column": "d1"}, {"column": "d0"}]}},
            "differ in the order of the columns: expected runs that read the same columns",
        ),
        (
            {"data": {"test_share": 0.1}},
            r"differ in their test rows, data.test_share=0.1 and 0.2: expected the same test rows",
        ),
    ],
)
def test_runs_that_do_not_fit_together(runs, tmp_path, changes, message):
    data = {"dataset": f"parquet:{runs[0].parents[2] / 'rows.parquet'}"}
    if "labels" in changes.get("columns", {}):
        write_rows(tmp_path / "rows.parquet", bought=lambda rows: rows["label"].combine_chunks())
        data = {}
    other, _ = trained(tmp_path, train={"epochs": 1}, **changes | {"data": data | changes.get("data", {})})
    for compare in (evaluate_ensemble, lambda paths: predict_ensemble(paths, tmp_path / "p.parquet")):
        with pytest.raises(SpecError, match=message):
            compare([runs[0], other.folder.path])
    if "data" in changes:
        rows = str(runs[0].parents[2] / "rows.parquet")
        assert evaluate_ensemble([runs[0], other.folder.path], data=rows).ensemble.tasks["label"]["count"] == 3000


def test_a_run_named_twice(runs):
    with pytest.raises(SpecError, match="run is named twice"):
        load_ensemble([runs[0], runs[1], runs[0]])
