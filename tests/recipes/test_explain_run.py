"""What a model has learned from: planted features come in order, and a useless one is within noise of none."""

import dataclasses
import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from small import trained
from torch import nn

from rowwise import Batch, Jagged, SpecError
from rowwise.base.errors import DataError
from rowwise.recipes.explain import explain
from rowwise.recipes.explain.drift import measure_drift
from rowwise.recipes.explain.importance import Permutations, Permuted, Scorer, dependence, id_effects, permute_features
from rowwise.recipes.explain.rows import HeldRows, pieces
from rowwise.recipes.explain.slices import calibration_slices
from rowwise.report.explanation import draw_explanation
from rowwise.report.read import read_run
from rowwise.train.settings import Training

ROWS, IDS = 12_000, 12
EFFECTS = {"strong": 1.5, "weak": 0.5, "useless": 0.0}  # on the logit: the standard deviation over a feature's ids
ADAGRAD = {"kind": "rowwise_adagrad", "lr": 0.1}


def make_rows(path: Path, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Clicks by ids with known effects; returns the effect of each id."""
    draw = np.random.default_rng(3)
    effects = {name: draw.normal(size=IDS) * size for name, size in EFFECTS.items()}
    ids = {name: draw.integers(0, IDS, rows) for name in EFFECTS}
    x = draw.normal(size=rows)
    logit = sum(effects[name][ids[name]] for name in EFFECTS) + 0.8 * x
    label = (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    parquet.write_table(pa.table({"label": label, **ids, "x": x, "noise": draw.normal(size=rows)}), path)
    return effects


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    effects = make_rows(folder / "rows.parquet")
    made, _ = trained(
        folder,
        data={"valid_share": 0.1, "test_share": 0.3},
        train={"epochs": 3, "batch": 128},
        columns={
            "sparse": [{"column": name, "ids": "direct"} for name in EFFECTS],
            "dense": [{"column": "x"}, {"column": "noise"}],
            "key": None,
        },
        tables={"list": [{"name": name, "rows": IDS, "dim": 8, "optimizer": ADAGRAD} for name in EFFECTS]},
    )
    return made.folder.path, effects


def test_planted_features_come_in_order_and_a_useless_one_is_noise(planted):
    run, effects = planted
    told = []
    found = explain(run, repeats=4, seconds=600, tell=lambda done, total: told.append((done, total)))
    by_name = {one.feature: one for one in found.importance}
    assert [one.feature for one in found.importance][:3] == ["strong", "x", "weak"]
    for name in ("useless", "noise"):
        assert abs(by_name[name].loss) < 0.1 * by_name["weak"].loss
    assert told[-1] == (20, 20)
    strongest = {one.id: one.logit for one in found.ids if one.feature == "strong"}
    centred = effects["strong"] - effects["strong"].mean()
    assert np.corrcoef([centred[i] for i in strongest], list(strongest.values()))[0, 1] > 0.9
    rising = next(one for one in found.dependence if one.feature == "x").probability
    assert rising[-2] - rising[1] > 0.2
    assert all(abs(one.index - one.chance) < 5 * one.chance for one in found.drift), "rows of one distribution"
    assert json.loads((run / "explanation.json").read_text()) == json.loads(msgspec.json.encode(found))
    page = (run / "report.html").read_text("utf-8")
    assert "What the model has learned from" in page
    assert "Strongest ids" in page


def test_the_command_prints_it(planted, command):
    run, _ = planted
    code, out, err = command("explain", str(run), "--rows", "600", "--repeats", "2")
    assert (code, err) == (0, "")
    assert "log loss without it" in out
    assert f"600 rows, 2 repeats; all results are in {run}/report.html" in out


def test_the_command_prints_json_and_the_same_for_the_same_run(planted, command):
    run, _ = planted
    _, out, _ = command("explain", str(run), "--rows", "600", "--repeats", "2", "--json")
    assert json.loads(out) == json.loads(msgspec.json.encode(explain(run, rows=600, repeats=2)))


@pytest.mark.slow
def test_little_time_is_kept_to(planted):
    found = explain(planted[0], repeats=1_000_000, seconds=1.0)
    assert 1 <= found.repeats < 1_000_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "sale"}, "label 'sale': expected one of label"),
        ({"data": "parquet:nowhere.parquet"}, "nowhere.parquet"),
        ({"which": "step-7"}, "step-7"),
    ],
)
def test_what_is_wrong_is_named(planted, options, message):
    with pytest.raises((SpecError, DataError, OSError), match=message):
        explain(planted[0], **options)


@pytest.mark.slow
def test_a_column_of_ids_and_numbers_is_two_features(tmp_path):
    columns = {"sparse": [{"column": "item", "ids": "direct"}], "dense": [{"column": "item"}, {"column": "d0"}]}
    tables = {"list": [{"name": "item", "rows": 30, "dim": 4}]}
    run, _ = trained(tmp_path, columns=columns, tables=tables, train={"epochs": 1})
    found = explain(run.folder.path, repeats=2, seconds=60)
    names = {"item", "item as a number", "d0"}
    assert {entry.feature for entry in found.importance} == {entry.feature for entry in found.drift} == names
    assert {entry.repeats for entry in found.importance} == {2}
    assert {part.feature for part in found.calibration if " to " in part.value} == {"item as a number", "d0"}


def test_a_two_tower_model_is_refused(tmp_path):
    made, _ = trained(
        tmp_path,
        model={"kind": "two_tower", "item": "item", "user_features": ["user"], "sizes": [8]},
        evaluate={"metric": "recall@10"},
        columns={"sparse": [{"column": name, "ids": "direct"} for name in ("user", "item")], "dense": []},
    )
    with pytest.raises(SpecError, match="loss of a row"):
        explain(made.folder.path)


def test_a_run_that_was_not_explained_has_no_section(planted):
    assert draw_explanation(dataclasses.replace(read_run(planted[0]), explanation=None)) == ""


def held(lists, dense=None, labels=None):
    sparse = Jagged.from_lists(lists)
    rows = sparse.batch_size
    dense = torch.zeros(rows, 1) if dense is None else dense
    labels = torch.zeros(rows, 1) if labels is None else labels
    return HeldRows(Batch(dense_BF=dense, sparse=sparse, labels_BK=labels))


def lists_of(sparse):
    bags, rows = [bag.tolist() for bag in sparse.values_N.split(sparse.lengths_FB.tolist())], sparse.batch_size
    return {name: bags[k * rows : (k + 1) * rows] for k, name in enumerate(sparse.features)}


BAGS = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8)


@given(bags=BAGS, data=st.data())
def test_a_feature_takes_its_bags_from_other_rows_and_the_others_stay(bags, data):
    rows = len(bags)
    others = [[n] for n in range(rows)]
    order = data.draw(st.permutations(range(rows)))
    batch = held({"a": bags, "b": others}).with_bags_of("a", torch.tensor(order))
    assert lists_of(batch.sparse) == {"a": [bags[i] for i in order], "b": others}


@given(bags=BAGS, size=st.integers(1, 9))
def test_pieces_have_all_rows_in_order(bags, size):
    rows = held({"a": bags}, dense=torch.arange(len(bags)).float().unsqueeze(1))
    cut = list(pieces(rows.batch, size))
    assert [b for piece in cut for b in lists_of(piece.sparse)["a"]] == bags
    assert torch.cat([piece.dense_BF for piece in cut]).flatten().tolist() == list(range(len(bags)))
    assert all(len(piece.labels_BK) <= size for piece in cut)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), most=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_sample_has_rows_once_and_not_too_many(sizes, most, seed):
    ends = np.cumsum([0, *sizes])
    batches = [held({"a": [[int(n)] for n in range(a, b)]}).batch for a, b in itertools.pairwise(ends)]
    ids = HeldRows.sample(batches, most, seed, 60).batch.sparse.values_N.tolist()
    assert len(ids) == len(set(ids)) == min(most, sum(sizes))
    assert set(ids) <= set(range(sum(sizes)))


def test_a_sample_is_of_all_rows_alike():
    batches = [held({"a": [[n] for n in range(k * 10, k * 10 + 10)]}).batch for k in range(10)]
    counts = np.zeros(100)
    for seed in range(300):
        counts[HeldRows.sample(batches, 20, seed, 60).batch.sparse.values_N] += 1
    assert abs(counts[:50].sum() - counts[50:].sum()) < 400  # of 6,000; five standard deviations
    assert counts.min() > 25


def test_no_rows_are_an_error():
    with pytest.raises(DataError, match="rows to explain"):
        HeldRows.sample([], 5, 0, 60)


class ById(nn.Module):
    """The logit is a number of the id of one feature, plus the dense number."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, batch):
        return (self.logits[batch.sparse.values_N[: len(batch.labels_BK)]] + batch.dense_BF[:, 0]).unsqueeze(1)


def test_the_effect_of_an_id_is_its_logit_less_that_of_the_others():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 3, (6000,), generator=draw)
    rows = held({"a": [[n] for n in ids.tolist()]})
    scorer = Scorer(model=ById([0.0, 2.0, -2.0]), task=0, batch=512, training=Training())
    times = Permutations(3, 1e18, 1)
    found = permute_features(scorer, rows, scorer.logits(rows.batch), [("a", None)], times, lambda done, total: None)
    effects = {one.id: one for one in id_effects(rows, found, ["a"], 5)}
    shares = torch.bincount(ids).double() / len(ids)
    mean = float((shares * torch.tensor([0.0, 2.0, -2.0])).sum())
    for one, logit in ((1, 2.0), (2, -2.0)):
        assert effects[one].logit == pytest.approx(logit - mean, abs=5 * effects[one].error)
        assert effects[one].rows == int((ids == one).sum())


