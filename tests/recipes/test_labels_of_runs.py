"""Runs whose labels are words, several, missing or amounts: trained, measured, predicted, resumed and served alike."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq
from small import lines, recipe, same, saved, trained, write_rows

from rowwise import SpecError
from rowwise.base.errors import RowwiseError
from rowwise.cli.measure import _show_baseline
from rowwise.models.link import AmountLink
from rowwise.recipes.baseline import fit_trees
from rowwise.recipes.compose import resolve
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.trained import evaluate, predict_rows
from rowwise.train.amounts import AmountMetrics, amount_loss
from rowwise.train.loss_settings import Poisson, Squared
from rowwise.train.samples import Samples

NOISE = 400.0
AMOUNTS = {
    "price": lambda t: pa.array(3000 + 800 * effects(t) + np.random.default_rng(1).normal(0, NOISE, len(t))),
    "views": lambda t: pa.array(np.random.default_rng(2).poisson(np.exp(0.5 * effects(t) + 1))),
    "churn": lambda t: pa.array([None if k % 9 == 0 else "Yes" if y else "No" for k, y in enumerate(clicks(t))]),
    "none": lambda t: pa.array([0] * len(t), pa.int8()),
}
SHORT = {"epochs": 1, "batch": 64}


def effects(table):
    user, item = (np.sin(37.0 * table[name].to_numpy()) for name in ("user", "item"))
    return user + item + 0.5 * table["d0"].to_numpy()


def clicks(table):
    return table["label"].to_numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("labels")
    write_rows(place / "rows.parquet", 2000, **AMOUNTS)
    return place


def test_words_with_missing_ones(folder):
    run, result = trained(folder, columns={"labels": ["churn = Yes"]}, train=SHORT)
    table = pq.read_table(folder / "rows.parquet", columns=["churn"])
    measured = result.samples + result.test["churn"]["count"]
    assert 0 < measured < len(table) - table["churn"].null_count
    assert run.label_notes == ("223 of 2,000 rows have no label and are left out",)
    assert run.label_notes[0] in (run.folder.path / "warnings.txt").read_text()
    said = []
    scores = evaluate(run.folder.path, data=f"parquet:{folder / 'rows.parquet'}", warn=said.append)
    assert scores.tasks["churn"]["count"] == len(table) - table["churn"].null_count
    assert run.label_notes[0] in said
    out = folder / "churn.parquet"
    assert predict_rows(run.folder.path, out, data=f"parquet:{folder / 'rows.parquet'}") == len(table)
    assert pq.read_table(out).column_names == ["row", "churn_logit", "churn_probability"]


@pytest.mark.slow
def test_a_column_of_the_same_labels_is_trained_to_the_same_bits(folder):
    made = [
        trained(folder, columns={"labels": [text]}, train={**SHORT, "steps": 5})[0] for text in ("label", "label >= 1")
    ]
    one, other = (saved(run.folder.path) for run in made)
    assert same({k: v for k, v in one.items() if "model" in k}, {k: v for k, v in other.items() if "model" in k})


def test_a_test_share_of_one_label_ends_in_a_line(folder, command):
    changes = {"columns": {"labels": ["none"]}, "train": {**SHORT, "steps": 2}}
    run, _ = trained(folder, **changes)
    want = "the label 'none' is 0 in all "
    assert want in (run.folder.path / "warnings.txt").read_text()
    _, _, err = command("eval", str(run.folder.path))
    assert want in err


@pytest.mark.parametrize("kind", ["dlrm", "dcn", "mmoe", "ple", "wide_deep"])
@pytest.mark.few(1)
def test_several_labels(folder, kind):
    _, result = trained(
        folder, columns={"labels": ["label", "churn = Yes"]}, train={**SHORT, "steps": 3}, model={"kind": kind}
    )
    assert result.test.keys() == {"label", "churn"}


@pytest.fixture(scope="module")
def priced(folder):
    return trained(
        folder,
        columns={"labels": ["price"]},
        train={"objective": {"kind": "squared"}, "epochs": 1, "batch": 32},
        evaluate={"patience": 3},
    )


def test_a_price_in_the_thousands(folder, priced):
    run, result = priced
    test = result.test["price"]
    spread = pq.read_table(folder / "rows.parquet", columns=["price"])["price"].to_numpy().std()
    assert NOISE < test["rmse"] < 0.9 * spread
    assert test["calibration"] == pytest.approx(1, abs=0.05)
    assert result.best.metric == "rmse"
    facts = run.resolved.recipe.train.objective
    assert facts.mean[0] == pytest.approx(3000, rel=0.1)
    out = folder / "price.parquet"
    predict_rows(run.folder.path, out, data=f"parquet:{folder / 'rows.parquet'}")
    predicted = pq.read_table(out)
    outputs, amounts = (predicted[f"price_{name}"].to_numpy() for name in ("output", "amount"))
    np.testing.assert_allclose(amounts, facts.mean[0] + facts.scale[0] * outputs, rtol=1e-5)
    whole = evaluate(run.folder.path, data=f"parquet:{folder / 'rows.parquet'}").tasks["price"]
    label = pq.read_table(folder / "rows.parquet", columns=["price"])["price"].to_numpy()
    assert whole["rmse"] == pytest.approx(np.sqrt(((amounts - label) ** 2).mean()), rel=1e-4)
    assert whole["mae"] == pytest.approx(np.abs(amounts - label).mean(), rel=1e-4)
    assert whole["r2"] == pytest.approx(
        1 - ((amounts - label) ** 2).sum() / ((label - label.mean()) ** 2).sum(), rel=1e-4
    )


@pytest.mark.slow
def test_trees_learn_the_same_amounts(priced, capsys):
    trees = fit_trees(priced[0].folder.path)
    assert NOISE < trees.test["rmse"] < 1500
    _show_baseline(trees, priced[0].folder.path)
    assert " RMSE; trees took " in capsys.readouterr().out


@pytest.mark.slow
def test_counts(folder):
    train = {"objective": {"kind": "poisson"}, **SHORT}
    _, result = trained(folder, columns={"labels": ["views"]}, train=train)
    assert result.best.metric == "poisson_deviance"
    assert result.test["views"]["calibration"] == pytest.approx(1, abs=0.3)


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_the_whole_one(folder):
    changes = {"columns": {"labels": ["price", "views"]}, "train": {**SHORT, "objective": {"kind": "squared"}}}
    whole, _ = trained(folder, **changes)
    cut = TrainingRun.start(recipe(folder, **changes), folder / "cut")
    cut.trainer._on_step = lambda shown: cut.trainer.stop() if shown.progress.step == 7 else None
    assert cut.go().status == "stopped"
    resumed = TrainingRun.resume(cut.folder.path)
    resumed.go()
    assert same(saved(whole.folder.path), saved(resumed.folder.path))
    assert lines(whole.folder.path) == lines(resumed.folder.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"label_smoothing": 0.1}}, "train.label_smoothing: it mixes"),
        ({"evaluate": {"slices": ["user"]}}, "evaluate.slices: slices are measured by NE"),
        ({"model": {"kind": "mmoe", "chain": True}}, "model.chain: it multiplies"),
        ({"model": {"kind": "two_tower", "item": "item", "user_features": ["user"]}}, "ranks items: it learns"),
        ({"evaluate": {"metric": "auc"}}, "evaluate.metric='auc' is not measured"),
        ({"train": {"objective": {"kind": "squared", "scale": [0]}}}, "expected finite numbers above 0"),
        ({"train": {"objective": {"kind": "poisson"}}, "columns": {"labels": ["none"]}}, "all are 0"),
    ],
)
def test_pairs_that_make_no_sense(folder, changes, message):
    train = {"objective": {"kind": "squared"}} | changes.pop("train", {})
    with pytest.raises(RowwiseError, match=message):
        resolve(recipe(folder, **({"columns": {"labels": ["price"]}} | changes), train=train))


def test_metrics_of_parts_are_those_of_the_whole():
    loss = Poisson(mean=(2.0,))
    draw = np.random.default_rng(0)
    outputs, labels = torch.from_numpy(draw.normal(size=700)).float(), torch.from_numpy(draw.poisson(2, 700)).float()
    weights = torch.from_numpy(draw.integers(0, 3, 700)).float()

    def counted(*cuts):
        made = []
        for begin, end in zip((0, *cuts), (*cuts, 700), strict=True):
            one = AmountMetrics(("a",), 5, loss)
            one.add(Samples.of(outputs[begin:end], labels[begin:end], weights[begin:end], amounts=True))
            made.append(one)
        for other in made[1:]:
            made[0].merge_state(other.state())
        return made[0].value()["a"].all

    whole = counted()
    assert whole == counted(33, 100, 101) == counted(350)
    predicted = 2 * outputs.double().exp()
    y, w = labels.double(), weights.double()
    deviance = 2 * (torch.xlogy(y, y / predicted) - y + predicted)
    assert whole["poisson_deviance"] == pytest.approx(float((w * deviance).sum() / w.sum()))
    assert whole["rmse"] == pytest.approx(float(((w * (predicted - y) ** 2).sum() / w.sum()).sqrt()))
    assert whole["calibration"] == pytest.approx(float((w * predicted).sum() / (w * y).sum()))
    assert whole["count"] == int((w > 0).sum())


def test_losses_have_one_size_in_any_unit():
    outputs, labels = torch.tensor([[0.5], [-1.0]]), torch.tensor([[3.0], [1.0]])
    for unit in (1.0, 1000.0):
        squared = Squared(mean=(2 * unit,), scale=(unit,))
        assert amount_loss(squared, outputs, unit * labels).tolist() == [[0.25], [0.0]]
        poisson = amount_loss(Poisson(mean=(2 * unit,)), outputs, unit * labels)
        assert torch.allclose(poisson, outputs.exp() - labels / 2 * outputs)
    with pytest.raises(SpecError, match="1 labels, and 2"):
        AmountLink(kind="exp", offset=(0.0,), unit=(1.0,)).amounts(torch.zeros(3, 2))
