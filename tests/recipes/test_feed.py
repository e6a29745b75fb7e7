"""Runs whose rows workers prepare: the same bits, also after a kill; filters and bad rows in a whole run."""

import os
import signal
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
from launching import ELASTIC, is_there, ranks_of, rowwise, started, wait_for, wait_for_step, write_recipe
from pyarrow import parquet as pq
from small import WORLD, lines, recipe, same, saved, sections, tensors, trained, write_rows

from rowwise import DataError, SpecError, StateError
from rowwise.ingest.quarantine import count_quarantined
from rowwise.recipes.compose import make_evaluator
from rowwise.recipes.resolved import evaluation_batches
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.recipes.trained import evaluate, load_trained, predict_rows


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run, _ = trained(folder, train={"epochs": 2})
    return run.folder.path


@pytest.mark.dist
@pytest.mark.parametrize("workers", [1, {"count": 3, "ahead": 1}])
def test_workers_change_no_bit(alone, tmp_path, workers):
    run, result = trained(tmp_path, data={"workers": workers}, train={"ahead": 2})
    assert result.status == "finished"
    assert same(saved(run.folder.path), saved(alone))
    assert lines(run.folder.path) == lines(alone)


@pytest.mark.dist
def test_a_run_goes_on_with_and_without_workers(alone, tmp_path):
    run = TrainingRun.start(recipe(tmp_path, train={"steps": 5}, data={"workers": 2}), tmp_path / "runs")
    run.go()
    path = run.folder.path
    TrainingRun.resume(path, ["train.steps=11", "data.workers=null"]).go()
    TrainingRun.resume(path, ["train.steps=null", "data.workers=3"]).go()
    assert same(saved(path), saved(alone))


@pytest.mark.slow
@pytest.mark.dist
def test_killed_runs_go_on_with_other_workers_and_ranks(tmp_path):
    steps = {
        "train": ELASTIC | {"epochs": 12},
        "evaluate": {"patience": None},
        "save": {"every": 1, "keep": 99},
        "log": {"every": 1},
    }
    write_recipe(tmp_path / "whole", 6000, **steps)
    assert rowwise(tmp_path / "whole", "train", "small.yaml").returncode == 0
    whole = tmp_path / "whole/runs/small/1"
    write_recipe(tmp_path / "killed", 6000, **steps)
    run = tmp_path / "killed/runs/small/1"
    lives = [
        ("train", "small.yaml", "--nproc", "2", "--set", "data.workers=3"),
        ("resume", "runs/small/1", "--set", "data.workers=1"),
        ("resume", "runs/small/1", "--nproc", "2", "--set", "data.workers=null"),
    ]
    for life, command in enumerate(lives):
        with started(tmp_path / "killed", *command) as process:
            # Alone, a rank is the command's own process.
            pids = ranks_of(run, life // 2) if "--nproc" in command else [process.pid]
            wait_for_step(run, 8 * (life + 1))
            for pid in {*pids, process.pid}:
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda pids=pids: not any(map(is_there, pids)))
    done = rowwise(tmp_path / "killed", "resume", "runs/small/1", "--nproc", "2", "--set", "data.workers=2")
    assert done.returncode == 0, done.stderr
    assert same(tensors(run), tensors(whole))


