"""Dropout, normalisation and label smoothing in recipes: stopped runs go on to the same bits, limits are named."""

import pytest
import torch
from small import recipe, same, saved
from torch.nn import functional as F

from rowwise import SpecError
from rowwise.recipes.compose import make_model, make_objective, resolve
from rowwise.recipes.recipe import check_ranks
from rowwise.recipes.resolved import make_batcher
from rowwise.recipes.runs import TrainingRun

MODELS = {
    "dlrm": {"bottom": [8], "top": [8]},
    "deepfm": {"deep": [8]},
    "dcn": {"deep": [8]},
    "wide_deep": {"deep": [8]},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(tmp_path, kind, norm):
    how = {"model": {"kind": kind, **MODELS[kind], "dropout": 0.3, "norm": norm}}
    steps = {"epochs": 2, "batch": 256}
    whole = TrainingRun.start(recipe(tmp_path, train=steps, **how), tmp_path / "runs")
    whole.go()
    cut = TrainingRun.start(recipe(tmp_path, train=steps | {"steps": 5}, **how), tmp_path / "runs")
    cut.go()
    TrainingRun.resume(cut.folder.path, ["train.steps=null"]).go()
    assert same(saved(whole.folder.path), saved(cut.folder.path))


def test_smoothed_labels_are_in_the_loss_and_not_in_the_logits(tmp_path):
    resolved = resolve(recipe(tmp_path, train={"label_smoothing": 0.2}))
    model = make_model(resolved)
    batch = next(iter(make_batcher(resolved, resolved.rows.train)))
    outcome = make_objective(resolved, model)(batch)
    labels = batch.labels_BK * 0.8 + 0.1
    assert outcome.logits_BK is not None
    torch.testing.assert_close(outcome.loss, F.binary_cross_entropy_with_logits(outcome.logits_BK, labels))


@pytest.mark.parametrize(
    ("world", "train", "message"),
    [
        (2, {}, "model.norm=batch on 2 ranks: statistics cover the samples of one rank: expected model.norm=layer"),
        (1, {"determinism": "elastic"}, "model.norm=batch with train.determinism=elastic"),
    ],
)
def test_batch_statistics_of_several_ranks_are_refused(tmp_path, world, train, message):
    made = recipe(tmp_path, model={"kind": "dlrm", "norm": "batch"}, train=train)
    with pytest.raises(SpecError, match=message):
        check_ranks(made, world)


def test_numbers_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(SpecError, match="least 0"):
        recipe(tmp_path, model={"kind": "dlrm", "dropout": 1.0})
    with pytest.raises(SpecError, match="least 0"):
        recipe(tmp_path, train={"label_smoothing": 1.5})
