"""Options that would have no effect are refused in one line, and nothing is begun."""

import pytest
from small import trained

from rowwise import SpecError
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.trained import evaluate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrate", "--dim", "8"), "--dim 8 without --tables: expected --tables FILE, to whose tables it applies"),
        (("bench", "--quick"), "--quick without a benchmark: expected the name of one, or --all"),
        (
            ("train", "dlrm-synthetic", "--set", "data.test=nonsense"),
            "data.test='nonsense': expected parquet:PATH or csv:",
        ),
    ],
    ids=str,
)
def test_an_option_without_effect(command, tmp_path, arguments, message):
    code, _, err = command(*arguments)
    assert code == 2
    assert message in err
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