def test_filters_and_sampling(tmp_path):
    write_rows(tmp_path / "rows.parquet", day=lambda rows: pa.array(np.arange(len(rows)) // 400))
    changes = {
        "data": {"where": ["day >= 1"], "together": "user"},
        "transforms": [{"kind": "sampling", "rate": 0.5, "column": "label", "value": 0}],
    }
    run, result = trained(tmp_path, train={"epochs": 1}, **changes)
    parts = run.resolved.rows
    of = {
        name: [k for batch in evaluation_batches(run.resolved, rows) for k in batch.keys_B.tolist()]
        for name, rows in (("train", parts.train), ("valid", parts.valid), ("test", parts.test))
    }
    # Sampling is of training alone; the filter is of all.
    assert sorted(chain(*of.values())) == list(range(400, 2000))
    assert result.samples < len(of["train"])
    assert result.test["label"]["count"] == len(of["test"])
    predict_rows(run.folder.path, tmp_path / "p.parquet")
    assert pq.read_table(tmp_path / "p.parquet")["row"].to_pylist() == of["test"]
    rows = str(tmp_path / "rows.parquet")
    assert predict_rows(run.folder.path, tmp_path / "p.parquet", data=rows) == 2000
    assert pq.read_table(tmp_path / "p.parquet")["row"].to_pylist() == list(range(2000))
    for change in ("data.where=[day >= 2]", "data.together=null", "transforms=[]"):
        with pytest.raises(StateError, match="other files, splits, filters"):
            TrainingRun.resume(run.folder.path, [change, "train.epochs=3"])


def spoil(table):
    """Some rows of each kind."""
    found = {name: table[name].to_pylist() for name in table.column_names}
    for name, cells in {"label": {11: 3, 12: None, 600: 2}, "d0": {900: float("inf")}, "user": {1700: 50}}.items():
        for row, cell in cells.items():
            found[name][row] = cell
    return pa.table(found, schema=table.schema)


BAD, UNLABELLED = {11, 600, 900, 1700}, {12}
GONE = BAD | UNLABELLED


@pytest.fixture
def spoiled(tmp_path):
    table = WORLD.rows(0, 2000).drop_columns(["logit"])
    pq.write_table(spoil(table), tmp_path / "rows.parquet", row_group_size=500, write_page_checksum=True)
    return tmp_path


@pytest.mark.dist
@pytest.mark.parametrize("workers", [None, 2])
def test_a_run_puts_bad_rows_aside(spoiled, workers):
    data = {"on_bad_rows": "quarantine", "workers": workers}
    run = TrainingRun.start(recipe(spoiled, data=data, train={"steps": 5}), spoiled / "runs")
    run.go()
    path = run.folder.path
    result = TrainingRun.resume(path, ["train.steps=null"]).go()
    assert result.status == "finished"
    assert count_quarantined(path / "bad_rows") == (len(BAD), ())
    tables = [pq.read_table(file) for file in (path / "bad_rows").glob("*.parquet")]
    rows = {row["row"]: row for table in tables for row in table.to_pylist()}
    assert rows.keys() == BAD
    assert all(row["_place"].endswith(f"rows.parquet: row {key}") and row["_reason"] for key, row in rows.items())
    counts = [
        len(list(batch.keys_B))
        for p in ("train", "valid", "test")
        for batch in evaluation_batches(run.resolved, getattr(run.resolved.rows, p))
    ]
    assert sum(counts) == 2000 - len(GONE)
    assert evaluate(path).tasks == result.test


def test_bad_rows_of_files_to_test_on(spoiled):
    write_rows(spoiled / "good.parquet", 1000)
    data = {"dataset": f"parquet:{spoiled / 'good.parquet'}", "test": f"parquet:{spoiled / 'rows.parquet'}"}
    run, result = trained(spoiled, data=data | {"on_bad_rows": "quarantine"}, train={"epochs": 1})
    assert result.test["label"]["count"] == 2000 - len(GONE)
    resolved, model = load_trained(run.folder.path)
    evaluator = make_evaluator(resolved, model, resolved.rows.test, quarantine=lambda: spoiled / "aside")
    assert evaluator().tasks == result.test
    assert count_quarantined(spoiled / "aside").rows == len(BAD)
    with pytest.raises(DataError, match="row 900, column 'd0'"):
        predict_rows(run.folder.path, spoiled / "p.parquet")  # each row that is asked for wants an answer


@pytest.mark.dist
@pytest.mark.parametrize("workers", [None, 1])
def test_a_run_ends_at_a_bad_row_and_goes_on_without(spoiled, workers):
    made = recipe(spoiled, data={"workers": workers}, save={"every": 1})
    run = TrainingRun.start(made, spoiled / "runs")
    with pytest.raises(DataError, match=r"\d+, column '.*': .*"):
        run.go()
    result = TrainingRun.resume(run.folder.path, ["data.on_bad_rows=quarantine"]).go()
    assert result.status == "finished"
    assert count_quarantined(run.folder.path / "bad_rows").rows == len(BAD)


WRONG = [
    ({"where": ["dai >= 2"]}, DataError, "no column 'dai'"),
    (
        {"where": ["user >= x"]},
        DataError,
        "where: column 'user' holds int.*, but is compared with 'x': expected a whole",
    ),
    ({"where": ["user ~ 3"]}, SpecError, "where: 'user ~ 3': expected 'column op value'"),
    ({"together": "usr"}, DataError, "no column 'usr'; did you mean 'user'"),
    ({"together": "seen"}, DataError, "together: column 'seen' holds list"),
    ({"workers": {"count": 0}}, SpecError, "data.workers.count=0: expected at least 1"),
    ({"workers": {"ahead": -1}}, SpecError, "data.workers.ahead=-1: expected at least 1"),
    ({"workers": -1}, SpecError, "data.workers.count=-1: expected at least 1"),
    ({"workers": {"cnt": 1}}, SpecError, "no key 'cnt' in data.workers; did you mean 'count'"),
    ({"workers": {"on": "moon"}}, SpecError, "Invalid enum value 'moon' - at `data.workers.on`"),
    ({"workers": "many"}, SpecError, "data.workers"),
    ({"on_bad_rows": "skip"}, SpecError, "Invalid enum value 'skip' - at `data.on_bad_rows`"),
]


@pytest.mark.parametrize(("data", "kind", "message"), WRONG)
def test_what_cannot_be_is_said_in_one_line(tmp_path, data, kind, message):
    write_rows(tmp_path / "rows.parquet", 200)
    with pytest.raises(kind, match=message) as told:
        TrainingRun.start(decode(sections(tmp_path, data=data), "small.yaml"), tmp_path / "runs")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "runs").exists()
