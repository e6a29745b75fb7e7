"""Options that would have no effect are refused in one line, and nothing is begun."""

import pytest
from small import trained

from rowwise import SpecError
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.trained import evaluate


def test_a_dataset_that_is_none(refused, tmp_path):
    line = refused("train", "dlrm-synthetic", "--set", "data.test=nonsense")
    assert "data.test='nonsense': expected parquet:PATH or csv:" in line
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_takes_no_other_weights(tmp_path):
    run, _ = trained(tmp_path, train={"epochs": 1})
    with pytest.raises(SpecError, match="run that is resumed"):
        TrainingRun.resume(run.folder.path, ["init_from=x", "train.epochs=2"])


def test_slices_of_two_towers(tmp_path):
    towers = {"kind": "two_tower", "item": "item", "user_features": ["user"]}
    run, _ = trained(tmp_path, model=towers, train={"epochs": 1}, evaluate={"metric": "recall@10"})
    with pytest.raises(SpecError, match=r"model.kind=two_tower"):
        evaluate(run.folder.path, slices=("user",))
