"""What can be done with a run: train it to the end, measure it, predict with it, start from it, go on with it."""

import json
import math
from csv import DictReader
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv
from pyarrow import parquet as pq
from small import WORLD, lines, recipe, same, saved, trained, write_rows

from rowwise import CheckpointError, DataError, RowwiseError, SpecError
from rowwise.recipes.resolved import evaluation_batches
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.recipes.trained import evaluate, load_trained, predict_rows


def result_of(run):
    return json.loads((run.folder.path / "result.json").read_text())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run that was trained to its end."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("done")
    write_rows(folder / "rows.parquet", 4000)
    return trained(folder, train={"epochs": 3})


def test_a_run_learns_and_says_so(done):
    run, result = done
    assert result.status == "finished"
    assert result.test["label"]["auc"] > 0.7
    assert result.best.value < 0.95
    found = result_of(run)
    assert found["test"] == result.test
    assert found["epochs"] == 3
    rows = sum(len(batch.labels_BK) for batch in evaluation_batches(run.resolved, run.resolved.rows.train))
    assert found["samples"] == 3 * rows
    names = {path.name for path in run.folder.path.iterdir()}
    assert names >= {"recipe.yaml", "env.json", "plan.json", "result.json", "metrics.csv", "tables.csv", "log.txt"}
    assert names >= {"ckpt", "report.html"}


def test_evaluated_again_is_what_the_run_said(done):
    run, result = done
    assert evaluate(run.folder.path).tasks == result.test
    rows = str(run.resolved.recipe.data.dataset)
    assert evaluate(run.folder.path, data=rows).tasks["label"]["count"] == 4000
    sliced = evaluate(run.folder.path, slices=("user",)).slices
    assert {row.feature for row in sliced} == {"user"}
    assert sum(row.values["count"] for row in sliced) == result.test["label"]["count"]


def test_the_report_compares_predicted_with_observed_rates(done):
    """Without `rowwise explain`: by the evaluation of the test rows."""
    run, result = done
    with (run.folder.path / "reliability.csv").open() as file:
        groups = [{k: v if k == "task" else float(v) for k, v in row.items()} for row in DictReader(file)]
    assert [row["task"] for row in groups] == ["label"] * 10
    predicted = [row["predicted"] for row in groups]
    assert predicted == sorted(predicted)
    count = sum(row["count"] for row in groups)
    assert count == result.test["label"]["count"]
    sums = [sum(row["count"] * row[name] for row in groups) for name in ("predicted", "observed")]
    assert sums[1] / count == pytest.approx(result.test["label"]["base_rate"])
    assert sums[0] / sums[1] == pytest.approx(result.test["label"]["calibration"], rel=1e-3)
    assert 'id="reliability"' in (run.folder.path / "report.html").read_text()