def test_without_changes_there_are_no_effects():
    assert id_effects(held({"a": [[1]]}), {"a": Permuted()}, ["a"], 5) == []


def test_dependence_is_the_mean_with_one_value_in_all_rows():
    numbers = torch.linspace(-1, 1, 101).unsqueeze(1)
    rows = held({"a": [[n % 2] for n in range(101)]}, dense=numbers)
    scorer = Scorer(model=ById([0.0, 1.0]), task=0, batch=10, training=Training())
    found = dependence(scorer, rows, "x", 0)
    ids = torch.arange(101) % 2
    for value, probability in zip(found.values, found.probability, strict=True):
        assert probability == pytest.approx(float((ids + value).double().sigmoid().mean()), rel=1e-6)
    assert (found.values[0], found.values[-1]) == (-1.0, 1.0)


def test_a_slice_off_its_labels_is_found_first():
    draw = torch.Generator().manual_seed(2)
    ids, p = torch.randint(0, 4, (4000,), generator=draw), torch.full((4000,), 0.3)
    real = torch.where(ids == 2, 0.5, p)
    labels = (torch.rand(4000, generator=draw) < real).float().unsqueeze(1)
    rows = held({"a": [[n] for n in ids.tolist()]}, labels=labels, dense=torch.rand(4000, 1, generator=draw))
    found = calibration_slices(rows, p.logit(), 0, ("a",), {"x": 0})
    assert (found[0].feature, found[0].value) == ("a", "2")
    assert found[0].predicted == pytest.approx(0.3)
    assert found[0].observed == pytest.approx(float(labels[ids == 2].mean()))
    assert found[0].deviations > 10
    assert sum(one.rows for one in found if one.feature == "x") == 4000


@pytest.mark.parametrize("moved", [False, True])
def test_drift_is_chance_for_the_same_rows_and_more_for_others(moved):
    draw = np.random.default_rng(4)

    def rows(shift):
        ids = draw.choice(30, 3000, p=np.roll(np.arange(1, 31) / 465, shift))
        dense = torch.tensor(draw.normal(size=(3000, 1)) + shift / 5).float()
        return held({"a": [[int(n)] for n in ids]}, dense=dense)

    for one in measure_drift(rows(0), rows(5 if moved else 0), ("a",), {"x": 0}):
        assert (one.index > 10 * one.chance) == moved
        assert moved or one.index < 3 * one.chance
