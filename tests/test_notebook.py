"""`rowwise.fit`: a frame in, a run out, as the commands make it."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from ingest.test_reader import Stream
from launching import rowwise as command
from launching import started, wait_for, wait_for_step
from pyarrow import parquet as pq
from small import WORLD

import rowwise
from rowwise.base.errors import DataError, SpecError
from rowwise.cli.notebook import FittedRun, to_table
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import read

SHORT = {"train.steps": 2, "train.threads": 1, "log.every": 1}
ROWS = 400


def clicks(rows=ROWS):
    table = WORLD.rows(0, rows).select(["label", "user", "item", "d0"])
    city = pa.array([("AT", "BR", "CI")[user % 3] for user in table["user"].to_pylist()])
    return table.append_column("city", city)


def as_categories(frame):
    cities = frame["city"].astype(pd.CategoricalDtype(["CI", "AT", "BR", "none of them"]))
    users = frame["user"].astype("Int64").mask(frame.index % 7 == 0)
    return frame.assign(city=cities, user=users, label=frame["label"].astype(bool))


FRAMES = {
    "arrow": lambda t: t,
    "stream": Stream,
    "polars": pl.from_arrow,
    "pandas": lambda t: t.to_pandas(),
    "categories": lambda t: as_categories(t.to_pandas()),
    "index": lambda t: t.to_pandas().set_index("user"),
    "part": lambda t: t.to_pandas().sample(frac=0.9, random_state=1),
}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit") / "runs"
    return rowwise.fit(clicks(), label="label", folder=folder, set=SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FRAMES)
def test_any_frame_is_trained_on_and_predicted(kind, tmp_path):
    frame = FRAMES[kind](clicks())
    run = rowwise.fit(frame, label="label", folder=tmp_path, name=kind, set=SHORT)
    assert run.folder == tmp_path / kind / "1"
    assert run.card.label == "label"
    assert {"auc", "loss"} <= run.test.keys()
    found = run.predict(frame)
    assert found.shape == (to_table(frame).num_rows,)
    assert ((found > 0) & (found < 1)).all()


@pytest.mark.slow
def test_it_is_what_the_commands_do(fitted, tmp_path):
    """The recipe trains to the same bits, and predictions are those of the command."""
    pq.write_table(clicks().drop_columns(["label"]), tmp_path / "new.parquet")
    done = command(tmp_path, "predict", str(fitted.folder), "--data", "parquet:new.parquet", "--out", "p.parquet")
    assert done.returncode == 0, done.stderr
    by_command = pq.read_table(tmp_path / "p.parquet")["label_probability"].to_numpy()
    assert (fitted.predict(clicks()) == by_command).all()
    changes = [text for name, value in SHORT.items() for text in ("--set", f"{name}={value}")]
    recipe = fitted.folder / "frame" / "label.yaml"
    done = command(tmp_path, "train", str(recipe), "--run", "again", *changes)
    assert done.returncode == 0, done.stderr
    assert FittedRun(tmp_path / "again").test == fitted.test
    assert (FittedRun(tmp_path / "again").predict(clicks()) == by_command).all()


@pytest.mark.slow
def test_runs_of_one_frame_have_the_same_rows(fitted):
    """So that reports compare them."""
    again = rowwise.fit(clicks(), label="label", folder=fitted.folder.parents[1], set=SHORT | {"seed": 5})
    assert again.folder.name == "2"
    datasets = {read(run.folder / "recipe.yaml").data.dataset for run in (fitted, again)}
    [rows] = (fitted.folder.parents[1] / "frames").iterdir()
    assert datasets == {f"parquet:{rows}"}
    with pytest.raises(DataError, match="bought"):
        rowwise.fit(clicks(), label="bought", folder=fitted.folder.parents[1])
    assert rows.exists()


def test_predictions_keep_the_order_of_rows(fitted):
    order = np.random.default_rng(0).permutation(ROWS)
    assert (fitted.predict(clicks().take(order)) == fitted.predict(clicks())[order]).all()
    with pytest.raises(DataError, match="frame: no rows"):
        fitted.predict(clicks().slice(0, 0))
    with pytest.raises(DataError, match="user"):
        fitted.predict(clicks().drop_columns(["user"]))


def test_a_notebook_shows_the_report(fitted):
    shown = fitted.report._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert shown.count('"') == 4
    assert fitted.report.path.is_file()
    assert "auc" in repr(fitted)


@pytest.mark.slow
def test_a_recipe_of_ones_own(fitted, tmp_path):
    """In place of the one that is written for the frame."""
    recipe = fitted.folder / "frame" / "label.yaml"
    run = rowwise.fit(clicks(), recipe=recipe, folder=tmp_path, set=[f"{k}={v}" for k, v in SHORT.items()])
    assert run.folder == tmp_path / "label" / "1"
    assert run.test == fitted.test
    with pytest.raises(SpecError, match="leave them out"):
        rowwise.fit(clicks(), label="label", recipe=recipe, folder=tmp_path)


@pytest.mark.parametrize(
    ("frame", "options", "said"),
    [
        (clicks(), {"label": "bought"}, "bought"),
        (clicks().slice(0, 0), {"label": "label"}, "frame: no rows"),
        (clicks().rename_columns(["label", "user", "user", "d0", "city"]), {}, "'user' occurs 2 times"),
        (clicks().to_pandas().rename(columns={"item": "user"}), {}, "frame: .*user"),
        (pd.DataFrame({"label": [0, 1], "mixed": ["a", 1]}), {}, "frame: .*mixed"),
        ([1, 2], {}, "frame: got list"),
        (clicks(), {"sparse": ["user"], "dense": "user"}, "two roles"),
        (clicks(), {"set": {"train.stesp": 1}}, "steps"),
        (clicks().drop_columns(["label"]), {}, "label=COLUMN"),
    ],
    ids=("label", "empty", "twice", "twice in pandas", "mixed", "list", "roles", "key", "no label"),
)
def test_what_is_wrong_is_one_line_and_leaves_nothing(frame, options, said, tmp_path):
    with pytest.raises((DataError, SpecError), match=said) as raised:
        rowwise.fit(frame, folder=tmp_path / "runs", **options)
    assert "\n" not in str(raised.value)
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]


def test_an_index_is_a_column_if_it_has_a_name():
    frame = pd.DataFrame({"a": [1, 2, 3]}, index=[7, 8, 9])
    assert to_table(frame).column_names == ["a"]
    assert to_table(frame.rename_axis("user")).to_pydict() == {"a": [1, 2, 3], "user": [7, 8, 9]}
    levels = frame.set_index(pd.MultiIndex.from_arrays([[1, 2, 3], [4, 5, 6]], names=["x", None]))
    assert set(to_table(levels).column_names) == {"a", "x"}


def test_lists_and_texts_of_polars_are_stored():
    made = to_table(pl.DataFrame({"a": ["x"], "b": [["y", "z"]], "c": [b"w"]}))
    assert made.schema.types == [pa.large_string(), pa.large_list(pa.large_string()), pa.large_binary()]


def test_a_frame_without_a_stream_is_none():
    with pytest.raises(DataError, match="__arrow_c_stream__"):
        to_table(SimpleNamespace(columns=["a"]))


SCRIPT = """
import sys, rowwise
from pyarrow import parquet
frame = parquet.read_table("rows.parquet")
try:
    changes = {"train.epochs": 4000, "train.steps": 100000, "data.workers": 1, "log.every": 1}
    rowwise.fit(frame, label="label", set=changes)
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.dist
def test_ctrl_c_leaves_a_run_that_goes_on_and_no_process(tmp_path):
    pq.write_table(clicks(4000), tmp_path / "rows.parquet")
    (tmp_path / "notebook.py").write_text(SCRIPT)
    run = tmp_path / "runs" / "label" / "1"
    with started(tmp_path, program=("notebook.py",)) as process:
        wait_for_step(run, 3)
        os.killpg(process.pid, signal.SIGINT)  # as a notebook's stop button does
        _, said = process.communicate(timeout=60)
        assert process.returncode == 7, said
    assert f"rowwise resume {run.relative_to(tmp_path)}" in said

    def ended():
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(ended)
    steps = FittedRun(run).outcome.steps
    resumed = TrainingRun.resume(run, [f"train.steps={steps + 3}", "data.workers=null"])
    assert resumed.go().steps == steps + 3