def test_predictions_are_those_of_the_model(done, tmp_path):
    run, _ = done
    resolved, model = load_trained(run.folder.path)
    told = []
    count = predict_rows(run.folder.path, tmp_path / "p.parquet", tell=lambda done, of: told.append((done, of)))
    found = pq.read_table(tmp_path / "p.parquet")
    batches = list(evaluation_batches(resolved, resolved.rows.test))
    keys = torch.cat([batch.keys_B for batch in batches])
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch) for batch in batches])[:, 0]
    assert count == found.num_rows == len(keys)
    assert found.column_names == ["row", "label_logit", "label_probability"]
    assert found["row"].to_pylist() == keys.tolist() == sorted(keys.tolist())
    assert np.allclose(found["label_logit"], logits, atol=1e-6)
    assert np.allclose(found["label_probability"], logits.sigmoid(), atol=1e-6)
    assert told[-1] == (8, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.parquet"]


def test_rows_to_predict_for_need_no_labels(done, tmp_path):
    run, _ = done
    table = WORLD.rows(9000, 700).drop_columns(["label", "logit"])
    pq.write_table(table, tmp_path / "new.parquet", row_group_size=300)
    rows = predict_rows(run.folder.path, tmp_path / "p.parquet", data=str(tmp_path / "new.parquet"))
    found = pq.read_table(tmp_path / "p.parquet")
    assert rows == 700
    assert found["row"].to_pylist() == list(range(9000, 9700))
    pq.write_table(table.drop_columns(["row"]), tmp_path / "bare.parquet")
    predict_rows(run.folder.path, tmp_path / "q.parquet", data=f"parquet:{tmp_path / 'bare.parquet'}")
    bare = pq.read_table(tmp_path / "q.parquet")
    assert bare["row"].to_pylist() == list(range(700))  # rows without a key are numbered
    assert np.allclose(bare["label_logit"], found["label_logit"], atol=1e-6)


def test_a_prediction_does_not_depend_on_the_rows_beside_it(done, tmp_path):
    run, _ = done
    rows = pq.read_table(write_rows(tmp_path / "rows.parquet", 3000))
    predict_rows(run.folder.path, tmp_path / "p.parquet", data=str(tmp_path / "rows.parquet"))
    together = pq.read_table(tmp_path / "p.parquet")
    for begin, count in ((0, 1), (5, 2), (17, 3), (100, 7), (2999, 1), (1000, 333)):
        pq.write_table(rows.slice(begin, count), tmp_path / "some.parquet")
        predict_rows(run.folder.path, tmp_path / "q.parquet", data=str(tmp_path / "some.parquet"))
        assert pq.read_table(tmp_path / "q.parquet").equals(together.slice(begin, count))


def test_predictions_as_csv_beside_input_columns(done, tmp_path):
    run, _ = done
    pq.write_table(WORLD.rows(9000, 50), tmp_path / "new.parquet", row_group_size=30)
    data = str(tmp_path / "new.parquet")
    predict_rows(run.folder.path, tmp_path / "p.parquet", data=data, keep=("user", "seen"))
    whole = pq.read_table(tmp_path / "p.parquet")
    assert whole.column_names == ["row", "user", "seen", "label_logit", "label_probability"]
    assert whole.select(["user", "seen"]).equals(WORLD.rows(9000, 50).select(["user", "seen"]))
    predict_rows(run.folder.path, tmp_path / "p.csv", data=data, keep=("user", "row"))
    lines = csv.read_csv(tmp_path / "p.csv")
    assert lines.column_names == ["row", "user", "label_logit", "label_probability"]
    assert lines["user"].to_pylist() == whole["user"].to_pylist()
    assert np.allclose(lines["label_probability"], whole["label_probability"])
    with pytest.raises(RowwiseError, match="no column"):
        predict_rows(run.folder.path, tmp_path / "q.csv", data=data, keep=("nope",))
    assert not (tmp_path / "q.csv").exists()


KEPT = {  # columns of any type, and how CSV has their first value
    "day": (pa.array([date(2026, 1, 2)]), "2026-01-02"),
    "at": (pa.array([datetime(2026, 1, 2, 3, 4, 5)], pa.timestamp("ms")), "2026-01-02 03:04:05.000"),
    "price": (pa.array([Decimal("1.20")]), "1.20"),
    "kind": (pa.array(["new"]).dictionary_encode(), '"new"'),
    "bytes": (pa.array([b"a\xff"]), '"a\\xff"'),
    "tags": (pa.array([["x", "\u00e4"]]), '"[""x"", ""\u00e4""]"'),
    "places": (
        pa.array([[{"city": "Ulm", "on": date(2026, 1, 2)}]]),
        '"[{""city"": ""Ulm"", ""on"": ""2026-01-02""}]"',
    ),
    "none": (pa.nulls(1), ""),
    "yes, no": (pa.array([True]), "true"),
}


def test_predictions_keep_columns_of_any_type_in_order(done, tmp_path):
    run, _ = done
    table = WORLD.rows(9000, 2).drop_columns(["row"])
    for name, (values, _) in KEPT.items():
        table = table.append_column(name, pa.concat_arrays([values, pa.nulls(1, values.type)]))
    pq.write_table(table, tmp_path / "new.parquet", row_group_size=1)
    data = str(tmp_path / "new.parquet")
    predict_rows(run.folder.path, tmp_path / "p.parquet", data=data, keep=("all",))
    whole = pq.read_table(tmp_path / "p.parquet")
    assert whole.column_names == ["row", *table.column_names, "label_logit", "label_probability"]
    assert all(whole[name].to_pylist() == table[name].to_pylist() for name in table.column_names)
    names = [*reversed(KEPT)]
    predict_rows(run.folder.path, tmp_path / "p.csv", data=data, keep=names)
    head, first, second = (tmp_path / "p.csv").read_text("utf-8").splitlines()
    assert head == ",".join(f'"{name}"' for name in ("row", *names, "label_logit", "label_probability"))
    assert first.split(",", 1)[1].startswith(",".join(KEPT[name][1] for name in names) + ",")
    assert second.startswith("1" + "," * len(names))


@pytest.mark.slow
def test_keys_that_are_text(tmp_path):
    write_rows(tmp_path / "rows.parquet", name=lambda rows: pa.array([f"n{i}" for i in rows["row"].to_pylist()]))
    run, _ = trained(tmp_path, columns={"key": "name"}, train={"epochs": 1})
    predict_rows(run.folder.path, tmp_path / "p.parquet", data=str(tmp_path / "rows.parquet"))
    assert pq.read_table(tmp_path / "p.parquet")["name"].to_pylist() == [f"n{i}" for i in range(2000)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["user"]), "no column 'user'"),
        (
            lambda t: t.set_column(t.column_names.index("user"), "user", pa.array(["x"] * len(t))),
            "column 'user' holds str",
        ),
        (
            lambda t: t.set_column(t.column_names.index("user"), "user", pa.array([50] * len(t))),
            "row 0, column 'user': id 50",
        ),
        (lambda t: t.slice(0, 0), "no rows to predict for"),
    ],
)
def test_rows_that_cannot_be_predicted_for(done, tmp_path, change, message):
    pq.write_table(change(WORLD.rows(0, 20)), tmp_path / "new.parquet")
    with pytest.raises(DataError, match=message):
        predict_rows(done[0].folder.path, tmp_path / "p.parquet", data=str(tmp_path / "new.parquet"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.parquet"]


def test_a_file_that_cannot_be_written_is_named(done, tmp_path):
    with pytest.raises(SpecError, match=r"no/p.parquet: expected the name of a file in an existing folder"):
        predict_rows(done[0].folder.path, tmp_path / "no" / "p.parquet")
    with pytest.raises(OSError, match=r"/proc/p.csv.part") as met:
        predict_rows(done[0].folder.path, Path("/proc/p.csv"))
    assert met.value.filename == "/proc/p.csv.part"  # pyarrow's error has none, and was a traceback


def test_a_run_without_test_rows(tmp_path):
    run, result = trained(tmp_path, data={"test_share": 0.0}, train={"epochs": 1})
    assert result.test == {}
    assert "no test rows" in (run.folder.path / "warnings.txt").read_text()
    with pytest.raises(DataError, match="recipe has no test"):
        evaluate(run.folder.path)
    with pytest.raises(DataError, match="recipe has no test"):
        predict_rows(run.folder.path, tmp_path / "p.parquet")


@pytest.mark.slow
def test_several_labels(tmp_path):
    write_rows(tmp_path / "rows.parquet", bought=lambda rows: pa.array(rows["user"].to_numpy() % 2))
    run, result = trained(
        tmp_path,
        columns={"labels": ["label", "bought"]},
        train={"task_weights": [1.0, 0.5]},
        evaluate={"task": "bought", "metric": "auc"},
    )
    assert result.test.keys() == {"label", "bought"}
    assert result.test["bought"]["auc"] > 0.9
    assert (result.best.task, result.best.metric) == ("bought", "auc")
    assert evaluate(run.folder.path).tasks == result.test
    predict_rows(run.folder.path, tmp_path / "p.parquet")
    names = pq.read_schema(tmp_path / "p.parquet").names
    assert names == ["row", "label_logit", "label_probability", "bought_logit", "bought_probability"]


@pytest.mark.slow
def test_sample_weights(tmp_path):
    """Rows of weight 0 teach nothing and count nothing."""
    odd = lambda rows: rows["row"].to_numpy() % 2 == 1  # noqa: E731
    write_rows(
        tmp_path / "rows.parquet",
        weight=lambda rows: pa.array(np.where(odd(rows), 0.0, 2.0)),
        label=lambda rows: pa.array(np.where(odd(rows), 1, 0)),
    )
    run, result = trained(tmp_path, columns={"weight": "weight"})
    weighted = result.test["label"]
    assert weighted["base_rate"] == 0
    assert weighted["loss"] < 0.1
    predict_rows(run.folder.path, tmp_path / "p.parquet")
    assert np.mean(pq.read_table(tmp_path / "p.parquet")["label_probability"]) < 0.1


@pytest.mark.slow
def test_early_stopping_and_the_best_checkpoint(tmp_path):
    run, result = trained(
        tmp_path,
        train={"epochs": 30, "optimizer": {"kind": "adam", "lr": 0.05}},
        evaluate={"patience": 2},
        save={"every": 2, "keep": 1},
    )
    assert result.status == "finished"
    assert result.epochs < 30
    folder = run.folder.path
    steps = sorted(int(path.name.removeprefix("step-")) for path in (folder / "ckpt").iterdir())
    assert steps == [result.best.step, result.steps]
    values = [float(x[-1]) for x in lines(run.folder.path) if x[2] == "valid" and x[4] == "ne"]
    assert min(values) == values[-3] == result.best.value
    # What was tested is the best one, not the last.
    assert evaluate(folder, which="best").tasks == result.test
    assert evaluate(folder, which="last").tasks != result.test


@pytest.mark.slow
def test_the_best_is_known_if_a_checkpoint_falls_on_the_last_step(tmp_path):
    run, result = trained(tmp_path, train={"epochs": 4, "optimizer": {"kind": "adam", "lr": 0.2}}, save={"every": 1})
    folder = run.folder.path
    assert result.best.step < result.steps
    assert evaluate(folder).tasks == result.test
    with pytest.raises(DataError, match=f"has finished at step {result.steps}; --set train.epochs=5"):
        TrainingRun.resume(folder)


@pytest.mark.slow
def test_a_finished_run_goes_on_if_it_is_given_more_to_do(tmp_path):
    run, result = trained(tmp_path, train={"epochs": 1})
    folder = run.folder.path
    before = result_of(run)
    with pytest.raises(DataError, match=r"--set train\.epochs=2"):
        TrainingRun.resume(folder)
    assert json.loads((folder / "result.json").read_text()) == before
    again = TrainingRun.resume(folder, ["train.epochs=2"]).go()
    assert (again.epochs, again.steps) == (2, 2 * result.steps)
    whole, _ = trained(tmp_path, train={"epochs": 2})
    assert same(saved(folder), saved(whole.folder.path))


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_result_is_tested(tmp_path):
    run, result = trained(tmp_path)
    folder = run.folder.path
    (folder / "result.json").unlink()
    again = TrainingRun.resume(folder)
    assert again.go().test == result.test
    assert len([x for x in lines(folder) if x[2] == "test" and x[4] == "ne"]) == 1


@pytest.mark.slow
def test_going_on_from_an_earlier_checkpoint_replaces_the_later(tmp_path):
    run, result = trained(tmp_path, save={"every": 5, "keep": 9}, data={"valid_share": 0.0})
    folder = run.folder.path
    again = TrainingRun.resume(folder, ["train.optimizer.lr=0.001"], which="step-000000005")
    assert again.trainer.progress.step == 5
    second = again.go()
    assert second.steps == result.steps
    assert second.test != result.test
    assert evaluate(folder, which="last").tasks == second.test


def test_a_warm_start_says_what_it_took(done, tmp_path):
    first, _ = done
    write_rows(tmp_path / "rows.parquet", shop=lambda rows: pa.array(rows["user"].to_numpy() % 7))
    tables = [
        {"name": "user", "rows": 60, "dim": 8, "pooling": "mean"},  # grown
        {"name": "item", "rows": 30, "dim": 8, "pooling": "mean"},
        {"name": "seen", "rows": 20, "dim": 8, "pooling": "mean"},
        {"name": "shop", "rows": 7, "dim": 8},  # new
    ]
    sparse = [{"column": name, "ids": "direct"} for name in ("user", "item", "seen", "shop")]
    run = TrainingRun.start(
        recipe(
            tmp_path,
            columns={"sparse": sparse},
            tables={"list": tables},
            model={"kind": "dlrm", "bottom": [8], "top": [16]},  # another head
            init_from=str(first.folder.path),
        ),
        tmp_path / "runs",
    )
    match = run.match
    assert match.grown["model/embeddings.user"] == "50 of 60 rows, 50 saved"
    assert "model/embeddings.item" in match.loaded
    assert "model/bottom.layers.0.weight" in match.loaded
    assert "model/embeddings.shop" in match.new
    assert "model/top.layers.0.weight" in match.skipped
    best = saved(first.folder.path, f"step-{first.trainer.progress.best.step:09}")
    assert torch.equal(run.model.embeddings.table("user")[:50], best["model/embeddings.user[0:50]"])
    assert not torch.equal(run.model.embeddings.table("user")[50:], best["model/embeddings.user[0:50]"][:10])
    log = (run.folder.path / "log.txt").read_text()
    assert "new: model/embeddings.shop" in log
    assert "grown: model/embeddings.user: 50 of 60 rows, 50 saved" in log
    assert run.go().status == "finished"


@pytest.mark.slow
def test_a_warm_start_from_a_checkpoint_is_better_than_none(done, tmp_path):
    first, _ = done
    write_rows(tmp_path / "rows.parquet", 600, first=8000)
    train = {"epochs": 1, "optimizer": {"kind": "adam", "lr": 0.001}}
    _, cold = trained(tmp_path, train=train)
    run, warm = trained(tmp_path, train=train, init_from=str(sorted((first.folder.path / "ckpt").iterdir())[-1]))
    assert warm.test["label"]["auc"] > cold.test["label"]["auc"] + 0.05
    assert run.match.skipped == {}


def test_a_failed_run_says_so(tmp_path):
    write_rows(tmp_path / "rows.parquet", label=lambda rows: pa.array([0, 1] * 500 + [2] * 9 + [0, 1] * 495 + [0]))
    run = TrainingRun.start(recipe(tmp_path), tmp_path / "runs")
    with pytest.raises(DataError, match=r"100\d, column 'label': 2"):
        run.go()
    found = result_of(run)
    assert found["status"] == "failed"
    assert "column 'label'" in found["message"]
    assert not (run.folder.path / "ckpt").exists()
    assert "failed at step" in (run.folder.path / "log.txt").read_text()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        evaluate(run.folder.path)


@pytest.mark.slow
def test_two_processes_cannot_have_one_run(tmp_path):
    run = TrainingRun.start(recipe(tmp_path), tmp_path / "runs")
    with pytest.raises(DataError, match="another process is working"):
        TrainingRun.resume(run.folder.path)
    run.go()
    assert TrainingRun.resume(run.folder.path, ["train.epochs=3"]).go().epochs == 3


def test_what_cannot_begin_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        SpecError, match=r"log\.tensorboard=true: tensorboard is not installed; pip install tensorboard"
    ):
        TrainingRun.start(recipe(tmp_path, log={"tensorboard": True}), tmp_path / "runs")
    assert list((tmp_path / "runs" / "small").iterdir()) == []


def test_what_is_no_run(tmp_path):
    for verb in (TrainingRun.resume, evaluate, load_trained, lambda path: predict_rows(path, tmp_path / "p.parquet")):
        with pytest.raises(DataError, match="folder such as runs/"):
            verb(tmp_path)


@pytest.mark.slow
def test_the_best_possible_is_told_of_made_up_rows(tmp_path):
    data = {"dataset": "synthetic", "rows": 2000, "test_rows": 3000}
    plain = {
        "name": "made",
        "data": data,
        "train": {"threads": 1, "steps": 2},
        "model": {"kind": "dlrm", "bottom": [8]},
    }
    result = TrainingRun.start(decode(plain, ""), tmp_path).go()
    assert 0.75 < result.ceiling["label"]["auc"] < 0.9
    assert result.test["label"]["auc"] < result.ceiling["label"]["auc"]
    assert all(math.isfinite(value) for value in result.ceiling["label"].values())


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_with_the_way_back_to_the_one_before(tmp_path):
    write_rows(tmp_path / "rows.parquet", 2000)
    run, _ = trained(tmp_path, train={"epochs": 3}, save={"keep": 3})
    newest = max((run.folder.path / "ckpt").glob("step-*"))
    file = next(newest.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"resume .* --from step-\d{9}") as met:
        TrainingRun.resume(run.folder.path, ["train.epochs=4"])
    older = str(met.value).partition("--from ")[2].split()[0]
    assert TrainingRun.resume(run.folder.path, ["train.epochs=4"], which=older).go().status == "finished"
